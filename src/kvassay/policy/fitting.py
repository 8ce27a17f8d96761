"""How many tokens to keep so that they fit into bytes once they are encoded."""

from __future__ import annotations

from collections.abc import Callable

from kvassay.cache.apply import size_after
from kvassay.cache.edits import Decision
from kvassay.errors import BudgetError
from kvassay.policy.budget import Allowance
from kvassay.policy.views import CacheView

TRIALS = 6
"""Decisions that are tried: bytes grow nearly in proportion to tokens, so the first few come close."""
CLOSE = 0.01
"""Share of the bytes that may stay unused."""


def tokens_for_bytes(
    trial: Callable[[int], Decision], cache: CacheView, budget: Allowance, name: str
) -> tuple[int, Decision]:
    """The most tokens found whose decision comes to at most the budget's bytes, and that decision.

    trial: the decision that keeps so many tokens per KV head and layer; its size is the cache's own count of it.
    Within `CLOSE` of the budget, or all tokens. Raises `BudgetError` if even the protected tokens do not fit.
    """
    assert budget.budget is not None
    dense = sum(_size(cache, Decision(), index) for index in cache.layers)
    target, least = budget.budget.amount * dense, max(2, budget.protection.sink + budget.protection.recent + 1)
    best: tuple[int, Decision] | None = None
    low, high, tokens = least - 1, budget.context + 1, budget.context
    for _ in range(TRIALS):
        decision = trial(tokens)
        size = sum(_size(cache, decision, index) for index in cache.layers)
        if size <= target:
            low, best = tokens, (tokens, decision)
        else:
            high = tokens
        if high - low <= 1 or (low == tokens and size >= (1 - CLOSE) * target):
            break
        tokens = min(max(int(tokens * target / size), low + 1), high - 1)
    if best is None:
        raise BudgetError(
            f"policy '{name}': {budget.budget.label} is {target:.0f} bytes, and {tokens} tokens a head come to "
            f"{size:.0f}; raise the budget or protect fewer than {least - 1} tokens"
        )
    return best


def _size(cache: CacheView, decision: Decision, index: int) -> float:
    layer = cache.layers[index]
    return size_after(layer.layer, layer.data, decision.edits.get(index, ()), layer.element_bytes)
