"""H2O (Zhang et al. 2023, arXiv 2306.14048, section 4): heavy hitters by accumulated attention, and recent tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import Decision, Evict
from kvassay.errors import PolicyError
from kvassay.policy.base import ALL_APART, EVERY_QUERY, Memory, Policy, top_k_mask
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.checks import every_query
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class H2O(Policy):
    """Keep the tokens that all prompt queries attended to most, and the newest.

    recent: share of the budget that goes to the newest tokens (paper: half)
    """

    recent: float = 0.5

    per_head: ClassVar[frozenset[str]] = ALL_APART
    compares_tokens: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="h2o",
        effects=frozenset({Effect.EVICT}),
        source="H2O, arXiv 2306.14048 section 4, algorithm 1",
        summary="keeps what all prompt queries attended to, summed, and the newest tokens",
        evidence=frozenset({Evidence.QUERIES, Evidence.ATTENTION}),
        deviations=(
            "compresses once, after prefill; the paper also drops one token at every generated one",
            "sums over the query heads of a KV head, one set per KV head (the paper's models had no groups)",
            "sums, as the paper; ObservedAttentionPress of kvpress takes the mean over the queries that see a token, "
            "and keeps no newest ones",
        ),
        limits=("needs every prompt query: quadratic work, refused above 65,536 tokens",),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.recent < 1:
            raise PolicyError(f"policy 'h2o': recent={self.recent}, must be a share of the budget in [0, 1)")

    @property
    def queries_needed(self) -> int:
        """All of them: the sum runs over every query of the prompt."""
        return EVERY_QUERY

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Attention received from all prompt queries and the group's query heads: [kv_heads, tokens]."""
        every_query(self, layer, first=0)
        return layer.group_sum(layer.attention_sum(layer.length))

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep the newest `recent` share of the budget, then the heaviest."""
        newest = min(int(self.recent * budget.tokens), budget.tokens - budget.protection.sink)
        edits = {}
        for index, layer in cache.layers.items():
            if layer.tokens > budget.tokens:
                forced = layer.protected | (layer.alive & (layer.positions >= layer.length - newest))
                edits[index] = [Evict(top_k_mask(scores[index], layer.alive, forced, budget.tokens))]
        return Decision(edits)
