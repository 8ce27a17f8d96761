"""The bytes behind the ledger: keys and values of all blocks, as an engine lays them out.

One flat buffer per layer *position* in a group: the first layer of every group shares the first buffer,
and so on, as in vLLM, so that a block id names the same memory for whichever group owns it. A wrong block
id therefore reads another layer's data instead of zeros, and tests see it.

A latent layer (MLA) has one side: its values are the beginning of its keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.data import Run
from kvassay.cache.ops import CopyBlock, GroupSpec, Ints, MoveSlots, Op, SlotView
from kvassay.layout.model import KV, Latent, Layout

FEW = 4
"""Most breaks between stretches of neighbouring slots that are read as so many runs."""


class KVStore:
    """Physical K/V of `num_blocks` blocks, on one device."""

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        dtype: torch.dtype = torch.float32,
        poison: bool = False,
        sides_apart: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`poison` fills unwritten memory with NaN. `sides_apart` lays each side of a layer in memory of its own, so
        that one KV head's neighbouring blocks are read where they lie."""
        self.groups = tuple(groups)
        self._apart = sides_apart
        self.device = torch.device(device)
        """Where the blocks lie; what is read back for anyone but a kernel is brought to main memory."""
        self._sides: dict[int, tuple[Tensor, ...]] = {}
        """Keys and values, or a latent layer's one side."""
        self._v_dim = {layer: layout.layers[layer].kv.v_dim for group in groups for layer in group.layers}
        self._group_of = {layer: group for group in groups for layer in group.layers}
        depth = max(len(group.layers) for group in groups)
        for place in range(depth):
            users = [(group, group.layers[place]) for group in groups if place < len(group.layers)]
            if sides_apart:
                self._own_memory(layout, users, num_blocks, dtype, poison)
                continue
            kvs = [layout.layers[layer].kv for _, layer in users]
            width = max(group.block_size * kv.elements for (group, _), kv in zip(users, kvs, strict=True))
            # Whole rows of every head dimension, so that any side of a block can be read as rows.
            step = math.lcm(*(dim for kv in kvs for dim in _dims(kv)))
            width = -(-width // step) * step
            buffer = torch.empty(num_blocks, width, dtype=dtype, device=self.device)
            if poison:
                buffer.fill_(float("nan"))
            for group, layer in users:
                kv = layout.layers[layer].kv
                sizes = [group.block_size * kv.kv_heads * dim for dim in _dims(kv)]
                parts = buffer[:, : sum(sizes)].split(sizes, 1)
                self._sides[layer] = tuple(part.unflatten(1, (kv.kv_heads, group.block_size, -1)) for part in parts)

    def _own_memory(
        self,
        layout: Layout,
        users: Sequence[tuple[GroupSpec, int]],
        num_blocks: int,
        dtype: torch.dtype,
        poison: bool,
    ) -> None:
        for group, layer in users:
            kv = layout.layers[layer].kv
            shapes = [(num_blocks, kv.kv_heads, group.block_size, dim) for dim in _dims(kv)]
            self._sides[layer] = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes)
            for side in self._sides[layer] if poison else ():
                side.fill_(float("nan"))

    def keys(self, layer: int) -> Tensor:
        """[blocks, kv_heads, block_size, k_dim], a view."""
        return self._sides[layer][0]

    def values(self, layer: int) -> Tensor:
        """[blocks, kv_heads, block_size, v_dim], a view."""
        return self._sides[layer][-1][..., : self._v_dim[layer]]

    def write(self, layer: int, block_ids: Ints, offsets: Ints, k: Tensor, v: Tensor) -> None:
        """Write k, v [lanes, kv_heads, tokens, dim] at block_ids, offsets [lanes, kv_heads, tokens].

        Of a latent layer k is everything, and v, its beginning, is not looked at.
        """
        head = torch.arange(k.shape[1])[:, None]
        b, o = torch.from_numpy(block_ids.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
        for side, new in zip(self._sides[layer], (k, v), strict=False):
            side[b, head, o] = new.to(side)

    def write_at(
        self, layer: int, head: int, block_ids: Ints, offsets: Ints, k: Tensor | None, v: Tensor | None
    ) -> None:
        """Overwrite rows [n, dim] of one head; None leaves that side as it is."""
        b, o = torch.from_numpy(block_ids.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
        for side, new in zip(self._sides[layer], (k, v), strict=False):
            if new is not None:
                side[b, head, o] = new.to(side)

    def runs_of(self, layer: int, view: SlotView) -> list[Run]:
        """`run_of` in as few runs as can be read without a copy, if that is few; else in one."""
        n = view.positions.shape[1]
        if not (self._apart and view.is_identity and n and len(view.positions) == 1):
            return [self.run_of(layer, view)]
        breaks = np.flatnonzero(np.diff(view.slots[0]) != 1) + 1
        if len(breaks) > FEW:
            return [self.run_of(layer, view)]
        ends = [0, *breaks.tolist(), n]
        return [self._stretch(layer, int(view.slots[0, a]), b - a) for a, b in itertools.pairwise(ends)]

    def _stretch(self, layer: int, first: int, tokens: int) -> Run:
        """Physical slots in a row of a layer with one KV head, as they lie."""
        k, *rest = (side.flatten(0, 2)[None, first : first + tokens].cpu() for side in self._sides[layer])
        return Run.of(k, rest[0]) if rest else Run.latent(lambda: k, self._v_dim[layer], tokens)

    def run_of(self, layer: int, view: SlotView) -> Run:
        """Keys and values [kv_heads, tokens, dim] of a slot view, read when looked at; padding is arbitrary."""
        k, *rest = self._sides[layer]
        tokens = view.positions.shape[1]
        if not rest:
            return Run.latent(lambda: _gather(k, view), self._v_dim[layer], tokens)
        return Run(lambda: _gather(k, view), lambda: _gather(rest[0], view), tokens)

    def run(self, ops: Iterable[Op]) -> int:
        """Execute the ledger's copies, in order; returns the number of elements moved."""
        moved = 0
        for op in ops:
            if isinstance(op, CopyBlock):
                for layer in self.groups[op.group].layers:
                    for side in self._sides[layer]:
                        side[op.dst] = side[op.src]
                        moved += side[0].numel()
            else:
                moved += self._move(op)
        return moved

    def _move(self, op: MoveSlots) -> int:
        size = self._group_of[op.layer].block_size
        src, dst = torch.from_numpy(op.src), torch.from_numpy(op.dst)
        moved = 0
        for side in self._sides[op.layer]:
            side[dst // size, op.head, dst % size] = side[src // size, op.head, src % size]
            moved += len(op.src) * side.shape[-1]
        return moved


def _dims(kv: KV | Latent) -> tuple[int, ...]:
    """Row widths of what a layer stores."""
    return (kv.k_dim, kv.v_dim) if isinstance(kv, KV) else (kv.row,)


def _gather(side: Tensor, view: SlotView) -> Tensor:
    """The live slots of one side, [kv_heads, tokens, dim]."""
    heads, n = view.positions.shape
    if view.is_identity and n:
        first = int(view.offsets[0, 0])
        starts = np.flatnonzero((view.offsets[0] == 0) | (np.arange(n) == 0))
        return _whole_blocks(side, view.block_ids[0, starts])[:, first : first + n].cpu()
    rows = _rows(side)
    head = np.arange(heads)[:, None] * view.block_size
    per_block = side.stride(0) // side.shape[-1]
    index = view.block_ids.astype(np.int64) * per_block + head + view.offsets
    chosen = torch.from_numpy(index.clip(0)).flatten().to(side.device)
    return rows.index_select(0, chosen).view(heads, n, side.shape[-1]).cpu()


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
