"""Reference for eviction: keep what the recorded future really attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class Hindsight(Policy):
    """Score = attention mass that all future recorded queries put on a token, summed over its query heads."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="hindsight",
        effects=frozenset({Effect.EVICT}),
        source="reference arm",
        summary="keeps what the future queries attend to; no engine can run this",
        evidence=frozenset({Evidence.KEYS, Evidence.FUTURE_QUERIES}),
        reference=True,
        deviations=(
            "each future row is normalised over the compressed context alone: tokens that come later are not in it",
            "blind to values: a reference for scorers of attention mass, not a bound on quality",
        ),
    )

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Summed attention: [kv_heads, tokens]."""
        return layer.group_sum(layer.attend_sum(layer.future_queries()))
