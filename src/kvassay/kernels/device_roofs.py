"""The two roofs of a device that torch computes on: how fast it reads its memory, and multiplies float32 matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

READ_BYTES = 1 << 30
"""Larger than any cache of a GPU."""
MATRIX = 4096
"""Rows and columns of the product."""
REPEATS = 10
"""Launches between two looks at the clock, so that what it takes to launch one does not count."""


def device_rates(
    place: torch.device, rounds: int, read_bytes: int = READ_BYTES, matrix: int = MATRIX
) -> list[tuple[float, float]]:
    """Per round, bytes per second of summing float32, and operations per second of a float32 product (a multiply-add
    counts as two); one more round, to warm up, is not among them.
    """
    x = torch.ones(read_bytes // 4, device=place)
    a, b = (torch.ones(matrix, matrix, device=place) for _ in range(2))
    out = torch.empty_like(a)
    found = [
        (
            x.nbytes / seconds(place, lambda: x.sum(), REPEATS),
            2 * matrix**3 / seconds(place, lambda: torch.mm(a, b, out=out), REPEATS),
        )
        for _ in range(rounds + 1)
    ]
    return found[1:]


def seconds(place: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Wall seconds of one of `repeats` calls in a row, everything before them and they themselves finished."""
    _finish(place)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _finish(place)
    return (time.perf_counter() - start) / repeats


def typical(rates: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Medians, then the best rounds, of bandwidth and matrix rate each."""
    reads, products = zip(*rates, strict=True)
    return median(reads), median(products), max(reads), max(products)


def _finish(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
