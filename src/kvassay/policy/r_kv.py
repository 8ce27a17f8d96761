"""R-KV (Cai et al. 2025, arXiv 2505.24133, section 3): importance less redundancy, for long reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvassay.cache.edits import Decision
from kvassay.errors import PolicyError
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import affordable, at_least, enough_queries, more_than_forced
from kvassay.policy.views import CacheView, LayerView

COSINES = 1 << 24
"""Cosines [kv_heads, rows, tokens] held at once."""


@dataclass(frozen=True)
class RKV(Policy):
    """Keep tokens that the last queries attend to and that no later key repeats; the window itself always.

    window: newest tokens, whose queries judge and which are kept, inside the budget
    kernel: odd width of the max pooling of attention along the tokens
    balance: weight of importance; redundancy has 1 - balance (paper: 0.1)
    similar: cosine from which a later key counts as a repetition (of these, the last is not held against a token)
    interval: generated tokens between two decisions; so up to budget + interval tokens are held
    """

    window: int = 8
    kernel: int = 7
    balance: float = 0.1
    similar: float = 0.5
    interval: int = 128

    per_head: ClassVar[frozenset[str]] = ALL_APART
    compares_tokens: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="r-kv",
        effects=frozenset({Effect.EVICT}),
        source="R-KV, arXiv 2505.24133 section 3",
        summary="keeps what the last queries attend to, less what other keys repeat; decides every `interval` tokens",
        when=frozenset({When.AFTER_PREFILL, When.EVERY_N}),
        evidence=frozenset({Evidence.QUERIES, Evidence.ATTENTION, Evidence.KEYS}),
        reconstruction=True,
        gaps=(
            "known from the paper's formulas; its code was not at hand",
            "query heads of a KV head: their maximum, after the softmax",
            "the most recent similar key is spared by zeroing its column for that row, so one of a run of copies stays",
            "redundancy is the softmax over tokens of the mean cosine",
        ),
        limits=(
            "compares every key with every other: quadratic work in what is held, refused above 65,536 tokens",
            "holds budget + interval tokens at peak",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, window=1, kernel=1, interval=1)
        if self.kernel % 2 == 0:
            raise PolicyError(f"policy 'r-kv': kernel={self.kernel}, must be odd")
        if not 0 <= self.balance <= 1:
            raise PolicyError(f"policy 'r-kv': balance={self.balance}, must be in [0, 1]")

    @property
    def queries_needed(self) -> int:
        """The window's."""
        return self.window

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """balance x importance - (1 - balance) x redundancy; the window above all: [kv_heads, tokens]."""
        count = layer.queries(self.window).q.shape[1]
        enough_queries(self, layer, count, self.window)
        own = layer.alive & (layer.positions >= layer.length - self.window)
        heads = (layer.attention_sum(self.window) / count).unflatten(0, (layer.kv_heads, -1))
        importance = heads.amax(1).masked_fill(own | ~layer.alive, 0.0)
        importance = functional.max_pool1d(importance, self.kernel, stride=1, padding=self.kernel // 2)
        score = self.balance * importance - (1 - self.balance) * self.redundancy(layer)
        score = score.masked_fill(~layer.alive, 0.0)
        return score.masked_fill(own, float(score.max()) + 1)

    def redundancy(self, layer: LayerView) -> Tensor:
        """Softmax over tokens of the mean cosine to the other keys: [kv_heads, tokens].

        A column is summed over rows; row i leaves out itself and the last key similar to it. Streamed over rows.
        Raises `PolicyError` where more are held than may be compared.
        """
        affordable(self, layer, layer.tokens)
        alive = layer.alive
        unit = functional.normalize(layer.keys, dim=-1).masked_fill(~alive[..., None], 0.0)
        heads, tokens = alive.shape
        total = unit.new_zeros(heads, tokens)
        rows = max(1, COSINES // max(1, heads * tokens))
        for first in range(0, tokens, rows):
            cosine = unit[:, first : first + rows] @ unit.transpose(1, 2)
            count = cosine.shape[1]
            own = torch.arange(first, first + count)
            cosine[:, torch.arange(count), own] = 0.0
            later = torch.where(cosine > self.similar, torch.arange(tokens), -1).amax(-1, keepdim=True)
            spared = cosine.gather(2, later.clamp(min=0)).masked_fill(later < 0, 0.0)
            cosine.scatter_add_(2, later.clamp(min=0), -spared)
            total += cosine.sum(1)
        mean = total / alive.sum(1, keepdim=True).clamp(min=1)
        return torch.softmax(mean.masked_fill(~alive, -torch.inf), dim=-1)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep the top-k per KV head; `BudgetError` if the window alone fills the budget."""
        more_than_forced(self, cache, budget, "window")
        return super().decide(cache, scores, memory, budget)
