"""How many decode steps can be taken at once: until a request ends, arrives, or finds no block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvassay.replay.serving.cost import StepTimes
from kvassay.replay.serving.flight import Flight
from kvassay.replay.serving.geometry import Geometry


def leap(times: StepTimes, contexts: NDArray[np.int64], first: float, most: int, until: float | None) -> int:
    """Steps, 1 to `most`, that begin before `until` seconds have passed.

    `first` is the first step's time; each further one is longer by the same amount, as contexts grow by one.
    """
    if most <= 1 or until is None:
        return max(most, 1)
    growth = max(times.seconds(contexts + 1, ()) - first, 0.0)

    def begins(step: int) -> float:
        return step * first + growth * step * (step - 1) / 2

    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if begins(middle - 1) < until:
            low = middle
        else:
            high = middle - 1
    return low


def fitting(geometry: Geometry, running: Sequence[Flight], steps: int, free: int) -> int:
    """The most steps, 1 to `steps`, whose new blocks are free; the first step's slots are there already."""
    low, high = 1, steps
    if _new_blocks(geometry, running, steps) <= free:
        return steps
    while low < high:
        middle = (low + high + 1) // 2
        if _new_blocks(geometry, running, middle) <= free:
            low = middle
        else:
            high = middle - 1
    return low


def _new_blocks(geometry: Geometry, running: Sequence[Flight], steps: int) -> int:
    total = 0
    for flight in running:
        units = geometry.units(flight.computed + steps)
        if units > flight.units:
            total += geometry.blocks(units) - geometry.blocks(flight.units)
    return total
