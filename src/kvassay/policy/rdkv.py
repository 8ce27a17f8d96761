"""RDKV (Zhang et al. 2026, arXiv 2605.08317): eviction and quantisation as one allocation of bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvassay.cache.edits import Decision, Quantize
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy import distortion
from kvassay.policy.allocation import Table, bisect, greedy, keep_best
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, Evidence
from kvassay.policy.checks import at_least, enough_queries, one_of
from kvassay.policy.views import CacheView, LayerView

ACTIONS = {"full": (0, 2, 4, 8, 16), "three": (0, 4, 16), "evict": (0, 16), "quantise": (2, 4, 8, 16)}


@dataclass(frozen=True)
class RDKV(Policy):
    """Give every value token and key channel of a KV head a width from {0, 2, 4, 8, 16}; 0 drops it.

    window: last prompt queries that judge (paper: 32)
    kernel: odd width of the average pooling of token weights (paper: 5)
    key_share: share of the bits that goes to keys (paper: 0.5)
    actions: widths allowed: full, three {0,4,16}, evict {0,16}, quantise {2,4,8,16}
    channel_weight: |q| |k| / sqrt(d) as the paper writes, or its square as the code computes
    tail: divide a late token's weight by the number of queries that can see it (code)
    allocator: exact steps by gain, or the paper's bisection with its 1 % tolerance
    clamp_zero: clamp the zero point into the code range before rounding (code)
    table: published distortion table, by model (`kvassay.policy.distortion`)
    """

    window: int = 32
    kernel: int = 5
    key_share: float = 0.5
    actions: Literal["full", "three", "evict", "quantise"] = "full"
    channel_weight: Literal["linear", "squared"] = "squared"
    tail: bool = True
    allocator: Literal["greedy", "bisect"] = "greedy"
    clamp_zero: bool = False
    table: str = "default"

    card: ClassVar[Card] = Card(
        name="rdkv",
        effects=frozenset({Effect.EVICT, Effect.QUANTIZE}),
        source="RDKV, arXiv 2605.08317 and knapsack_solver.py, obkv_fast.py of Junkai1860/RDKV",
        summary="mixed-bit values per token and keys per channel, 0 bits evicts; bits go where distortion falls most",
        unit="value token, key channel",
        evidence=frozenset({Evidence.QUERIES, Evidence.ATTENTION, Evidence.KEYS}),
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        budgets=frozenset({"bytes"}),
        deviations=(
            "protected tokens count as infinitely heavy; the paper protects none",
            "exact greedy allocation by default; the published bisection may end over the budget",
            "scales, indices and padding are counted where the paper's budget leaves them out",
        ),
        limits=(
            "compresses the prompt once; a long generation stays raw and outgrows what was saved",
            "judges by the last prompt queries: a question that is not among them is not seen",
            "heads hold different tokens, so only per-head tables or a packed copy free memory",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, window=1, kernel=1)
        for name, allowed in (("actions", ACTIONS), ("table", distortion.PUBLISHED)):
            one_of(self, name, *allowed)
        one_of(self, "channel_weight", "linear", "squared")
        one_of(self, "allocator", "greedy", "bisect")
        if self.kernel % 2 == 0:
            raise PolicyError(f"policy 'rdkv': kernel={self.kernel}, must be odd")
        if not 0 < self.key_share < 1:
            raise PolicyError(f"policy 'rdkv': key_share={self.key_share}, must be in (0, 1)")

    @property
    def queries_needed(self) -> int:
        """The window's."""
        return self.window

    def tables(self, memory: Memory) -> tuple[Table, Table]:
        """Distortion of keys and of values."""
        keys, values = distortion.PUBLISHED[self.table]
        return distortion.table(keys), distortion.table(values)

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Token weights: attention of the window summed over the group, per query that sees, smoothed."""
        count = layer.queries(self.window).q.shape[1]
        enough_queries(self, layer, count, self.window)
        weight = layer.group_sum(layer.attention_sum(self.window))
        if self.tail:
            weight = weight / (layer.length - layer.positions).clamp(min=1, max=count)
        half = min(self.kernel // 2, layer.tokens - 1)
        weight = functional.pad(weight[None], (half, half), mode="reflect")[0]
        return functional.avg_pool1d(weight, 2 * half + 1, stride=1)

    def channel_weights(self, layer: LayerView) -> Tensor:
        """How much the window's queries use each key channel: [kv_heads, k_dim]."""
        q, keys = layer.queries(self.window).q, layer.keys.masked_fill(~layer.alive[..., None], 0.0)
        asked = layer.group_sum(q.square().mean(1)) / (q.shape[0] // layer.kv_heads)
        squared = asked * keys.square().sum(1) / layer.alive.sum(1, keepdim=True)
        return squared if self.channel_weight == "squared" else squared.sqrt()

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Widths of values first, then of the kept tokens' key channels, each head within its own bits."""
        key_table, value_table = (self._allowed(table) for table in self.tables(memory))
        return Decision(
            {
                index: [self._edit(layer, scores[index], key_table, value_table, budget)]
                for index, layer in cache.layers.items()
            }
        )

    def _edit(self, layer: LayerView, weight: Tensor, keys: Table, values: Table, budget: Allowance) -> Quantize:
        bits = 2 * budget.tokens * 16
        weight = weight.masked_fill(layer.protected, torch.inf).masked_fill(~layer.alive, 0.0)
        value_bits = self._allocate(weight, values, int((1 - self.key_share) * bits))
        value_bits = torch.where(layer.alive, value_bits, 0)
        value_bits = keep_best(value_bits, weight.masked_fill(~layer.alive, -1.0), values)
        lost = (layer.protected & (value_bits == 0)).sum()
        if int(lost):
            raise BudgetError(
                f"policy 'rdkv': budget {budget.tokens} tokens drops {int(lost)} protected ones; raise it"
            )
        kept = (value_bits > 0).sum(1)
        dim, channels = layer.layer.kv.k_dim, self.channel_weights(layer)
        per_head = [
            self._allocate(row[None], keys, int(self.key_share * bits * dim / n))
            for row, n in zip(channels, kept.tolist(), strict=True)
        ]
        key_bits = keep_best(torch.cat(per_head), channels, keys)
        if 8 in keys:  # the published packing stores 16-bit channels in 8
            key_bits = key_bits.clamp(max=8)
        return Quantize(value_bits, key_bits, key_axis="channel", clamp_zero=self.clamp_zero)

    def _allocate(self, weight: Tensor, table: Table, bits: int) -> Tensor:
        return greedy(weight, table, bits) if self.allocator == "greedy" else bisect(weight, table, bits)

    def _allowed(self, table: Table) -> Table:
        return {width: table[width] for width in ACTIONS[self.actions]}
