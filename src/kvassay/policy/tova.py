"""TOVA (Oren et al. 2024, arXiv 2401.06104): the last token's attention, one set for all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.policy.base import Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class Tova(Policy):
    """Score = attention of the newest query, mean over all query heads of the layer; same for every KV head."""

    per_head: ClassVar[frozenset[str]] = frozenset({"decide"})
    card: ClassVar[Card] = Card(
        name="tova",
        effects=frozenset({Effect.EVICT}),
        source="TOVA, arXiv 2401.06104; scores as TOVAPress of kvpress 0.5.5",
        summary="keeps what the last query attends to, one set of tokens per layer",
        evidence=frozenset({Evidence.QUERIES, Evidence.ATTENTION}),
        deviations=("compresses once, after prefill (as kvpress); the paper drops one token at every step",),
    )

    @property
    def queries_needed(self) -> int:
        """The last one."""
        return 1

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Mean attention, by position so that ragged heads agree; the last token above all: [kv_heads, tokens]."""
        per_head = layer.group_sum(layer.attention(1)[:, 0]) / layer.layer.q_heads
        per_head = per_head.masked_fill(~layer.alive, 0.0)
        where = layer.positions.clamp(min=0)
        total = per_head.new_zeros(layer.length).index_add_(0, where.flatten(), per_head.flatten())
        total[-1] = total.max() + 1
        return total[where]
