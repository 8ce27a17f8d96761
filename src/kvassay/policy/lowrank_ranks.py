"""How many ranks each matrix and each head group gets: pure arithmetic on scores and spectra.

A spectrum is the list of a group's squared singular values, largest first; its sum is the group's energy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from kvassay.errors import PolicyError


class Ceiling(NamedTuple):
    """sum(rank * weight) may be at most `most`."""

    weights: tuple[float, ...]
    most: float

    def broken_by(self, ranks: Sequence[int]) -> bool:
        """True if these ranks are too many."""
        return sum(r * w for r, w in zip(ranks, self.weights, strict=True)) > self.most * (1 + 1e-12)


def fisher_split(scores: Sequence[float], dims: Sequence[int], share: float, multiple: int) -> list[int]:
    """Ranks of matrices with so many output dimensions, in proportion to their Fisher scores.

    One pool of share * sum(dims): proportional, floored, clipped to the full dimension; what is left is dealt one by
    one, largest remainder first; then each is rounded to the nearest multiple, at least one of them, at most the
    dimension. The rounding may move the sum. (Palu's `fisher_uniform`, which ReCalKV shares.)
    """
    total, pool = sum(scores), round(share * sum(dims))
    if not total > 0:
        raise PolicyError(f"Fisher scores sum to {total}: the calibration text has no gradient at the projections")
    wanted = [pool * score / total for score in scores]
    ranks = [min(int(w), dim) for w, dim in zip(wanted, dims, strict=True)]
    order = sorted(range(len(dims)), key=lambda i: int(wanted[i]) - wanted[i])
    left = pool - sum(ranks)
    while left > 0 and any(r < dim for r, dim in zip(ranks, dims, strict=True)):
        for i in order:
            if left > 0 and ranks[i] < dims[i]:
                ranks[i] += 1
                left -= 1
    return [
        min(dim, max(multiple, (2 * r + multiple) // (2 * multiple) * multiple))
        for r, dim in zip(ranks, dims, strict=True)
    ]


def energy_ranks(spectra: Sequence[Sequence[float]], rank: int) -> list[int]:
    """`rank` shared out in proportion to energy, rounded; each at least 1 and at most what its group has.

    What a group cannot take goes to the others, by their energy: ranks that are enough for all fill all.
    """
    energies, found = [sum(spectrum) for spectrum in spectra], [0] * len(spectra)
    left, open_ = rank, list(range(len(spectra)))
    while True:
        whole = sum(energies[i] for i in open_)
        full = [i for i in open_ if energies[i] > 0 and left * energies[i] >= len(spectra[i]) * whole]
        if not full:
            break
        for i in full:
            found[i] = len(spectra[i])
        left -= sum(found[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    for i in open_:
        found[i] = max(1, round(left * energies[i] / whole) if whole > 0 else 1)
    return found


def cut(spectra: Sequence[Sequence[float]], ranks: Sequence[int], ceiling: Ceiling) -> list[int]:
    """Take away ranks, always the one that loses least energy per unit of the ceiling, until it holds.

    No group goes below rank 1, so that a ceiling under sum(weights) stays broken.
    """
    found = list(ranks)

    def loss(i: int) -> tuple[float, int]:
        return spectra[i][found[i] - 1] / ceiling.weights[i], i

    heap = [loss(i) for i in range(len(found)) if found[i] > 1]
    heapq.heapify(heap)
    while heap and ceiling.broken_by(found):
        _, i = heapq.heappop(heap)
        found[i] -= 1
        if found[i] > 1:
            heapq.heappush(heap, loss(i))
    return found


def grow(spectra: Sequence[Sequence[float]], ranks: Sequence[int], rank: int) -> list[int]:
    """Add ranks, always the one that keeps most energy, until there are `rank` in all or none is left to add."""
    found = list(ranks)
    room = [(-spectra[i][found[i]], i) for i in range(len(found)) if found[i] < len(spectra[i])]
    heapq.heapify(room)
    while room and sum(found) < rank:
        _, i = heapq.heappop(room)
        found[i] += 1
        if found[i] < len(spectra[i]):
            heapq.heappush(room, (-spectra[i][found[i]], i))
    return found
