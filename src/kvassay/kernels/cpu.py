"""Decode attention on the CPU, compiled by numba and cached on disk.

The work of all lanes is cut into pieces of equal length, so that both cores are busy even with one KV head; each
piece leaves a partial softmax, and the partial results are merged. All query heads of a KV head are handled
together, a row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvassay.cache.rope import inverse_frequencies
from kvassay.kernels.codes import attend_codes
from kvassay.kernels.cores import NO_FLOATS, merge
from kvassay.kernels.device import DecodeKernel, LaneRead, PagedLayer, Plan
from kvassay.kernels.packed import PackedSide
from kvassay.kernels.pieces import LOG2E, CodeJob, Job, SlotJob, in_log2, jobs_of, owners
from kvassay.kernels.slots import attend_slots
from kvassay.layout.model import Rope

SHORTEST = 512
"""Tokens of a piece below which another one costs more than it gains."""
PER_THREAD = 4
"""Pieces for each thread, so that one that is held up leaves little to wait for."""


class CpuKernel(DecodeKernel):
    """`DecodeKernel` for float32 pools in main memory."""

    def plan(self, layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> Plan:
        """See `DecodeKernel.plan`: block tables joined, codes handed over, all work cut into pieces."""
        threads = numba.get_num_threads()
        jobs = jobs_of(layer, lanes, queries, 1 if threads == 1 else PER_THREAD * threads, SHORTEST)
        counts = [len(job.pieces) for job in jobs]
        return _Plan(layer, [_attending(job) for job in jobs], counts, owners(jobs, layer.keys.shape[1]))


@dataclass
class _Plan:
    """Work of all lanes, cut into pieces."""

    layer: PagedLayer
    work: Sequence[Callable[..., None]]
    """What computes the partial results of each job."""
    counts: Sequence[int]
    """Pieces of each."""
    owner: NDArray[np.int64]
    """[pieces], the row and KV head that a piece belongs to."""

    def run(self, q: Tensor) -> Tensor:
        """See `Plan.run`."""
        layer, pieces = self.layer, len(self.owner)
        count, q_heads, queries, _ = q.shape
        kv_heads = layer.keys.shape[1]
        group = q_heads // kv_heads
        top = np.empty((pieces, group), dtype=np.float32)
        total = np.empty((pieces, group), dtype=np.float32)
        acc = np.empty((pieces, group, layer.values.shape[3]), dtype=np.float32)
        asked = q.contiguous().numpy(), np.float32(layer.scale * LOG2E), np.float32((layer.softcap or 0.0) * LOG2E)
        at = 0
        for attend, many in zip(self.work, self.counts, strict=True):
            mine = slice(at, at + many)
            attend(*asked, top[mine], total[mine], acc[mine])
            at = mine.stop
        out = np.empty((count * queries * kv_heads, group, acc.shape[2]), dtype=np.float32)
        merge(self.owner, top, total, acc, NO_FLOATS if layer.sinks is None else in_log2(layer.sinks), out)
        return torch.from_numpy(out.reshape(count, queries, q_heads, -1).swapaxes(1, 2))


def _attending(job: Job) -> Callable[..., None]:
    """The kernel of a job, told all but (q, factor, softcap, top, total, acc)."""
    if isinstance(job, SlotJob):
        pool = (*_flat(job.keys), *_flat(job.values), job.keys.shape[2], job.entries(), job.unit)
        biases = job.biases()
        return partial(attend_slots, *pool, job.pieces, biases)
    segment = _segment(job)
    return partial(attend_codes, *segment, job.pieces)


def _segment(job: CodeJob) -> tuple[Any, ...]:
    """What `attend_codes` is told of a segment."""
    keys, values, positions = job.read.keys, job.read.values, job.positions()
    table = np.empty((0, 2, 0), dtype=np.float32)
    if keys.rope is not None:
        table = rope_table(keys.rope, _power(int(positions.max(initial=0)) + 1))
    turn = bool(keys.rope and keys.rope.interleaved)
    return (_tuple(keys), _tuple(values), positions, table, turn, job.seen(), *job.biases())


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
