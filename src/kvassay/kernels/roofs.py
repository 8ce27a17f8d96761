"""Both roofs of the device a kernel ran on: how fast it reads memory, and how fast it multiplies matrices.

To be measured in the same run as the kernel: on a machine that others use, both move. They are roofs of this CPU, or of
the device named, and say nothing of another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numba
import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from kvassay.kernels.device_roofs import device_rates, typical

READ_BYTES = 256 * 2**20
"""Larger than any last-level cache here, so that every pass reads memory."""
Clock = Callable[[], float]
MATRIX = 1024
"""Rows and columns of the product."""


@dataclass(frozen=True)
class Roofs:
    """What this machine did, median over rounds, with all the threads that kernels use."""

    bandwidth: float
    """Bytes per second read from memory, summing float32."""
    matrix_rate: float
    """Floating-point operations per second of a float32 matrix product; a multiply-add counts as two."""
    bandwidth_best: float
    """The fastest round's."""
    matrix_rate_best: float
    """The fastest round's."""
    threads: int
    """Threads that read, and that multiply; 0 on a GPU."""


@njit(parallel=True, fastmath={"reassoc", "contract", "nsz"}, cache=True)
def _read(x, parts):  # type: ignore[no-untyped-def] # pragma: no cover
    """Sum of x [n], read in `parts` equal pieces."""
    size = x.shape[0] // parts
    sums = np.zeros(parts, dtype=np.float32)
    for part in prange(parts):
        mine = x[part * size : (part + 1) * size]
        total = np.float32(0)
        for i in range(size):
            total += mine[i]
        sums[part] = total
    return sums.sum()


def read_once(clock: Clock | None = None) -> float:
    """Bytes per second of one pass over memory, by the wall's clock unless another is given."""
    x = _memory()
    clock = clock or time.perf_counter
    start = clock()
    _read(x, 8 * numba.get_num_threads())
    return x.nbytes / (clock() - start)


def multiply_once(clock: Clock | None = None) -> float:
    """Floating-point operations per second of one matrix product, by the wall's clock unless another is given."""
    a, b, out = _matrices()
    clock = clock or time.perf_counter
    start = clock()
    torch.mm(a, b, out=out)
    return 2 * MATRIX**3 / (clock() - start)


def measure_roofs(device: str = "cpu", rounds: int = 7) -> Roofs:
    """Both roofs, in turn, `rounds` times after one to warm up; takes some tenths of a second."""
    if device != "cpu":
        return Roofs(*typical(device_rates(torch.device(device), rounds)), threads=0)
    found = [(read_once(), multiply_once()) for _ in range(rounds + 1)][1:]
    return Roofs(*typical(found), threads=numba.get_num_threads())


@cache
def _memory() -> NDArray[np.float32]:
    # Pages that differ, as a machine's host may keep equal ones only once.
    return np.arange(READ_BYTES // 4, dtype=np.float32)


@cache
def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(MATRIX, MATRIX), torch.ones(MATRIX, MATRIX), torch.empty(MATRIX, MATRIX)
