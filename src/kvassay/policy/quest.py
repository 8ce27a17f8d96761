"""Quest (Tang et al. 2024, arXiv 2406.10774, section 3): read the pages whose key range bounds the query best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.policy.base import Memory
from kvassay.policy.blocks import BlockSelector
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import one_of
from kvassay.policy.views import BlockView, LayerView

TOGETHER = 4096
"""Pages looked at together: as many as stay in a processor's cache, however long the context."""


@dataclass(frozen=True)
class Quest(BlockSelector):
    """Per page and KV head, the minimum and maximum of each key channel bound every logit from above.

    block: page size in tokens (paper: 16), a multiple of the cache's block size
    dense_layers: the first layers read everything (the published code: 2)
    heads: how the query heads of one KV head choose. "max" and "sum" of their bounds give one set per KV
        head, inside the budget; "q" is one set per query head, as the published code, whose union may read
        up to q_heads / kv_heads times the budget
    """

    block: int = 16
    dense_layers: int = 2
    heads: Literal["max", "sum", "q"] = "max"

    card: ClassVar[Card] = Card(
        name="quest",
        effects=frozenset({Effect.SELECT}),
        source="Quest, arXiv 2406.10774 section 3 and evaluation/quest_attention.py of mit-han-lab/Quest",
        summary="reads the pages with the highest upper bound on the query's logit",
        when=frozenset({When.BLOCK_FULL, When.EVERY_STEP}),
        unit="block",
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY}),
        budgets=frozenset({"read_tokens"}),
        deviations=(
            "under GQA the query heads of a KV head choose together by default (heads='max'); the published code "
            "chooses per query head (heads='q')",
            "pages with protected tokens and the page still filling are always read, inside the budget; the "
            "published kernel forces the last page alone, and its evaluation code forces none",
            "page bounds are kept in float16, rounded outwards so that they stay bounds",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "heads", "max", "sum", "q")

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        """`low` and `high` float16 [blocks, kv_heads, k_dim] of keys [blocks, kv_heads, block_size, k_dim]."""
        return {
            "low": -_round_up(-block.keys.amin(dim=2)),
            "high": _round_up(block.keys.amax(dim=2)),
        }

    def ranks(self, layer: LayerView, query: Tensor, memory: Memory) -> Tensor:
        """The bounds."""
        return self.bounds(layer, query)

    def bounds(self, layer: LayerView, query: Tensor) -> Tensor:
        """Upper bounds of the unscaled logits of full pages: float [kv_heads | q_heads, queries, pages].

        The bound sum_d max(q_d * low_d, q_d * high_d) is two matrix products: q's positive part with
        `high`, its negative part with `low`.
        """
        sides = [self.grouped(layer.side_data(name), layer).split(TOGETHER) for name in ("low", "high")]
        rows = query.unflatten(0, (layer.kv_heads, -1)).flatten(1, 2)
        up, down = rows.clamp(min=0), rows.clamp(max=0)
        parts = []
        for low, high in zip(*sides, strict=True):
            least, most = low.float().amin(1).transpose(0, 1), high.float().amax(1).transpose(0, 1)
            parts.append(up @ most.mT + down @ least.mT)
        bound = torch.cat(parts, -1).unflatten(1, (-1, query.shape[1]))
        if self.heads == "q":
            return bound.flatten(0, 1)
        return bound.amax(1) if self.heads == "max" else bound.sum(1)


def _round_up(x: Tensor) -> Tensor:
    """float16, never below x."""
    half = x.to(torch.float16)
    return torch.where(half.to(x.dtype) < x, half.nextafter(torch.full_like(half, torch.inf)), half)
