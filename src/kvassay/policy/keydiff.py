"""KeyDiff (Park et al. 2025, arXiv 2504.15364): keep keys unlike the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from kvassay.policy.base import Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Score = negative cosine similarity of a key to the mean of the normalised keys of its head."""

    card: ClassVar[Card] = Card(
        name="keydiff",
        effects=frozenset({Effect.EVICT}),
        source="KeyDiff, arXiv 2504.15364; scores as KeyDiffPress of kvpress 0.5.5",
        summary="keeps keys that differ most from the mean direction of all keys",
        evidence=frozenset({Evidence.KEYS}),
        deviations=("scores the whole prompt at once; the paper compresses block by block during prefill",),
    )

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """In [-1, 1]: [kv_heads, tokens]."""
        keys = layer.keys
        alive = layer.alive[..., None]
        unit = functional.normalize(keys, dim=-1).masked_fill(~alive, 0.0)
        anchor = unit.sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp(min=1)
        return -functional.cosine_similarity(keys, anchor, dim=-1)
