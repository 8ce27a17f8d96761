"""What the lanes of a call read, as work for a kernel: lists laid end to end, and cut into pieces of equal length.

Every kernel that answers in parts takes its work in this form, so that all of a device is busy even with one KV head;
each piece leaves a partial softmax, and the partial results of one query and KV head are merged. Everything here is
host memory: nothing is computed, no pool is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvassay.kernels.device import CodeRead, LaneRead, PagedLayer, SlotRead

LOG2E = 1.4426950408889634
"""Logits and biases are kept in units of log2, so that a weight is `2 ** x`."""
ALIGNED = 32
"""Pieces begin at multiples of this, so that most groups of tokens with one scale are decoded whole."""
Pieces = NDArray[np.int64]

ROW, HEAD, LIST, BEGIN, END, BIAS, INNER = range(7)
"""Columns of a piece of slots: query row, KV head, where its list begins in `entries`, the list's tokens it covers,
where the list's biases begin in `biases` (-1: none)."""
CODE_BEGIN, CODE_END, CODE_SEEN = 2, 3, 4
"""Columns of a piece of codes beside ROW and HEAD: the segment's rows it covers, row of `seen`."""
SLOT_FIELDS, CODE_FIELDS = 7, 5
"""How many columns there are of each."""


@dataclass
class SlotJob:
    """Slot reads of all lanes that lie in one pool."""

    keys: Tensor
    values: Tensor
    unit: int
    pieces: Pieces = field(init=False)
    _entries: list[NDArray[np.int32]] = field(default_factory=list)
    _biases: list[NDArray[np.float32]] = field(default_factory=list)
    _ranges: list[Pieces] = field(default_factory=list)
    _listed: int = 0
    _biased: int = 0

    def add(self, read: SlotRead, lane: int) -> None:
        """Take one lane's read; its ranges are [queries * kv_heads, columns of a piece]."""
        last = read.last.numpy().astype(np.int64)
        queries, heads = last.shape
        mine = np.full((queries, heads, SLOT_FIELDS), -1, dtype=np.int64)
        mine[:, :, ROW] = lane * queries + np.arange(queries)[:, None]
        mine[:, :, HEAD] = np.arange(heads)
        stride = 0 if read.entries.shape[0] == 1 else read.entries.shape[1]
        mine[:, :, LIST] = self._listed + stride * np.arange(heads)
        mine[:, :, BEGIN] = 0 if read.first is None else read.first.numpy()
        mine[:, :, END] = last
        for column, bias in ((BIAS, read.bias), (INNER, read.inner_bias)):
            if bias is not None:
                mine[:, :, column] = self._biased + bias.shape[1] * np.arange(heads)
                self._biases.append(in_log2(bias).flatten())
                self._biased += bias.numel()
        self._entries.append(read.entries.numpy().ravel())
        self._listed += read.entries.numel()
        self._ranges.append(mine.reshape(-1, SLOT_FIELDS))

    def cut(self, length: int) -> None:
        """Cut the ranges into pieces."""
        self.pieces = cut(np.concatenate(self._ranges), BEGIN, length)

    def tokens(self) -> int:
        """Tokens read, over all rows and KV heads."""
        return int(sum((one[:, END] - one[:, BEGIN]).sum() for one in self._ranges))

    def entries(self) -> NDArray[np.int32]:
        """All lists."""
        return self._entries[0] if len(self._entries) == 1 else np.concatenate(self._entries)

    def biases(self) -> NDArray[np.float32]:
        """All biases, in units of log2."""
        return np.concatenate(self._biases) if self._biases else np.empty(0, dtype=np.float32)


@dataclass
class CodeJob:
    """One encoded segment of one lane, or several that are read as one."""

    read: CodeRead
    lane: int
    queries: int
    pieces: Pieces = field(init=False)

    def cut(self, length: int) -> None:
        """Cut the rows into pieces."""
        heads, rows = self.read.keys.kv_heads, self.read.keys.rows
        whole = np.zeros((self.queries, heads, CODE_FIELDS), dtype=np.int64)
        whole[:, :, ROW] = self.lane * self.queries + np.arange(self.queries)[:, None]
        whole[:, :, HEAD] = np.arange(heads)
        whole[:, :, CODE_END] = rows
        if self.read.seen is not None and self.read.seen.shape[0] > 1:
            whole[:, :, CODE_SEEN] = np.arange(self.queries)[:, None]
        self.pieces = cut(whole.reshape(-1, CODE_FIELDS), CODE_BEGIN, length)

    def tokens(self) -> int:
        """Tokens read, over all rows and KV heads."""
        return self.queries * self.read.keys.kv_heads * self.read.keys.rows

    def biases(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Inner and outer bias [kv_heads, rows] in units of log2, empty for none."""
        none = np.empty((0, 0), dtype=np.float32)
        inner, outer = (none if one is None else in_log2(one) for one in (self.read.inner_bias, self.read.bias))
        return inner, outer

    def positions(self) -> NDArray[np.int32]:
        """True positions [kv_heads, rows]."""
        return self.read.positions.to(torch.int32).contiguous().numpy()

    def seen(self) -> NDArray[np.bool_]:
        """What is read, [queries or 1, kv_heads, rows], empty if all of it is."""
        seen = self.read.seen
        return np.empty((0, 0, 0), dtype=np.bool_) if seen is None else seen.contiguous().numpy()


Job = SlotJob | CodeJob


def jobs_of(layer: PagedLayer, lanes: Sequence[LaneRead], queries: int, workers: int, shortest: int) -> list[Job]:
    """What is to be computed, cut into pieces of one length: about `workers`, none below `shortest` tokens."""
    pools: dict[tuple[int, int, int], SlotJob] = {}
    jobs: list[Job] = []
    for lane, reads in enumerate(lanes):
        for read in reads:
            if isinstance(read, CodeRead):
                jobs.append(CodeJob(read, lane, queries))
                continue
            keys = layer.keys if read.keys is None else read.keys
            values = layer.values if read.values is None else read.values
            place = (keys.data_ptr(), values.data_ptr(), read.unit)
            if place not in pools:
                pools[place] = SlotJob(keys, values, read.unit)
                jobs.append(pools[place])
            pools[place].add(read, lane)
    tokens = sum(job.tokens() for job in jobs)
    length = max(shortest, -(-tokens // workers))
    for job in jobs:
        job.cut(length)
    return jobs


def owners(jobs: Sequence[Job], kv_heads: int) -> NDArray[np.int64]:
    """[pieces], the query row and KV head that each piece of all jobs belongs to: `row * kv_heads + head`."""
    none = np.empty((0, 2), dtype=np.int64)
    whose = np.concatenate([none, *(job.pieces[:, :2] for job in jobs)])
    found: NDArray[np.int64] = whose[:, ROW] * kv_heads + whose[:, HEAD]
    return found


def cut(ranges: Pieces, begin: int, length: int) -> Pieces:
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


def in_log2(bias: Tensor) -> NDArray[np.float32]:
    """A bias in units of log2."""
    return (bias * LOG2E).float().contiguous().numpy()
