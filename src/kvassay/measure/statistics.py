"""Means with intervals, clustered by context: questions about one context are not independent samples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvassay.errors import ExperimentError

LEVEL = 0.95
RESAMPLES = 4999

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Estimate:
    """A mean over samples and its interval; `low` and `high` are None with fewer than 2 clusters."""

    mean: float
    low: float | None
    high: float | None
    samples: int
    clusters: int

    @property
    def half_width(self) -> float | None:
        """The larger distance from the mean to an end of the interval."""
        if self.low is None or self.high is None:
            return None
        return max(self.mean - self.low, self.high - self.mean)


@dataclass(frozen=True)
class Flips:
    """Samples whose right answer was lost, or gained, against dense."""

    right_to_wrong: int
    wrong_to_right: int
    samples: int


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable], seed: int = 0) -> Estimate:
    """Mean of `values` with a percentile bootstrap interval that resamples whole clusters.

    Args:
        values: one number per sample.
        clusters: which cluster (context) each sample belongs to.
        seed: of the resampling; the same input gives the same interval.

    Raises:
        ExperimentError: no values, or lengths differ.
    """
    if not values or len(values) != len(clusters):
        raise ExperimentError(f"a mean over {len(values)} values in {len(clusters)} cluster labels cannot be taken")
    sums, counts = _cluster_sums(values, clusters)
    mean = math.fsum(values) / len(values)
    number = len(sums)
    if number < 2:
        return Estimate(mean, None, None, len(values), number)
    if not np.isfinite(sums).all():
        return Estimate(mean, math.nan, math.nan, len(values), number)
    import scipy.stats  # late: a second to import, and reading results does without

    with warnings.catch_warnings():  # equal clusters give a degenerate distribution, which is the right answer here
        warnings.simplefilter("ignore")
        interval = scipy.stats.bootstrap(
            (sums, counts),
            _ratio,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high), len(values), number)


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[Floats, Floats]:
    """Sum and size of each cluster, in order of first appearance."""
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(float(value))
    sums = np.array([math.fsum(group) for group in groups.values()], dtype=np.float64)
    return sums, np.array([len(group) for group in groups.values()], dtype=np.float64)


def _ratio(sums: Floats, counts: Floats, axis: int = -1) -> Floats:
    """Mean over samples of resampled clusters: larger clusters weigh more, as in the mean itself."""
    ratio: Floats = sums.sum(axis=axis) / counts.sum(axis=axis)
    return ratio


def flips(dense: Sequence[bool], arm: Sequence[bool]) -> Flips:
    """Count samples that dense has right and the arm wrong, and the other way round."""
    pairs = list(zip(dense, arm, strict=True))
    lost = sum(1 for before, after in pairs if before and not after)
    won = sum(1 for before, after in pairs if after and not before)
    return Flips(lost, won, len(pairs))


def worst_decile(values: Sequence[float]) -> float:
    """Mean of the largest tenth of `values` (at least one): what averages hide."""
    if not values:
        raise ExperimentError("the worst decile of no values cannot be taken")
    worst = sorted(values, reverse=True)[: math.ceil(len(values) / 10)]
    return math.fsum(worst) / len(worst)
