"""Ada-SnapKV (Feng et al. 2024, arXiv 2407.11550): SnapKV's scores, one budget shared by a layer's heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import Decision, Evict
from kvassay.errors import PolicyError
from kvassay.policy.base import Memory, top_k_mask
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card
from kvassay.policy.checks import more_than_forced
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class AdaSnapKV(SnapKV):
    """SnapKV whose heads compete for the layer's tokens: heads with flat attention get more.

    floor: share of the even budget that every head keeps whatever the others score (paper: 0.2)
    """

    floor: float = 0.2

    per_head: ClassVar[frozenset[str]] = frozenset({"score"})
    card: ClassVar[Card] = dataclasses.replace(
        SnapKV.card,
        name="adakv-snapkv",
        unit="token, head budget",
        source="Ada-KV, arXiv 2407.11550 section 3; allocation as AdaKVPress of kvpress 0.5.5",
        summary="SnapKV's scores, with the layer's budget shared out over its KV heads by score",
        deviations=(
            *SnapKV.card.deviations,
            "the floor is each head's own best tokens, kept before heads compete (kvpress); the paper mixes adaptive "
            "and even budgets in that proportion",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise PolicyError(f"policy 'adakv-snapkv': floor={self.floor}, must be a share in [0, 1]")

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep the layer's best (head, token) pairs: as many as the budget times its heads."""
        more_than_forced(self, cache, budget, "window")
        return Decision(
            {
                index: [Evict(self._keep(layer, scores[index], budget.tokens))]
                for index, layer in cache.layers.items()
                if layer.tokens > budget.tokens
            }
        )

    def _keep(self, layer: LayerView, score: Tensor, tokens: int) -> Tensor:
        safe = max(1, int(tokens * self.floor)) if self.floor > 0 else 0
        floor = top_k_mask(score, layer.alive, layer.protected, max(safe, int(layer.protected.sum(1).max())))
        flat = top_k_mask(score.reshape(1, -1), layer.alive.reshape(1, -1), floor.reshape(1, -1), tokens * len(score))
        return flat.view_as(score)
