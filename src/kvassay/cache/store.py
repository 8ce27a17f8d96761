"""The bytes behind the ledger: keys and values of all blocks, as an engine lays them out.

One flat buffer per layer *position* in a group: the first layer of every group shares the first buffer,
and so on, as in vLLM, so that a block id names the same memory for whichever group owns it. A wrong block
id therefore reads another layer's data instead of zeros, and tests see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.data import Run
from kvassay.cache.ops import CopyBlock, GroupSpec, Ints, MoveSlots, Op, SlotView
from kvassay.layout.model import Layout


class KVStore:
    """Physical K/V of `num_blocks` blocks, on the CPU."""

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        dtype: torch.dtype = torch.float32,
        poison: bool = False,
    ) -> None:
        """`poison` fills unwritten memory with NaN."""
        self.groups = tuple(groups)
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._group_of = {layer: group for group in groups for layer in group.layers}
        depth = max(len(group.layers) for group in groups)
        for place in range(depth):
            users = [(group, group.layers[place]) for group in groups if place < len(group.layers)]
            kvs = [layout.layers[layer].kv for _, layer in users]
            width = max(group.block_size * kv.elements for (group, _), kv in zip(users, kvs, strict=True))
            # Whole rows of every head dimension, so that any side of a block can be read as rows.
            step = math.lcm(*(dim for kv in kvs for dim in (kv.k_dim, kv.v_dim)))
            width = -(-width // step) * step
            buffer = torch.empty(num_blocks, width, dtype=dtype)
            if poison:
                buffer.fill_(float("nan"))
            for group, layer in users:
                kv = layout.layers[layer].kv
                split = group.block_size * kv.kv_heads * kv.k_dim
                used = group.block_size * kv.elements
                shape = (kv.kv_heads, group.block_size, -1)
                self._k[layer] = buffer[:, :split].unflatten(1, shape)
                self._v[layer] = buffer[:, split:used].unflatten(1, shape)

    def keys(self, layer: int) -> Tensor:
        """[blocks, kv_heads, block_size, k_dim], a view."""
        return self._k[layer]

    def values(self, layer: int) -> Tensor:
        """[blocks, kv_heads, block_size, v_dim], a view."""
        return self._v[layer]

    def write(self, layer: int, block_ids: Ints, offsets: Ints, k: Tensor, v: Tensor) -> None:
        """Write k, v [lanes, kv_heads, tokens, dim] at block_ids, offsets [lanes, kv_heads, tokens]."""
        head = torch.arange(k.shape[1])[:, None]
        b, o = torch.from_numpy(block_ids.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
        for side, new in ((self._k[layer], k), (self._v[layer], v)):
            side[b, head, o] = new.to(side.dtype)

    def write_at(
        self, layer: int, head: int, block_ids: Ints, offsets: Ints, k: Tensor | None, v: Tensor | None
    ) -> None:
        """Overwrite rows [n, dim] of one head; None leaves that side as it is."""
        b, o = torch.from_numpy(block_ids.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
        if k is not None:
            self._k[layer][b, head, o] = k
        if v is not None:
            self._v[layer][b, head, o] = v

    def run_of(self, layer: int, view: SlotView) -> Run:
        """Keys and values [kv_heads, tokens, dim] of a slot view, read when looked at; padding is arbitrary."""
        k, v = self._k[layer], self._v[layer]
        return Run(lambda: _gather(k, view), lambda: _gather(v, view), view.positions.shape[1])

    def run(self, ops: Iterable[Op]) -> int:
        """Execute the ledger's copies, in order; returns the number of elements moved."""
        moved = 0
        for op in ops:
            if isinstance(op, CopyBlock):
                for layer in self.groups[op.group].layers:
                    for side in (self._k[layer], self._v[layer]):
                        side[op.dst] = side[op.src]
                        moved += side[0].numel()
            else:
                moved += self._move(op)
        return moved

    def _move(self, op: MoveSlots) -> int:
        size = self._group_of[op.layer].block_size
        src, dst = torch.from_numpy(op.src), torch.from_numpy(op.dst)
        moved = 0
        for side in (self._k[op.layer], self._v[op.layer]):
            side[dst // size, op.head, dst % size] = side[src // size, op.head, src % size]
            moved += len(op.src) * side.shape[-1]
        return moved


def _gather(side: Tensor, view: SlotView) -> Tensor:
    """The live slots of one side, [kv_heads, tokens, dim]."""
    heads, n = view.positions.shape
    if view.is_identity and n:
        first = int(view.offsets[0, 0])
        starts = np.flatnonzero((view.offsets[0] == 0) | (np.arange(n) == 0))
        return _whole_blocks(side, view.block_ids[0, starts])[:, first : first + n]
    rows = _rows(side)
    head = np.arange(heads)[:, None] * view.block_size
    per_block = side.stride(0) // side.shape[-1]
    index = view.block_ids.astype(np.int64) * per_block + head + view.offsets
    return rows.index_select(0, torch.from_numpy(index.clip(0)).flatten()).view(heads, n, side.shape[-1])


def _whole_blocks(side: Tensor, blocks: Ints) -> Tensor:
    """The slots of whole blocks, one after the other: [kv_heads, blocks * block_size, dim]."""
    first, last = int(blocks[0]), int(blocks[-1])
    consecutive = bool((np.diff(blocks) == 1).all())
    chosen = side[first : last + 1] if consecutive else side[torch.from_numpy(blocks.astype(np.int64))]
    return chosen.transpose(0, 1).flatten(1, 2)


def _rows(side: Tensor) -> Tensor:
    """One side of all blocks as rows of `dim`: row `block * rows_per_block + head * block_size + offset`."""
    dim = side.shape[-1]
    rows = (side.shape[0] * side.stride(0) - side.storage_offset()) // dim
    return side.as_strided((rows, dim), (dim, 1))
