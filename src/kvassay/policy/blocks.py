"""What policies that read whole blocks share: budget, forced blocks, and the top of a ranking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance, Protection
from kvassay.policy.checks import at_least
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class BlockSelector(Policy):
    """Reads the forced blocks and then those of highest `ranks`, `budget.tokens // block` in all.

    Forced, inside the budget: blocks with protected tokens, and the `forced_ends` of the method itself.
    A block that has no rank yet (it has just filled) is read.

    block: block size in tokens, a multiple of the cache's block size
    dense_layers: the first layers read everything
    """

    block: int = 16
    dense_layers: int = 0

    per_head: ClassVar[frozenset[str]] = ALL_APART
    reads_together: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least(self, block=1, dense_layers=0)

    @property
    def read_block(self) -> int:
        """`block`."""
        return self.block

    @property
    def forced_ends(self) -> tuple[int, int]:
        """Blocks that the method always reads: of the start, and of the end; the block still filling is the last."""
        return 0, 1

    def ranks(self, layer: LayerView, query: Tensor, memory: Memory) -> Tensor:
        """Rank of each full block, higher is read: float [kv_heads or q_heads, queries, blocks].

        Each `query` [q_heads, queries, dim] is of one of the newest positions and answered as if it were alone. It may
        cover the block that holds the newest token or not: that one is read anyway.
        """
        raise PolicyError(f"policy '{self.card.name}' ranks no blocks")

    def not_applicable(self, context: int, longest: int, budget: Allowance) -> str | None:
        """Where the budget is less than the blocks that are always read."""
        return None if budget.covers_all else self._too_few(budget)

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        """The chosen blocks: unit `block`, [queries, kv_heads or q_heads, budget.tokens // block]."""
        if budget.covers_all or layer.index < self.dense_layers:
            return None
        blocks, take = self.held(layer), self._take(budget)
        if blocks <= take:
            return None
        rank = self._checked(self.ranks(layer, query, memory), layer, query.shape[1], blocks)
        rank = torch.nn.functional.pad(rank, (0, blocks - rank.shape[-1]), value=torch.inf)
        forced = self._forced(layer, blocks, query.shape[1]).repeat_interleave(rank.shape[0] // layer.kv_heads, dim=0)
        index = rank.masked_fill(forced, torch.inf).topk(take, dim=-1).indices
        return ReadSet(index.transpose(0, 1), unit=self.block)

    def _checked(self, rank: Tensor, layer: LayerView, queries: int, blocks: int) -> Tensor:
        """The ranks; `PolicyError` for another shape or type, more blocks than are held, or NaN."""
        heads, name = (layer.kv_heads, layer.layer.q_heads), self.card.name
        if rank.dim() != 3 or rank.shape[0] not in heads or rank.shape[1] != queries or rank.shape[2] > blocks:
            raise PolicyError(
                f"policy '{name}' ranked layer {layer.index} with shape {list(rank.shape)}, [{heads[0]} or {heads[1]}, "
                f"{queries}, at most {blocks}] needed"
            )
        if not rank.is_floating_point():
            raise PolicyError(f"policy '{name}' ranked layer {layer.index} in {rank.dtype}, floating point needed")
        if bool(rank.isnan().any()):
            raise PolicyError(f"policy '{name}' ranked blocks of layer {layer.index} NaN")
        return rank

    def held(self, layer: LayerView) -> int:
        """Blocks of a layer, the one still filling included."""
        return int(layer.slots.max()) // self.block + 1

    def grouped(self, side: Tensor, layer: LayerView, dim: int = 0) -> Tensor:
        """Rows of cache blocks along `dim` as whole blocks of this policy: `dim` becomes [blocks, cache blocks each].

        Raises `PolicyError` unless `block` is a multiple of the cache's block size.
        """
        per, spare = divmod(self.block, layer.block_size)
        if spare:
            raise PolicyError(
                f"policy '{self.card.name}': block={self.block}, must be a multiple of the cache's block size "
                f"{layer.block_size}"
            )
        whole = side.shape[dim] // per
        return side.narrow(dim, 0, whole * per).unflatten(dim, (whole, per))

    def _take(self, budget: Allowance) -> int:
        """Blocks the budget allows; `BudgetError` if, at some alignment, the forced ones alone may exceed them."""
        if problem := self._too_few(budget):
            raise BudgetError(f"policy '{self.card.name}': {problem}; raise the budget or protect fewer")
        return budget.tokens // self.block

    def _too_few(self, budget: Allowance) -> str | None:
        take, forced = budget.tokens // self.block, _most_forced(budget.protection, self.block, *self.forced_ends)
        if take >= forced:
            return None
        return (
            f"{budget.tokens} tokens are {take} blocks of {self.block}; the blocks it always reads, and those of "
            f"protected tokens, take up to {forced}"
        )

    def _forced(self, layer: LayerView, blocks: int, queries: int) -> Tensor:
        """bool [kv_heads, queries, blocks]: blocks that hold a token protected at that query, and the method's own."""
        ordinal = (layer.slots.clamp(min=0) // self.block)[:, None].expand(-1, queries, -1)
        count = torch.zeros(layer.kv_heads, queries, blocks)
        count.scatter_add_(2, ordinal, layer.protected_from(queries).float())
        first, last = self.forced_ends
        count[..., :first] = 1
        count[..., blocks - last :] = 1
        return count > 0


def _most_forced(protection: Protection, block: int, first: int, last: int) -> int:
    """The most blocks that are forced at the start and at the end, over all lengths."""
    start = max(first, -(-protection.sink // block))
    return start + max(last, (max(protection.recent, 1) + block - 2) // block + 1)
