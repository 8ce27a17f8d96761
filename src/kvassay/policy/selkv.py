"""SelKV (Bouyahiaoui et al. 2026, arXiv 2607.16213): evict, merge within the bucket, make up for the mass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvassay.cache.edits import Bias, Decision, Edit, Evict, Merge
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import Memory, Policy, top_k_mask
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, Evidence
from kvassay.policy.checks import at_least, enough_queries
from kvassay.policy.routing import likeness, route
from kvassay.policy.views import CacheView, LayerView

FLOOR = 1e-8
"""Least window attention of a merge target; targets below it are counted as floored."""


class Chosen(NamedTuple):
    """What stays of a layer: `kept` bool [tokens] for all heads, `own` bool [kv_heads, tokens], each head's targets."""

    kept: Tensor
    own: Tensor


@dataclass(frozen=True)
class SelKV(Policy):
    """Keep by window attention times value norm, one set per layer; fold each evicted value into a kept neighbour.

    window: last prompt queries that judge (paper: 32)
    recent: newest tokens always kept, inside the budget (paper: 16)
    kernel: odd width of the average pooling of scores (paper: 5)
    alpha: strength of the log bias that makes up for merged mass at decode (paper: 0.5; 0 leaves it out)
    """

    window: int = 32
    recent: int = 16
    kernel: int = 5
    alpha: float = 0.5

    card: ClassVar[Card] = Card(
        name="selkv",
        effects=frozenset({Effect.EVICT, Effect.MERGE}),
        source="SelKV, arXiv 2607.16213, equations 1-6 as read by T0nyN1/kv-cache-merging-limits (selkv.py)",
        summary="evicts per layer, merges values inside 32-token buckets by attention and likeness, adds a log bias",
        evidence=frozenset({Evidence.QUERIES, Evidence.ATTENTION, Evidence.VALUES, Evidence.ROW_LSE, Evidence.BUCKET}),
        approximates=frozenset({Approximates.VALUES, Approximates.LOGITS}),
        reconstruction=True,
        gaps=(
            "the paper's text was not at hand; two agreeing second-hand readings were",
            "query heads of a KV head are summed in every attention",
            "an evicted token whose bucket holds no kept earlier token of its head is dropped",
            "a head's targets are the kept tokens of its own top list, and the recent ones",
            "the newest tokens are left out of the ranking, so that every layer keeps the same number",
            "window attention of a target is floored at 1e-8; the ratio is not capped",
            "the bias is added before a soft-cap",
        ),
        limits=(
            "at tight budgets hardly a token finds a kept one in its bucket: plain eviction then; see routed_share",
            "no rule keeps position 0; see position_0_kept",
            "rewritten values cannot be shared as a prefix; exact copying suffers from blended values",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, window=1, recent=0, kernel=1, alpha=0)
        if self.kernel % 2 == 0:
            raise PolicyError(f"policy 'selkv': kernel={self.kernel}, must be odd")

    @property
    def queries_needed(self) -> int:
        """The window's."""
        return self.window

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Equation 1: pooled window attention times ||v||: [kv_heads, tokens]."""
        weighed = self.window_mass(layer) * layer.values.norm(dim=-1)
        return functional.avg_pool1d(weighed, self.kernel, stride=1, padding=self.kernel // 2)

    def window_mass(self, layer: LayerView) -> Tensor:
        """Attention from the window's queries and the group's heads, summed: [kv_heads, tokens]."""
        enough_queries(self, layer, layer.queries(self.window).q.shape[1], self.window)
        return layer.group_sum(layer.attention_sum(self.window))

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Evict, merge and bias every layer that is over budget."""
        edits: dict[int, list[Edit]] = {}
        facts: list[Mapping[str, float]] = []
        for index, layer in cache.layers.items():
            if layer.tokens > budget.tokens:
                edits[index], about = self._edits(layer, scores[index], budget.tokens)
                facts.append(about)
        mean = {name: sum(one[name] for one in facts) / len(facts) for name in facts[0]} if facts else {}
        return Decision(edits, facts=mean)

    def choose(self, layer: LayerView, score: Tensor, tokens: int) -> Chosen:
        """Equation 2: each head's best, united, cut to the best by mean score; the newest always."""
        newest = (layer.positions >= layer.length - self.recent) | layer.protected
        always = newest.any(0)
        free = tokens - int(always.sum())
        if free < 1:
            raise BudgetError(
                f"policy 'selkv' always keeps {int(always.sum())} tokens, the budget is {tokens}: nothing is left to "
                "choose; raise the budget or lower recent"
            )
        open_to = (~always).expand_as(score)
        own = top_k_mask(score, open_to, torch.zeros_like(open_to), free)
        union = own.any(0)
        mean = score.mean(0)[None]
        kept = top_k_mask(mean, union[None], torch.zeros_like(union)[None], free)[0] | always
        return Chosen(kept, (own | always) & kept)

    def _edits(self, layer: LayerView, score: Tensor, tokens: int) -> tuple[list[Edit], Mapping[str, float]]:
        if not bool(layer.alive.all()):
            raise PolicyError(f"policy 'selkv': the heads of layer {layer.index} hold different tokens already")
        kept, own = self.choose(layer, score, tokens)
        into = route(layer, own, kept)
        values = layer.values
        target = into.clamp(min=0)
        alike = likeness(values, target).clamp(min=0)
        routed = into >= 0
        into = torch.where(routed & (alike > 0), into, -1)
        mass = self.window_mass(layer)
        weight = torch.where(into >= 0, alike * mass, mass).clamp(min=FLOOR)
        added = torch.zeros_like(weight).scatter_add_(1, target, torch.where(into >= 0, weight, 0.0))
        ratio = ((weight + added) / weight).mean(0)
        bias = torch.where(kept, self.alpha * ratio.log(), 0.0).expand_as(score)
        gone, targets = (~kept).expand_as(routed), added > 0
        facts = {
            "routed_share": float(routed[gone].float().mean()),
            "gate_mean": float(alike[routed].mean()) if bool(routed.any()) else 0.0,
            "floored_targets": float((targets & (mass < FLOOR)).sum()),
            "position_0_kept": float(kept[0]),
        }
        edits: list[Edit] = [Merge(into, weight)] if bool((into >= 0).any()) else []
        return [*edits, Bias(bias), Evict(kept)], facts
