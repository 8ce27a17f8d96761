"""Keep the most recent tokens; sinks only as far as the experiment protects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.card import Card, Effect
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class Recency(Policy):
    """Score = position. The budget applies once, after prefill; generated tokens add to it."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="recency",
        effects=frozenset({Effect.EVICT}),
        source="control arm (least recently written)",
        summary="keeps the most recent tokens",
    )

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Position as float: [kv_heads, tokens]."""
        return layer.positions.float()
