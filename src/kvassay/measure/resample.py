"""The clustered bootstrap: one set of resample weights, applied to every arm and metric at once.

Contexts are drawn with replacement, all questions of a context together; a resample is a row of counts, and the
resampled means of all columns are a matrix product. Two things keep the intervals from claiming too much:

- With few contexts a percentile interval is too narrow (the resampled variance lacks n/(n-1), and the tails are
  normal, not Student's). The percentiles are moved outward to Phi(+-sqrt(n/(n-1)) t), the expanded percentile
  interval of Hesterberg 2015, arXiv 1411.5279. Below `MIN_CLUSTERS` there is no interval.
- Where all contexts agree exactly the bootstrap sees no spread, which is not certainty. A metric with bounds then
  gets the interval that n agreeing contexts allow: with probability 1 - LEVEL none of them would have shown a
  deviation that befalls more than q = 1 - ((1 - LEVEL) / 2)^(1/n) of the contexts ("rule of three"); such a
  context could deviate as far as the bounds. A metric without bounds gets none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvassay.errors import ExperimentError

LEVEL = 0.95
RESAMPLES = 4999
MIN_CLUSTERS = 5
"""Contexts below which no interval is given: 4 hold the truth in 82 to 88 of 100 cases, not 95 (simulated)."""
_BLOCK = 1 << 22
"""Weights held at a time (32 MiB)."""
_NOTHING = 1e-12
"""Standard error, relative to the mean (or 1), that is rounding and no spread."""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bounds = tuple[float, float] | None


@dataclass(frozen=True)
class Estimate:
    """A mean over samples and its interval at `LEVEL`; `low` and `high` are None where none can be given."""

    mean: float
    low: float | None
    high: float | None
    samples: int
    clusters: int
    error: float | None = None
    """Cluster-robust standard error of the mean; None with one cluster, 0 if all clusters agree exactly."""
    bounds: Bounds = field(default=None, compare=False)
    """Least and greatest value a sample can have, where the metric has such."""

    @property
    def half_width(self) -> float | None:
        """The larger distance from the mean to an end of the interval."""
        if self.low is None or self.high is None:
            return None
        return max(self.mean - self.low, self.high - self.mean)

    @property
    def agreeing(self) -> bool:
        """Whether all clusters agree exactly, so that no spread was seen."""
        return self.error == 0


@dataclass(frozen=True)
class Resampling:
    """Draws of whole clusters, the same for every column given."""

    clusters: tuple[Hashable, ...]
    """Of each sample."""
    seed: int = 0

    def estimates(self, values: Floats, bounds: Sequence[Bounds]) -> list[Estimate]:
        """Mean, interval and standard error of each column of `values` [samples, columns].

        bounds: per column, the least and greatest value a sample can have; None for none.
        Raises `ExperimentError` if there are no samples or not one row per cluster label.
        """
        samples = len(self.clusters)
        if not samples or len(values) != samples:
            raise ExperimentError(f"a mean over {len(values)} values in {samples} cluster labels cannot be taken")
        sums, counts = self._sums(values)
        number = len(counts)
        means = sums.sum(0) / samples
        errors = _errors(sums, counts, means)
        lows, highs = self._percentiles(sums, counts) if number >= MIN_CLUSTERS else (errors, errors)
        found = []
        for column, limits in enumerate(bounds):
            mean, error = float(means[column]), None if number < 2 else float(errors[column])
            low: float | None = float(lows[column])
            high: float | None = float(highs[column])
            if number < MIN_CLUSTERS:
                low = high = None
            elif error == 0:
                low, high = agreeing_interval(mean, number, limits)
            found.append(Estimate(mean, low, high, samples, number, error, limits))
        return found

    def _sums(self, values: Floats) -> tuple[Floats, Floats]:
        """Sum [clusters, columns] and size [clusters] of each cluster, in order of first appearance."""
        order = {cluster: place for place, cluster in enumerate(dict.fromkeys(self.clusters))}
        places = np.array([order[cluster] for cluster in self.clusters])
        sums = np.zeros((len(order), values.shape[1]))
        np.add.at(sums, places, values)
        return sums, np.bincount(places, minlength=len(order)).astype(np.float64)

    def _percentiles(self, sums: Floats, counts: Floats) -> tuple[Floats, Floats]:
        """Low and high end of each column's resampled means; NaN for a column that holds one."""
        import scipy.stats  # late: a second to import, and reading results does without

        number = len(counts)
        spread = math.sqrt(number / (number - 1)) * scipy.stats.t.ppf((1 - LEVEL) / 2, number - 1)
        tail = float(scipy.stats.norm.cdf(spread))
        both = np.column_stack([sums, counts]).T
        resampled = [both @ weights for weights in self._weights(number)]
        with np.errstate(invalid="ignore"):
            totals = np.concatenate(resampled, axis=1)
            means = totals[:-1] / totals[-1]
            low, high = np.quantile(means, [tail, 1 - tail], axis=1)
        return low, high

    def _weights(self, number: int) -> Iterator[Floats]:
        """How often each cluster is drawn, [clusters, resamples], a block of resamples at a time."""
        rng = np.random.default_rng(self.seed)
        left = RESAMPLES
        while left:
            size = min(left, max(1, _BLOCK // number))
            drawn = rng.integers(number, size=(size, number)) + number * np.arange(size)[:, None]
            yield np.bincount(drawn.ravel(), minlength=size * number).reshape(size, number).T.astype(np.float64)
            left -= size


def agreeing_interval(mean: float, clusters: int, bounds: Bounds) -> tuple[float | None, float | None]:
    """What `clusters` that agree exactly on `mean` allow; (None, None) without bounds."""
    if bounds is None:
        return None, None
    share = 1 - ((1 - LEVEL) / 2) ** (1 / clusters)
    return mean - share * (mean - bounds[0]), mean + share * (bounds[1] - mean)


def _errors(sums: Floats, counts: Floats, means: Floats) -> Floats:
    """Cluster-robust standard error of each mean (linearised ratio; that of a t test if clusters have one sample)."""
    number = len(counts)
    if number < 2:
        return np.zeros_like(means)
    residuals = sums - counts[:, None] * means
    errors = np.sqrt(number / (number - 1) * (residuals**2).sum(0)) / counts.sum()
    nothing: Floats = np.where(errors <= _NOTHING * np.maximum(1, np.abs(means)), 0.0, errors)
    return nothing
