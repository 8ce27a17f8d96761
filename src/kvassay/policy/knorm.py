"""Key norm (Devoto et al. 2024, arXiv 2406.11430): keys of small norm draw much attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Score = minus the L2 norm of the key as cached."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="knorm",
        effects=frozenset({Effect.EVICT}),
        source="arXiv 2406.11430; scores as KnormPress of kvpress 0.5.5",
        summary="keeps the keys of smallest L2 norm",
        evidence=frozenset({Evidence.KEYS}),
        deviations=("every layer is compressed alike; the paper leaves the first two layers dense in its long tests",),
    )

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """-||k||: [kv_heads, tokens]."""
        return -layer.keys.norm(dim=-1)
