"""What one query may read: the answer of a select policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.errors import PolicyError


@dataclass(frozen=True)
class ReadSet:
    """Blocks of `unit` tokens to read, by ordinal, per query and head.

    index: int64 [queries, heads, k] with heads = q_heads, kv_heads or 1; -1 is unused. The ordinal of a
        token is `slot // unit`, anchored to slots; `unit` is 1 or a multiple of the cache's block size.
    The query's own token is always read, whatever the set says.
    """

    index: Tensor
    unit: int = 1

    def validate(self, *, queries: int, q_heads: int, kv_heads: int, block_size: int, name: str) -> None:
        """Raise `PolicyError` if the shape or unit is not one the cache can serve."""
        shape = list(self.index.shape)
        if len(shape) != 3 or shape[0] != queries or shape[1] not in (q_heads, kv_heads, 1) or shape[2] == 0:
            raise PolicyError(
                f"policy '{name}': read set of shape {shape}, expected [{queries} queries, heads, k] with "
                f"heads {q_heads}, {kv_heads} or 1 and k at least 1"
            )
        if self.unit != 1 and self.unit % block_size:
            raise PolicyError(f"policy '{name}': read unit {self.unit} is not 1 or a multiple of {block_size}")
        if self.index.is_floating_point():
            raise PolicyError(f"policy '{name}': read set index must be integer, is {self.index.dtype}")

    def mask(self, slots: Tensor, q_heads: int) -> Tensor:
        """bool [queries, q_heads, tokens] over a view with logical `slots` [kv_heads, tokens]."""
        kv_heads, tokens = slots.shape
        queries, heads, _ = self.index.shape
        ordinal = slots.clamp(min=0) // self.unit
        blocks = int(ordinal.max()) + 1 if tokens else 1
        if int(self.index.max()) >= blocks:
            raise PolicyError(f"read set names block {int(self.index.max())} of {blocks}")
        table = torch.zeros(queries, heads, blocks + 1, dtype=torch.bool)
        table.scatter_(2, self.index.masked_fill(self.index < 0, blocks), True)
        per_head = table.repeat_interleave(q_heads // heads, dim=1)
        where = ordinal.repeat_interleave(q_heads // kv_heads, dim=0)
        return torch.gather(per_head, 2, where[None].expand(queries, -1, -1)) & (
            slots.repeat_interleave(q_heads // kv_heads, dim=0) >= 0
        )
