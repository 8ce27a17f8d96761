"""SnapKV (Li et al. 2024, arXiv 2404.14469, section 4): attention of the prompt's last queries, pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from kvassay.cache.edits import Decision
from kvassay.errors import PolicyError
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.checks import at_least, enough_queries, more_than_forced
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep what the last `window` queries attend to, and the window itself.

    window: observation window in tokens; always kept, inside the budget
    kernel: odd width of the average pooling along the tokens before the window; 1 pools nothing
    """

    window: int = 64
    kernel: int = 5

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="snapkv",
        effects=frozenset({Effect.EVICT}),
        source="SnapKV, arXiv 2404.14469 section 4; scores as SnapKVPress of kvpress 0.5.5",
        summary="keeps what the last queries attend to (mean over window and query heads, average-pooled)",
        evidence=frozenset({Evidence.QUERIES, Evidence.ATTENTION}),
        deviations=(
            "one set per KV head, from the mean over its query heads, and average pooling (kvpress's definition); "
            "the paper's code selects per query head over repeated keys",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, window=1, kernel=1)
        if self.kernel % 2 == 0:
            raise PolicyError(f"policy 'snapkv': kernel={self.kernel}, must be odd")

    @property
    def queries_needed(self) -> int:
        """The window's."""
        return self.window

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Pooled mean attention of the window's queries; the window's own tokens above all: [kv_heads, tokens]."""
        count = layer.queries(self.window).q.shape[1]
        enough_queries(self, layer, count, self.window)
        own = layer.alive & (layer.positions >= layer.length - self.window)
        rows = layer.attention_sum(self.window) / count
        mass = layer.group_sum(rows) / (rows.shape[0] // layer.kv_heads)
        mass = mass.masked_fill(own | ~layer.alive, 0.0)
        pooled = functional.avg_pool1d(mass, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.masked_fill(own, float(pooled.max()) + 1)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep the top-k per KV head; `BudgetError` if the window alone fills the budget or the context."""
        more_than_forced(self, cache, budget, "window")
        return super().decide(cache, scores, memory, budget)
