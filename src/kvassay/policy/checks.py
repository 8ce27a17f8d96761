"""Parameter and budget checks that several policies share."""

from __future__ import annotations

from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.policy.base import Policy
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


LONGEST_EVERY_QUERY = 65_536
"""Longest context, in tokens, at which a method that scores every prompt query is run."""


def every_query(policy: Policy, layer: LayerView, first: int) -> None:
    """Raise unless the queries of all positions from `first` on are there and scoring them all is affordable.

    `PolicyError` above `LONGEST_EVERY_QUERY` tokens, with the work it would be; `EvidenceMissing` for a short record.
    """
    if layer.length > LONGEST_EVERY_QUERY:
        work = layer.layer.q_heads * layer.length**2 * layer.layer.kv.k_dim
        raise PolicyError(
            f"policy '{policy.card.name}' scores every prompt query: {layer.length} tokens are about {work:.1e} "
            f"multiply-adds a layer; it is run on up to {LONGEST_EVERY_QUERY} tokens"
        )
    held = layer.queries(layer.length).q.shape[1]
    if held < layer.length - first:
        raise EvidenceMissing(
            f"policy '{policy.card.name}' needs the queries of all {layer.length} tokens of layer {layer.index}, "
            f"the trace holds the last {held}; record with --q-tail {layer.length}"
        )
