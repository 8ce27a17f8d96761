"""Merge on eviction: fold each evicted token's value into the kept token with the most similar key.

Not one paper's method. The nearest kept key by cosine is D2O's (arXiv 2406.13035) and of kvpress's MergingPress;
counting the merged tokens in the attention logit is Token Merging's proportional attention (arXiv 2210.09461).
With identical keys the merge is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvassay.cache.edits import Bias, Decision, Edit, Evict, Merge
from kvassay.policy.base import ALL_APART, Memory, Policy, protected_top_k
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, Evidence
from kvassay.policy.checks import affordable, at_least, one_of
from kvassay.policy.knorm import KeyNorm
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class NearestMerge(Policy):
    """Evict by a scorer, then merge: the target's value becomes the mean of its cluster, its logit gains log(count).

    scorer: who decides what is evicted, "knorm" or "snapkv" (with its defaults)
    similarity: least cosine of two keys for a merge; below it the token is just evicted
    chunk: evicted tokens compared with all kept keys per pass; bounds memory only
    """

    scorer: Literal["knorm", "snapkv"] = "knorm"
    similarity: float = 0.0
    chunk: int = 256

    per_head: ClassVar[frozenset[str]] = ALL_APART
    compares_tokens: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="nearest-merge",
        effects=frozenset({Effect.EVICT, Effect.MERGE}),
        source="own composition: nearest kept key as D2O (arXiv 2406.13035), log-count bias as Token Merging "
        "(arXiv 2210.09461)",
        summary="evicts by a scorer and merges evicted values into the kept token of most similar key",
        evidence=frozenset({Evidence.KEYS, Evidence.QUERIES, Evidence.ATTENTION}),
        approximates=frozenset({Approximates.VALUES, Approximates.LOGITS}),
        deviations=(
            "not D2O: no per-layer budgets, no running similarity threshold, plain means; keys are not merged",
            "any kept token may be a target, protected ones included",
        ),
        limits=("compares every evicted key with every kept one: quadratic work, refused above 65,536 tokens",),
    )

    def __post_init__(self) -> None:
        at_least(self, chunk=1, similarity=-1)
        one_of(self, "scorer", "knorm", "snapkv")

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """The scorer's score: [kv_heads, tokens]."""
        return (KeyNorm() if self.scorer == "knorm" else SnapKV()).score(layer, memory)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Merge, bias and evict in every layer that is over budget."""
        edits: dict[int, list[Edit]] = {}
        for index, layer in cache.layers.items():
            if layer.tokens > budget.tokens:
                keep = protected_top_k(scores[index], layer, budget.tokens)
                into = self.targets(layer, keep)
                merged = into >= 0
                count = torch.ones(into.shape).scatter_add_(1, into.clamp(min=0), merged.float())
                edits[index] = [Merge(into, torch.ones(into.shape)), Bias(count.log()), Evict(keep)]
        return Decision(edits)

    def targets(self, layer: LayerView, keep: Tensor) -> Tensor:
        """int64 [kv_heads, tokens]: view index of the kept token of most similar key; -1 for kept and unmerged ones.

        Raises `PolicyError` where there are more than may be compared.
        """
        affordable(self, layer, layer.tokens)
        unit = functional.normalize(layer.keys, dim=-1)
        kept, is_kept = _indices(keep)
        gone, is_gone = _indices(layer.alive & ~keep)
        base = _rows(unit, kept).masked_fill(~is_kept[..., None], 0.0).mT
        into = torch.full(keep.shape, -1)
        for start in range(0, gone.shape[1], self.chunk):
            part = slice(start, start + self.chunk)
            likeness = _rows(unit, gone[:, part]) @ base
            if not bool(is_kept.all()):
                likeness = likeness.masked_fill(~is_kept[:, None], -2.0)
            best = likeness.max(dim=-1)
            wanted = is_gone[:, part] & (best.values >= self.similarity)
            rows, columns = wanted.nonzero(as_tuple=True)
            into[rows, gone[:, part][rows, columns]] = kept[rows, best.indices[rows, columns]]
        return into


def _indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Per row, where a mask [kv_heads, tokens] is true, padded to the widest row; and which are no padding."""
    width = int(mask.sum(1).max())
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    return order, mask.gather(1, order)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [kv_heads, n] of x [kv_heads, tokens, dim]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
