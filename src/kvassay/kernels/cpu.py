"""Decode attention on the CPU, compiled by numba and cached on disk.

The work of all lanes is cut into pieces of equal length, so that both cores are busy even with one KV head; each
piece leaves a partial softmax, and the partial results are merged. All query heads of a KV head are handled
together, a row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvassay.cache.rope import inverse_frequencies
from kvassay.kernels.codes import attend_codes
from kvassay.kernels.cores import LOG2E, NO_FLOATS, merge
from kvassay.kernels.device import CodeRead, DecodeKernel, LaneRead, PagedLayer, Plan, SlotRead
from kvassay.kernels.packed import PackedSide
from kvassay.kernels.slots import attend_slots
from kvassay.layout.model import Rope

SHORTEST = 512
"""Tokens of a piece below which another one costs more than it gains."""
PER_THREAD = 4
"""Pieces for each thread, so that one that is held up leaves little to wait for."""
ALIGNED = 32
"""Pieces begin at multiples of this, so that most groups of tokens with one scale are decoded whole."""
Pieces = NDArray[np.int64]


class CpuKernel(DecodeKernel):
    """`DecodeKernel` for float32 pools in main memory."""

    def plan(self, layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> Plan:
        """See `DecodeKernel.plan`: block tables joined, codes handed over, all work cut into pieces."""
        return _Plan(layer, _work(layer, lanes, queries))


@dataclass
class _Plan:
    """Work of all lanes, cut into pieces."""

    layer: PagedLayer
    work: Sequence[_Slots | _Codes]
    owner: NDArray[np.int64] = field(init=False)
    """[pieces], the row and KV head that a piece belongs to."""

    def __post_init__(self) -> None:
        none = np.empty((0, 2), dtype=np.int64)
        whose = np.concatenate([none, *(job.pieces[:, :2] for job in self.work)])
        self.owner = whose[:, 0] * self.layer.keys.shape[1] + whose[:, 1]

    def run(self, q: Tensor) -> Tensor:
        """See `Plan.run`."""
        layer, pieces = self.layer, len(self.owner)
        count, q_heads, queries, k_dim = q.shape
        kv_heads = layer.keys.shape[1]
        group = q_heads // kv_heads
        rows = q.transpose(1, 2).numpy() * np.float32(layer.scale * LOG2E)
        scaled = np.ascontiguousarray(rows).reshape(count * queries, kv_heads, group, k_dim)
        top = np.full((pieces, group), -np.inf, dtype=np.float32)
        total = np.zeros((pieces, group), dtype=np.float32)
        acc = np.zeros((pieces, group, layer.values.shape[3]), dtype=np.float32)
        softcap = np.float32((layer.softcap or 0.0) * LOG2E)
        at = 0
        for job in self.work:
            mine = slice(at, at + len(job.pieces))
            job.run(scaled, softcap, top[mine], total[mine], acc[mine])
            at = mine.stop
        out = np.empty((count * queries * kv_heads, group, acc.shape[2]), dtype=np.float32)
        sinks = np.full((count * queries, kv_heads * group), -np.inf, dtype=np.float32)
        if layer.sinks is not None:
            sinks[:] = layer.sinks.numpy() * LOG2E
        merge(self.owner, top, total, acc, sinks.reshape(-1, group), out)
        return torch.from_numpy(out).view(count, queries, q_heads, -1).transpose(1, 2)


@dataclass
class _Slots:
    """Slot reads of all lanes that lie in one pool."""

    keys: Tensor
    values: Tensor
    unit: int
    entries: list[NDArray[np.int32]] = field(default_factory=list)
    biases: list[NDArray[np.float32]] = field(default_factory=list)
    ranges: list[Pieces] = field(default_factory=list)
    listed: int = 0
    biased: int = 0
    pieces: Pieces = field(init=False)
    given: tuple[Any, ...] = field(init=False)
    """What `attend_slots` is told of the pool and the lists."""
    joined_biases: NDArray[np.float32] = field(init=False)

    def add(self, read: SlotRead, lane: int) -> None:
        """Take one lane's read; its ranges are [queries * kv_heads, columns of a piece]."""
        last = read.last.numpy().astype(np.int64)
        queries, heads = last.shape
        mine = np.full((queries, heads, 7), -1, dtype=np.int64)
        mine[:, :, 0] = lane * queries + np.arange(queries)[:, None]
        mine[:, :, 1] = np.arange(heads)
        stride = 0 if read.entries.shape[0] == 1 else read.entries.shape[1]
        mine[:, :, 2] = self.listed + stride * np.arange(heads)
        mine[:, :, 3] = 0 if read.first is None else read.first.numpy()
        mine[:, :, 4] = last
        for column, bias in ((5, read.bias), (6, read.inner_bias)):
            if bias is not None:
                mine[:, :, column] = self.biased + bias.shape[1] * np.arange(heads)
                self.biases.append((bias * LOG2E).float().flatten().numpy())
                self.biased += bias.numel()
        self.entries.append(read.entries.numpy().ravel())
        self.listed += read.entries.numel()
        self.ranges.append(mine.reshape(-1, 7))

    def cut(self, length: int) -> None:
        """Cut the ranges into pieces."""
        self.pieces = _cut(np.concatenate(self.ranges), 3, length)
        entries = self.entries[0] if len(self.entries) == 1 else np.concatenate(self.entries)
        self.given = (*_flat(self.keys), *_flat(self.values), self.keys.shape[2], entries, self.unit)
        self.joined_biases = np.concatenate(self.biases) if self.biases else NO_FLOATS

    def tokens(self) -> int:
        """Tokens read, over all rows and KV heads."""
        return int(sum((one[:, 4] - one[:, 3]).sum() for one in self.ranges))

    def run(self, q: Any, softcap: np.float32, top: Any, total: Any, acc: Any) -> None:
        """Compute the partial results."""
        attend_slots(q, *self.given, self.pieces, self.joined_biases, softcap, top, total, acc)


