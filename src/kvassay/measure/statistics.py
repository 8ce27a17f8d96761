"""Means with intervals clustered by context, flips with McNemar's test, the worst tenth, and noise.

Questions about one context are not independent samples: intervals resample whole contexts (`resample.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvassay.errors import ExperimentError
from kvassay.measure.resample import Estimate, Floats

Better = Literal["higher", "lower", "none"]


@dataclass(frozen=True)
class Flips:
    """Samples whose right answer was lost, or gained, against dense."""

    right_to_wrong: int
    wrong_to_right: int
    samples: int
    p_value: float | None = None
    """McNemar's test, exact and two-sided: how likely losses and gains differ at least this much if both were
    equally likely. Counts questions, as if those of one context were independent: read it beside the clustered
    interval of the difference, never instead."""


def flips(dense: Sequence[bool], arm: Sequence[bool]) -> Flips:
    """Count samples that dense has right and the arm wrong, and the other way round, with McNemar's exact test."""
    pairs = list(zip(dense, arm, strict=True))
    lost = sum(1 for before, after in pairs if before and not after)
    won = sum(1 for before, after in pairs if after and not before)
    return Flips(lost, won, len(pairs), mcnemar(lost, won))


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p of McNemar's test; 1 if nothing flipped."""
    if lost + won == 0:
        return 1.0
    import scipy.stats  # late: a second to import, and reading results does without

    return float(scipy.stats.binomtest(lost, lost + won, 0.5).pvalue)


def worst_decile(values: Sequence[float], better: Better = "lower") -> float:
    """Mean of the worst tenth of `values` (at least one): what averages hide. Without a direction, the largest."""
    if not len(values):
        raise ExperimentError("the worst decile of no values cannot be taken")
    return float(worst_deciles(np.array(values, dtype=np.float64).reshape(-1, 1), [better])[0])


def worst_deciles(values: Floats, better: Sequence[Better]) -> Floats:
    """`worst_decile` of each column of `values` [samples, columns]; NaN for a column that holds one."""
    sign = np.array([-1.0 if direction == "higher" else 1.0 for direction in better])
    worst = np.sort(values * sign, axis=0)[-math.ceil(len(values) / 10) :]  # NaN sorts last
    means: Floats = worst.mean(axis=0) * sign
    return means


def noise(difference: Estimate, again: Estimate | None) -> float | None:
    """What a difference to dense must exceed to mean anything; None where no interval can be given.

    The larger of the half width of the arm's own paired interval and the spread of dense', dense in another batch
    split: how far from 0 its paired interval reaches (its mean, where all contexts agree exactly).

    Args:
        difference: arm minus dense, paired.
        again: dense' minus dense on the same questions, if it ran.
    """
    own = difference.half_width
    if own is None:
        return None
    return own if again is None else max(own, reach(again))


def reach(again: Estimate) -> float:
    """How far from 0 the paired difference of dense' reaches."""
    if again.low is None or again.high is None or again.agreeing:
        return abs(again.mean)
    return max(abs(again.low), abs(again.high))
