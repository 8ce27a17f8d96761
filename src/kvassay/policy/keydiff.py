"""KeyDiff (Park et al. 2025, arXiv 2504.15364): keep keys unlike the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.views import LayerView

EPSILON = 1e-12
"""Least norm that is divided by."""


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Score = negative cosine similarity of a key to the mean of the normalised keys of its head."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
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
        keys, alive = layer.keys, layer.alive
        if not bool(alive.all()):
            keys = keys.masked_fill(~alive[..., None], 0.0)
        norm = keys.norm(dim=-1).clamp(min=EPSILON)
        # As products with the keys themselves: normalised copies of a long context do not fit beside it.
        anchor = (alive / norm)[:, None] @ keys / alive.sum(1).clamp(min=1)[:, None, None]
        likeness = (keys @ anchor.mT)[..., 0] / norm
        return -likeness / anchor.norm(dim=-1).clamp(min=EPSILON)
