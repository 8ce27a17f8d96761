"""Parameter and budget checks that several policies share."""

from __future__ import annotations

from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.views import CacheView


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
