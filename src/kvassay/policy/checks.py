"""Parameter and budget checks that several policies share."""

from __future__ import annotations

from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.layout.model import Layer
from kvassay.policy.base import EVERY_QUERY, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.views import CacheView, LayerView


def at_least(policy: Policy, **minimum: float) -> None:
    """Raise `PolicyError` unless each named parameter is at least its minimum."""
    for name, least in minimum.items():
        value = getattr(policy, name)
        if value < least:
            raise PolicyError(f"policy '{policy.card.name}': {name}={value}, must be at least {least:g}")


def one_of(policy: Policy, name: str, *allowed: object) -> None:
    """Raise `PolicyError` unless the named parameter is one of the allowed values."""
    value = getattr(policy, name)
    if value not in allowed:
        raise PolicyError(
            f"policy '{policy.card.name}': {name}={value!r}, must be one of {', '.join(map(repr, allowed))}"
        )


def more_than_forced(policy: Policy, cache: CacheView, budget: Allowance, parameter: str) -> None:
    """Raise `BudgetError` where a method's own always-kept tokens would leave nothing to choose."""
    forced = int(getattr(policy, parameter))
    if any(layer.tokens > budget.tokens for layer in cache.layers.values()) and budget.tokens <= forced:
        raise BudgetError(
            f"policy '{policy.card.name}' always keeps {parameter}={forced} tokens, the budget is {budget.tokens} "
            f"of {budget.context}: nothing is left to choose; raise the budget or lower {parameter}"
        )


def enough_queries(policy: Policy, layer: LayerView, held: int, wanted: int) -> None:
    """Raise `EvidenceMissing` unless `held` queries are the last `wanted`, or all that the sequence has had."""
    if held < min(wanted, layer.length):
        raise EvidenceMissing(
            f"policy '{policy.card.name}' needs the last {wanted} queries of layer {layer.index}, there are {held}; "
            "record with a larger --q-tail"
        )


LONGEST_QUADRATIC = 65_536
"""Longest context, in tokens, at which a method is run whose work grows with the square of it, or which needs every
prompt query."""
GIB = 2**30


def too_long(policy: Policy, layer: Layer, tokens: int) -> str | None:
    """Why a policy is not run on so many tokens of a layer, with what that would take; None if it is.

    By what it declares: that it needs every prompt query (`Policy.queries_needed`), that it compares tokens.
    """
    if tokens <= LONGEST_QUADRATIC:
        return None
    every, dim = policy.queries_needed >= EVERY_QUERY, layer.kv.k_dim
    reasons = []
    if every:
        reasons.append(f"needs every prompt query ({layer.q_heads * tokens * dim * 4 / GIB:.1f} GiB in float32)")
    if policy.compares_tokens:
        work = (layer.q_heads if every else layer.kv.kv_heads) * tokens**2 / 2 * dim
        reasons.append(f"compares tokens with each other (about {work:.1e} multiply-adds)")
    if not reasons:
        return None
    return f"{' and '.join(reasons)}, per layer at {tokens} tokens; run on up to {LONGEST_QUADRATIC}"


def affordable(policy: Policy, layer: LayerView, tokens: int) -> None:
    """Raise `PolicyError` where so many tokens are too many for the policy: `too_long`."""
    if reason := too_long(policy, layer.layer, tokens):
        raise PolicyError(f"policy '{policy.card.name}' {reason}")


def every_query(policy: Policy, layer: LayerView, first: int) -> None:
    """Raise unless the queries of all positions from `first` on are there and scoring them all is affordable.

    `PolicyError` above `LONGEST_QUADRATIC` tokens; `EvidenceMissing` for a short record.
    """
    affordable(policy, layer, layer.length)
    held = layer.queries(layer.length).q.shape[1]
    if held < layer.length - first:
        raise EvidenceMissing(
            f"policy '{policy.card.name}' needs the queries of all {layer.length} tokens of layer {layer.index}, "
            f"the trace holds the last {held}; record with --q-tail {layer.length}"
        )
