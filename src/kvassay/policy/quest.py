"""Quest (Tang et al. 2024, arXiv 2406.10774, section 3): read the pages whose key range bounds the query best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Protection
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import BlockView, LayerView


@dataclass(frozen=True)
class Quest(Policy):
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
        at_least(self, block=1, dense_layers=0)
        one_of(self, "heads", "max", "sum", "q")

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        """`low` and `high` float16 [blocks, kv_heads, k_dim] of keys [blocks, kv_heads, block_size, k_dim]."""
        return {
            "low": -_round_up(-block.keys.amin(dim=2)),
            "high": _round_up(block.keys.amax(dim=2)),
        }

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        """The top pages by bound: unit `block`, [queries, kv_heads | q_heads, budget.tokens // block]."""
        if budget.covers_all or layer.index < self.dense_layers:
            return None
        pages = int(layer.slots.max()) // self.block + 1
        take = self._pages(budget)
        if pages <= take:
            return None
        bound = self.bounds(layer, query)
        bound = torch.nn.functional.pad(bound, (0, pages - bound.shape[-1]), value=torch.inf)
        forced = self._forced(layer, pages)
        if self.heads == "q":
            forced = forced.repeat_interleave(layer.layer.q_heads // layer.kv_heads, dim=0)
        index = bound.masked_fill(forced[:, None], torch.inf).topk(take, dim=-1).indices
        return ReadSet(index.transpose(0, 1), unit=self.block)

    def bounds(self, layer: LayerView, query: Tensor) -> Tensor:
        """Upper bounds of the unscaled logits of full pages: float [kv_heads | q_heads, queries, pages].

        The bound sum_d max(q_d * low_d, q_d * high_d) is two matrix products: q's positive part with
        `high`, its negative part with `low`.
        """
        per_page, spare = divmod(self.block, layer.block_size)
        if spare:
            raise PolicyError(
                f"policy 'quest': block={self.block}, must be a multiple of the cache's block size {layer.block_size}"
            )
        low, high = (_pool(layer.side_data(n).float(), per_page, n) for n in ("low", "high"))
        q = query.unflatten(0, (layer.kv_heads, -1))
        bound = q.clamp(min=0) @ high.mT[:, None] + q.clamp(max=0) @ low.mT[:, None]
        if self.heads == "q":
            return bound.flatten(0, 1)
        return bound.amax(1) if self.heads == "max" else bound.sum(1)

    def _pages(self, budget: Allowance) -> int:
        """Pages the budget allows; `BudgetError` if, at some alignment, the forced pages alone may exceed them."""
        take, forced = budget.tokens // self.block, _most_forced(budget.protection, self.block)
        if take < forced:
            raise BudgetError(
                f"policy 'quest': {budget.tokens} tokens are {take} pages of {self.block}, the protected tokens "
                f"and the page still filling take up to {forced}; raise the budget or protect fewer"
            )
        return take

    def _forced(self, layer: LayerView, pages: int) -> Tensor:
        """bool [kv_heads, pages]: pages that hold a protected token, and the last."""
        ordinal = layer.slots.clamp(min=0) // self.block
        count = torch.zeros(layer.kv_heads, pages).scatter_add_(1, ordinal, layer.protected.float())
        count[:, -1] = 1
        return count > 0


def _most_forced(protection: Protection, block: int) -> int:
    """The most pages that sinks, recent tokens and the page still filling can touch, over all lengths."""
    sink = -(-protection.sink // block)
    return sink + (max(protection.recent, 1) + block - 2) // block + 1


def _pool(bounds: Tensor, per_page: int, name: str) -> Tensor:
    """Bounds of pages [kv_heads, pages, dim] from those of cache blocks [blocks, kv_heads, dim]."""
    whole = bounds.shape[0] // per_page * per_page
    grouped = bounds[:whole].unflatten(0, (-1, per_page)) if whole else bounds.new_zeros(0, 1, *bounds.shape[1:])
    return (grouped.amin(1) if name == "low" else grouped.amax(1)).transpose(0, 1)


def _round_up(x: Tensor) -> Tensor:
    """float16, never below x."""
    half = x.to(torch.float16)
    return torch.where(half.to(x.dtype) < x, half.nextafter(torch.full_like(half, torch.inf)), half)
