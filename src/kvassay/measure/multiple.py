"""Is there a difference at all, asked many times: a two-sided test of a paired mean, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvassay.measure.equivalence import superiority
from kvassay.measure.resample import LEVEL, Estimate

ALPHA = 1 - LEVEL


def two_sided_p(difference: Estimate) -> float | None:
    """p of the null hypothesis that the true mean difference is 0, on the cluster-robust standard error.

    None with too few contexts, or where all agree exactly on a metric without bounds: no test is possible.
    """
    above, below = superiority(difference, 0.0, "higher"), superiority(difference, 0.0, "lower")
    return None if above is None or below is None else min(1.0, 2 * min(above, below))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that comparing each with alpha keeps the chance of any false alarm below alpha (Holm 1979).

    The smallest is multiplied by the number of tests, the next by one less, and so on; none may fall below one before.
    NaN counts as a test and stays NaN.
    """
    order = sorted(range(len(p_values)), key=lambda at: (math.isnan(p_values[at]), p_values[at]))
    adjusted, least = [math.nan] * len(p_values), 0.0
    for rank, at in enumerate(order):
        if not math.isnan(p_values[at]):
            least = max(least, min(1.0, (len(p_values) - rank) * p_values[at]))
            adjusted[at] = least
    return adjusted
