"""PagedEviction (Chitty-Venkata et al. 2025, arXiv 2509.04377, section 4): evict whole blocks, no attention needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.cache.edits import KEEP_ALL, Decision, Evict
from kvassay.errors import BudgetError
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Protection
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class PagedEviction(Policy):
    """Drop the blocks of lowest mean ||V|| / ||K||, the same ones in every layer and head.

    One decision for all layers and heads is what lets a shared block table free the memory.
    block: tokens per evicted block (paper: 16); must be the cache's block size for blocks to be freed
    interval: generated tokens between two decisions in decode; equal to `block` as published
    prefill_unit: "block" evicts whole blocks after prefill; "token" evicts tokens and compacts, which
        comes to what the paper does before paging
    """

    block: int = 16
    interval: int = 16
    prefill_unit: Literal["block", "token"] = "block"

    per_head: ClassVar[frozenset[str]] = frozenset({"score"})
    card: ClassVar[Card] = Card(
        name="paged-eviction",
        effects=frozenset({Effect.EVICT}),
        source="PagedEviction, arXiv 2509.04377 section 4",
        summary="evicts the blocks of lowest mean ||V||/||K||, the same in all layers and heads",
        when=frozenset({When.AFTER_PREFILL, When.EVERY_N}),
        unit="block",
        evidence=frozenset({Evidence.KEYS, Evidence.VALUES}),
        reconstruction=True,
        gaps=(
            "known from the abstract and public summaries of section 4; its algorithm listing was not at hand",
            "whether one decision holds for all layers: taken so, since a shared block table frees nothing otherwise; "
            "scores are averaged over all layers and KV heads without rescaling",
            "whether block scores are kept or recomputed: recomputed at each decision and charged as a scan",
        ),
        deviations=(
            "prefill evicts whole blocks by default; the paper evicts tokens before they are paged "
            "(prefill_unit='token' does so after, and pays for the compaction)",
            "the common protection applies: a block with a protected token stays",
            "decides every `interval` generated tokens, not at the step where a block fills: up to one block later",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, block=1, interval=1)
        one_of(self, "prefill_unit", "block", "token")

    def not_applicable(self, context: int, longest: int, budget: Allowance) -> str | None:
        """Where blocks with protected tokens, and the one still filling, hold more than the budget."""
        if budget.spares(longest):
            return None
        tokens, later = budget.tokens, range(self.interval, longest - context + 2, self.interval)
        lengths = [context, *(context + n for n in later)]
        if self.prefill_unit == "token":  # then packed: slots count on from the budget
            lengths = [min(context, tokens) + n for n in later]
        most = max((self._least(length, budget.protection) for length in lengths if length > tokens), default=0)
        if most <= tokens:
            return None
        return (
            f"at most {tokens} tokens may be held, {most} are in blocks of {self.block} that stay (still filling, with "
            "a protected token, or the last one): raise the budget or protect fewer"
        )

    def _least(self, length: int, protection: Protection) -> int:
        """Tokens left of so many, when every block is gone that may go."""
        free = (length - protection.recent) // self.block - -(-protection.sink // self.block)
        return length - self.block * max(0, min(free, (length - 1) // self.block))

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """||V|| / ||K|| per token: [kv_heads, tokens]."""
        return layer.values.norm(dim=-1) / layer.keys.norm(dim=-1).clamp(min=1e-6)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Evict as many of the worst blocks as bring every head inside the budget; `BudgetError` if too few may go."""
        most = max((int(layer.alive.sum(1).max()) for layer in cache.layers.values()), default=0)
        if most <= budget.tokens:
            return KEEP_ALL
        compact = self.prefill_unit == "token" and cache.length <= cache.context
        unit = 1 if compact else self.block
        mean, free = block_means(cache, scores, unit)
        need, may = -(-(most - budget.tokens) // unit), min(int(free.sum()), (most - 1) // unit)
        if may < need:
            raise BudgetError(
                f"policy 'paged-eviction': budget {budget.tokens} of {most} tokens needs {need} blocks of {unit} "
                f"to go, {may} may (full, without a protected token, not the last one held)"
            )
        gone = torch.zeros_like(free)
        gone[mean.masked_fill(~free, torch.inf).sort(stable=True).indices[:need]] = True
        edits = {
            index: [Evict(layer.alive & ~gone[layer.slots.clamp(min=0) // unit])]
            for index, layer in cache.layers.items()
        }
        return Decision(edits, compact=compact)


def block_means(cache: CacheView, scores: Mapping[int, Tensor], unit: int) -> tuple[Tensor, Tensor]:
    """Mean score of each block over its live tokens, all heads and layers; and which blocks may be evicted.

    Both [blocks]. A block may go if it is full, holds a live token, and holds no protected one.
    """
    top = max(int(layer.slots.max()) for layer in cache.layers.values())
    blocks = top // unit + 1
    total, count, kept = torch.zeros(3, blocks, dtype=torch.float64)
    for index, layer in cache.layers.items():
        alive = layer.alive
        ordinal = layer.slots[alive] // unit
        total.index_add_(0, ordinal, scores[index][alive].double())
        count.index_add_(0, ordinal, torch.ones(len(ordinal), dtype=torch.float64))
        kept.index_add_(0, ordinal, layer.protected[alive].double())
    full = (torch.arange(blocks) + 1) * unit <= top + 1
    return total / count, full & (count > 0) & (kept == 0)
