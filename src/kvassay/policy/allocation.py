"""Bit allocation: each unit (a token's value, a key channel) gets a width so that weighted distortion is least.

The objective is `sum over units of weight * distortion[width]` under a limit on the sum of widths. `greedy` is
exact wherever it stops on the lower convex hull of the distortion table; `bisect` is the Lagrangian search of the
RDKV paper (algorithm 2) with its 1 % tolerance, which may end above the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from kvassay.errors import BudgetError, PolicyError

Table = Mapping[int, float]
"""Distortion by width in bits: normalised mean squared error, 1 at 0 bits, falling."""


def hull(table: Table) -> list[int]:
    """Widths of the lower convex hull of a distortion table, ascending: each step gains less per bit than the last.

    Raises `PolicyError` if the table does not fall.
    """
    widths = sorted(table)
    if any(table[b] >= table[a] for a, b in itertools.pairwise(widths)):
        raise PolicyError(f"distortion must fall with every width, got {dict(sorted(table.items()))}")
    kept: list[int] = []
    for width in widths:
        while len(kept) > 1 and _slope(table, kept[-2], kept[-1]) <= _slope(table, kept[-1], width):
            kept.pop()
        kept.append(width)
    return kept


def greedy(weight: Tensor, table: Table, bits: int) -> Tensor:
    """Widths int64 [rows, units], each row within `bits`: the steps of largest gain per bit first.

    weight: float [rows, units], not negative; infinite comes first. Ties go to the earlier unit. A row stops at the
    first step that does not fit, so the result is optimal for the bits it uses.
    Raises `BudgetError` if even the smallest width of every unit does not fit.
    """
    widths = hull(table)
    rows, units = weight.shape
    least = widths[0] * units
    if least > bits:
        raise BudgetError(f"{units} units of at least {widths[0]} bits take {least} bits, {bits} may be used")
    steps = list(itertools.pairwise(widths))
    gains = torch.stack([weight.double() * _slope(table, a, b) for a, b in steps], dim=-1)
    cost = torch.tensor([b - a for a, b in steps]).expand(rows, units, -1).flatten(1)
    order = torch.sort(gains.flatten(1), dim=1, descending=True, stable=True).indices
    fits = cost.gather(1, order).cumsum(1) <= bits - least
    taken = torch.zeros_like(cost).scatter_(1, order, cost.gather(1, order) * fits)
    return widths[0] + taken.view(rows, units, -1).sum(-1)


def bisect(weight: Tensor, table: Table, bits: int, *, iterations: int = 64, tolerance: float = 0.01) -> Tensor:
    """Widths int64 [rows, units] by bisection on the price of a bit; the mean may be over `bits` / units.

    Stops at a mean within `tolerance` of the target, or after `iterations` at the last price tried, which on ties
    can be far off (as published: there is no repair step).
    """
    return torch.stack([_bisect_row(row.double(), table, bits / len(row), iterations, tolerance) for row in weight])


def keep_best(bits: Tensor, weight: Tensor, table: Table) -> Tensor:
    """Widths [rows, units] of which a row that would keep nothing keeps its heaviest unit, at the least width.

    The guard of RDKV's procedure.
    """
    best = torch.zeros_like(bits).scatter_(1, weight.argmax(1, keepdim=True), min(filter(None, table)))
    return torch.where((bits == 0).all(1, keepdim=True), best, bits)


def _bisect_row(weight: Tensor, table: Table, target: float, iterations: int, tolerance: float) -> Tensor:
    widths = torch.tensor(sorted(table))
    distortion = torch.tensor([table[int(b)] for b in widths], dtype=torch.float64)
    loss = weight.clamp(max=1e30)[:, None] * distortion

    def choose(price: float) -> Tensor:
        return widths[(loss + price * widths).argmin(-1)]

    def mean(found: Tensor) -> float:
        return float(found.double().mean())

    found = choose(0.0)
    if mean(found) <= target:
        return found
    low, high = 0.0, 0.375 * float(weight.clamp(max=1e30).max())
    while mean(choose(high)) > target:
        high *= 2
    for _ in range(iterations):
        price = (low + high) / 2
        found = choose(price)
        if abs(mean(found) - target) <= tolerance * target:
            break
        low, high = (price, high) if mean(found) > target else (low, price)
    return found


def _slope(table: Table, a: int, b: int) -> float:
    """Distortion saved per bit between two widths."""
    return (table[a] - table[b]) / (b - a)