@dataclass
class _Codes:
    """One encoded segment of one lane."""

    read: CodeRead
    lane: int
    queries: int
    pieces: Pieces = field(init=False)
    given: tuple[Any, ...] = field(init=False)
    """What `attend_codes` is told of the segment."""

    def tokens(self) -> int:
        """Tokens read, over all rows and KV heads."""
        return self.queries * self.read.keys.kv_heads * self.read.keys.rows

    def cut(self, length: int) -> None:
        """Cut the rows into pieces."""
        heads, rows = self.read.keys.kv_heads, self.read.keys.rows
        whole = np.zeros((self.queries, heads, 5), dtype=np.int64)
        whole[:, :, 0] = self.lane * self.queries + np.arange(self.queries)[:, None]
        whole[:, :, 1] = np.arange(heads)
        whole[:, :, 3] = rows
        if self.read.seen is not None and self.read.seen.shape[0] > 1:
            whole[:, :, 4] = np.arange(self.queries)[:, None]
        self.pieces = _cut(whole.reshape(-1, 5), 2, length)

        self.given = self._given()

    def _given(self) -> tuple[Any, ...]:
        read, rope = self.read, self.read.keys.rope
        none = np.empty((0, 0), dtype=np.float32)
        inner, outer = (
            none if bias is None else (bias * LOG2E).float().contiguous().numpy()
            for bias in (read.inner_bias, read.bias)
        )
        seen = np.empty((0, 0, 0), dtype=np.bool_) if read.seen is None else read.seen.contiguous().numpy()
        positions = read.positions.to(torch.int32).contiguous().numpy()
        table = np.empty((0, 2, 0), dtype=np.float32)
        if rope is not None:
            table = rope_table(rope, _power(int(positions.max(initial=0)) + 1))
        turn = bool(rope and rope.interleaved)
        return (_tuple(read.keys), _tuple(read.values), positions, table, turn, seen, inner, outer)

    def run(self, q: Any, softcap: np.float32, top: Any, total: Any, acc: Any) -> None:
        """Compute the partial results."""
        attend_codes(q, *self.given, self.pieces, softcap, top, total, acc)


def _work(layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> list[_Slots | _Codes]:
    """What is to be computed, cut into pieces of one length."""
    pools: dict[tuple[int, int, int], _Slots] = {}
    work: list[_Slots | _Codes] = []
    for lane, reads in enumerate(lanes):
        for read in reads:
            if isinstance(read, CodeRead):
                work.append(_Codes(read, lane, queries))
                continue
            keys = layer.keys if read.keys is None else read.keys
            values = layer.values if read.values is None else read.values
            place = (keys.data_ptr(), values.data_ptr(), read.unit)
            if place not in pools:
                pools[place] = _Slots(keys, values, read.unit)
                work.append(pools[place])
            pools[place].add(read, lane)
    tokens = sum(job.tokens() for job in work)
    length = max(SHORTEST, -(-tokens // (PER_THREAD * numba.get_num_threads())))
    for job in work:
        job.cut(length)
    return work


def _cut(ranges: Pieces, begin: int, length: int) -> Pieces:
    """Cut rows of ranges, from column `begin` to the next one, into equal pieces of about `length`."""
    low, size = ranges[:, begin], ranges[:, begin + 1] - ranges[:, begin]
    many = -(-size // length)
    if (many == 1).all():
        return ranges
    pieces = np.repeat(ranges, many.clip(0), axis=0)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(many.clip(0)) - many.clip(0), many.clip(0))
    low, size, many = (np.repeat(x, many.clip(0)) for x in (low, size, many))
    pieces[:, begin] = low + size * number // many // ALIGNED * ALIGNED
    end = size * (number + 1) // many
    pieces[:, begin + 1] = low + np.where(number + 1 == many, end, end // ALIGNED * ALIGNED)
    return pieces


def _flat(pool: Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A pool as one flat array from its first element, and its strides over blocks and heads."""
    if pool.stride(3) != 1 or pool.stride(2) != pool.shape[3]:
        pool = pool.contiguous()
    extent = 1 + sum((size - 1) * step for size, step in zip(pool.shape, pool.stride(), strict=True))
    return pool.as_strided((extent,), (1,)).numpy(), np.array(pool.stride()[:2], dtype=np.int64)


def _tuple(side: PackedSide) -> tuple[Any, ...]:
    return (
        side.dim, side.rows, side.parts, side.first, side.codes, side.floats, side.scales, side.index, side.bases
    )  # fmt: skip


def _power(length: int) -> int:
    return 1 << (length - 1).bit_length()


@lru_cache(maxsize=8)
def rope_table(rope: Rope, length: int) -> NDArray[np.float32]:
    """cos and sin of every position, float32 [length, 2, dims / 2], by the angles of `cache.rope`."""
    angle = torch.arange(length).float()[:, None] * inverse_frequencies(rope)
    return torch.stack([angle.cos(), angle.sin()], 1).numpy()
