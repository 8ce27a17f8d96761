"""One mean with its interval, as `Resampling` gives it for a table of one column."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from kvassay.measure.resample import Bounds, Estimate, Resampling


def clustered_mean(
    values: Sequence[float], clusters: Iterable[Hashable], seed: int = 0, bounds: Bounds = None
) -> Estimate:
    column = np.array(values, dtype=np.float64).reshape(-1, 1)
    return Resampling(tuple(clusters), seed).estimates(column, [bounds])[0]
