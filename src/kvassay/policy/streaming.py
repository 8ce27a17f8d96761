"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453, section 3.2): attention sinks and a recent window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import Decision
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect
from kvassay.policy.checks import at_least, more_than_forced
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class Streaming(Policy):
    """The first `sink` tokens and the most recent ones, as many as the budget allows.

    sink: tokens at the start that always stay, inside the budget (paper: 4)
    """

    sink: int = 4

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="streaming",
        effects=frozenset({Effect.EVICT}),
        source="StreamingLLM, arXiv 2309.17453 section 3.2; kept set as StreamingLLMPress of kvpress 0.5.5",
        summary="keeps the first `sink` tokens and the most recent ones",
        deviations=(
            "keys keep the rotation of their true position; the paper renumbers positions inside the cache",
            "compresses once, after prefill; the paper rolls the window at every generated token",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, sink=0)

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Position, with the sinks above all others: [kv_heads, tokens]."""
        p = layer.positions
        return p.masked_fill((p >= 0) & (p < self.sink), layer.length).float()

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep the top-k; `BudgetError` if the sinks alone fill the budget."""
        more_than_forced(self, cache, budget, "sink")
        return super().decide(cache, scores, memory, budget)
