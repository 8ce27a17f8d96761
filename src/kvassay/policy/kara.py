"""KARA (Han et al. 2026, arXiv 2607.01237), reconstructed: compress each window of generated tokens once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.cache.edits import KEEP_ALL, Decision, Evict
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, enough_queries, one_of
from kvassay.policy.token2chunk import Order, token2chunk
from kvassay.policy.views import CacheView, LayerView

LAST = 8
"""Queries of the `last` scorer."""


@dataclass(frozen=True)
class Kara(Policy):
    """Every `interval` generated tokens, keep a share of exactly those, by attention inside them; never the prompt.

    interval: tokens of a window; a multiple of the block size frees whole blocks
    share: of the kept tokens, those that always stay aside, that are chosen one by one before gaps are filled
    longest: longest chunk filled between two chosen tokens; 1 turns Token2Chunk off
    guard: last tokens of the window that always stay
    scorer: attention inside the window without a causal mask, with one, or of the last 8 queries alone
    order: gaps by value per token, or the cheapest first
    """

    interval: int = 256
    share: float = 0.5
    longest: int = 16
    guard: int = 1
    scorer: Literal["bidirectional", "causal", "last"] = "bidirectional"
    order: Order = "value"

    card: ClassVar[Card] = Card(
        name="kara",
        effects=frozenset({Effect.EVICT}),
        source="KARA, arXiv 2607.01237, from its abstract and public summaries",
        summary="evicts inside each window of newly generated tokens, once, by attention among them; prompt untouched",
        when=frozenset({When.EVERY_N}),
        evidence=frozenset({Evidence.KEYS, Evidence.QUERIES}),
        budgets=frozenset({"per_window"}),
        reconstruction=True,
        gaps=(
            "the full text was not at hand: window, candidate share, chunk length and the order of gaps are ours",
            "importance is summed over all query heads of a layer: one list per layer",
            "queries of the window are kept in a ring and counted as state; the paper recomputes them",
            "leftover budget goes to the next-best single tokens, so every layer keeps equally many",
        ),
        limits=(
            "never touches the prompt: nothing is gained where prompts are long and answers short",
            "memory grows without bound, at the rate of what is kept; up to a window more is held",
            "a statement that its own window ignores is lost: the workload needle_generated asks for such",
        ),
        deviations=(
            "fixed windows per sequence (the accuracy experiments); the engine's trigger is periodic over the batch",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, interval=2, longest=1, guard=0)
        one_of(self, "scorer", "bidirectional", "causal", "last")
        one_of(self, "order", "value", "cost")
        if not 0 < self.share <= 1:
            raise PolicyError(f"policy 'kara': share={self.share}, must be in (0, 1]")

    def not_applicable(self, context: int, longest: int, budget: Allowance) -> str | None:
        """Where fewer tokens are generated than one window holds."""
        if longest - context >= self.interval:
            return None
        return f"at most {longest - context} tokens come after the context, a window is {self.interval}"

    @property
    def queries_needed(self) -> int:
        """The window's."""
        return self.interval

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Attention that the window's tokens get from the window, all heads together; 0 outside: [kv_heads, tokens]."""
        window = layer.alive & (layer.positions >= layer.length - self.interval)
        width = int(window.sum(1).min())
        if width != int(window.sum(1).max()):
            raise PolicyError(f"policy 'kara': the heads of layer {layer.index} hold different tokens of the window")
        keys = layer.keys[window].view(layer.kv_heads, width, -1)
        importance = self.importance(layer, keys).expand(layer.kv_heads, -1)
        return torch.zeros_like(window, dtype=keys.dtype).masked_scatter(window, importance.contiguous())

    def importance(self, layer: LayerView, keys: Tensor) -> Tensor:
        """[width] of keys [kv_heads, width, dim]: softmax over the window alone, summed over queries and heads."""
        q = layer.queries(self.interval).q
        width = keys.shape[1]
        enough_queries(self, layer, q.shape[1], width)
        q = q[:, -min(width, LAST if self.scorer == "last" else width) :]
        rows = q.reshape(layer.kv_heads, -1, q.shape[-1]) @ keys.mT * layer.layer.scale
        if self.scorer != "bidirectional":
            at = torch.arange(width - q.shape[1], width)[:, None]
            unseen = torch.arange(width) > at
            rows = rows.view(layer.kv_heads, -1, *unseen.shape).masked_fill(unseen, -torch.inf)
        return torch.softmax(rows, -1).view(-1, width).sum(0)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Keep everything before the window and the chosen part of it, packed together."""
        first = cache.length - self.interval
        if first < cache.context:
            return KEEP_ALL
        keep = self.kept(budget)
        edits = {}
        for index, layer in cache.layers.items():
            inside = (layer.positions[0] >= first).nonzero().flatten()
            forced = (layer.protected[0, inside] | (layer.positions[0, inside] >= cache.length - self.guard)).nonzero()
            if len(forced) > keep:
                raise BudgetError(f"policy 'kara': {len(forced)} tokens of a window always stay, {keep} may; raise it")
            chosen = token2chunk(
                scores[index][0, inside],
                keep,
                share=self.share,
                longest=self.longest,
                order=self.order,
                forced=forced.flatten().tolist(),
            )
            mask = torch.ones(layer.tokens, dtype=torch.bool)
            mask[inside] = chosen
            edits[index] = [Evict(mask)]
        return Decision(edits, compact=True)

    def kept(self, budget: Allowance) -> int:
        """Tokens of a window that stay."""
        assert budget.budget is not None
        amount = budget.budget.amount
        return math.ceil(amount * self.interval) if amount <= 1 else int(amount)
