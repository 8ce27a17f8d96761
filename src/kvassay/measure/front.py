"""Which arms are on a front: no other arm is at least as good on both axes and better on one."""

from __future__ import annotations

from collections.abc import Mapping


def front(points: Mapping[str, tuple[float, float]]) -> frozenset[str]:
    """Names of the non-dominated points; a point is (cost, quality), less cost and more quality are better.

    Equal points are all kept; a point with a NaN coordinate is never on a front and dominates nothing.
    """
    real = {name: point for name, point in points.items() if point[0] == point[0] and point[1] == point[1]}
    return frozenset(
        name for name, point in real.items() if not any(_dominates(other, point) for other in real.values())
    )


def _dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] >= b[1] and a != b
