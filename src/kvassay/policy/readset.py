"""What one query may read: the answer of a select policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvassay.cache.data import Stored
from kvassay.errors import PolicyError
from kvassay.kernels.reference import visible


@dataclass(frozen=True)
class ReadSet:
    """Blocks of `unit` tokens to read, by ordinal, per query and head.

    index: int64 [queries, heads, k] with heads = q_heads, kv_heads or 1; -1 is unused. The ordinal of a
        token is `slot // unit`, anchored to slots; `unit` is 1 or a multiple of the cache's block size.
    own: the query's own token is always read, whatever the set says. False only for what a model's own index chose: it
        may leave that token out, and its ordinals are of true positions, `position // unit`.
    """

    index: Tensor
    unit: int = 1
    own: bool = True

    def validate(self, *, queries: int, q_heads: int, kv_heads: int, block_size: int, name: str) -> None:
        """Raise `PolicyError` if the shape or unit is not one the cache can serve."""
        shape = list(self.index.shape)
        if len(shape) != 3 or shape[0] != queries or shape[1] not in (q_heads, kv_heads, 1) or shape[2] == 0:
            raise PolicyError(
                f"policy '{name}': read set of shape {shape}, expected [{queries} queries, heads, k] with "
                f"heads {q_heads}, {kv_heads} or 1 and k at least 1"
            )
        if self.unit < 1 or (self.unit != 1 and self.unit % block_size):
            raise PolicyError(f"policy '{name}': read unit {self.unit} is not 1 or a multiple of {block_size}")
        if self.index.dtype not in (torch.int32, torch.int64):
            raise PolicyError(f"policy '{name}': read set index must be int64 ordinals, is {self.index.dtype}")
        least = int(self.index.min())
        if least < -1:
            raise PolicyError(f"policy '{name}': read set names block {least}; -1 is unused, 0 the first")

    def mask(self, slots: Tensor, q_heads: int) -> Tensor:
        """bool [queries, q_heads, tokens] over a view with logical `slots` [kv_heads, tokens]."""
        kv_heads, tokens = slots.shape
        queries, heads, _ = self.index.shape
        ordinal = slots.clamp(min=0) // self.unit
        blocks = int(ordinal.max()) + 1 if tokens else 1
        if self.own and int(self.index.max()) >= blocks:
            raise PolicyError(f"read set names block {int(self.index.max())} of {blocks}")
        gone = (self.index < 0) | (self.index >= blocks)  # an index may have chosen what the view no longer holds
        table = torch.zeros(queries, heads, blocks + 1, dtype=torch.bool)
        table.scatter_(2, self.index.long().masked_fill(gone, blocks), True)
        per_head = table.repeat_interleave(q_heads // heads, dim=1)
        where = ordinal.repeat_interleave(q_heads // kv_heads, dim=0)
        return torch.gather(per_head, 2, where[None].expand(queries, -1, -1)) & (
            slots.repeat_interleave(q_heads // kv_heads, dim=0) >= 0
        )

    def allowed(self, data: Stored, q_heads: int) -> Tensor:
        """`mask` of what is stored, in rows per KV head if they say it: bool [queries, kv_heads | q_heads, tokens]."""
        kv_heads = data.positions.shape[0]
        heads = kv_heads if self.index.shape[1] in (1, kv_heads) else q_heads
        return self.mask(data.slots if self.own else data.positions, heads)

    def part(self, rows: slice | Tensor) -> ReadSet:
        """Of some queries only: a slice of them, or bool [queries]."""
        return replace(self, index=self.index[rows])

    def then(self, more: ReadSet) -> ReadSet:
        """Of these queries and more of the same kind."""
        width = max(self.index.shape[2], more.index.shape[2])
        both = [torch.nn.functional.pad(x, (0, width - x.shape[2]), value=-1) for x in (self.index, more.index)]
        return replace(self, index=torch.cat(both))


def seen(
    data: Stored, positions: Tensor, q_heads: int, *, window: int | None = None, chosen: ReadSet | None = None
) -> Tensor:
    """What queries at true `positions` read of `data`, all of it or what is `chosen` for them.

    bool [kv_heads, queries, tokens], or [q_heads, queries, tokens] where each query head has a list of its own.
    """
    if chosen is None:
        return visible(data, positions, q_heads, window=window)
    allowed = chosen.allowed(data, q_heads)
    return visible(data, positions, allowed.shape[1], window=window, allowed=allowed, own=chosen.own)
