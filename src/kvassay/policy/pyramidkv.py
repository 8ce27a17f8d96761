"""PyramidKV (Cai et al. 2024, arXiv 2406.02069): SnapKV scores, budgets that shrink from first to last layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import Decision, Evict
from kvassay.policy.base import Memory, protected_top_k
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card
from kvassay.policy.checks import at_least, more_than_forced
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.views import CacheView


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with an arithmetic series of budgets over the layers, whose mean is the budget.

    beta: steepness; the last layer gets about 1/beta of the budget (published code: 20)
    """

    beta: int = 20

    shares_over_layers: ClassVar[bool] = True
    card: ClassVar[Card] = dataclasses.replace(
        SnapKV.card,
        name="pyramidkv",
        source="PyramidKV, arXiv 2406.02069 section 4; budgets as PyramidKVPress of kvpress 0.5.5",
        summary="SnapKV's scores, with more tokens for lower layers and fewer for higher ones",
        deviations=(
            *SnapKV.card.deviations,
            "the series runs over the layers the policy acts on; in a hybrid these are the full ones alone, where "
            "kvpress numbers all layers and the mean is no longer the budget",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, beta=1)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep each layer's own number of tokens per KV head."""
        more_than_forced(self, cache, budget, "window")
        least = max(self.window, budget.protection.sink + budget.protection.recent)
        edits = {}
        for ordinal, (index, layer) in enumerate(sorted(cache.layers.items())):
            keep = self.layer_budget(ordinal, len(cache.layers), layer.tokens, budget.tokens, least)
            if layer.tokens > keep:
                edits[index] = [Evict(protected_top_k(scores[index], layer, keep))]
        return Decision(edits)

    def layer_budget(self, ordinal: int, layers: int, tokens: int, mean: int, least: int) -> int:
        """Tokens for the layer at `ordinal` of `layers`, `mean` on average and `least` at any; else `mean` for all."""
        low, high = mean / self.beta, mean * (2 - 1 / self.beta)
        if high >= tokens - self.window:
            high = tokens - self.window
            low = 2 * mean - high
        if layers == 1 or not high >= low >= least:
            return mean
        return round(high - ordinal * (high - low) / (layers - 1))
