"""Is an arm as good as dense? Tests against a margin that the caller has declared beforehand.

No significant difference is not evidence of none; these tests put the burden on the arm. They are t tests on the
cluster-robust standard error (one degree of freedom less than contexts), those of Schuirmann 1987 where each
context has one question. Where all contexts agree exactly there is no standard error: p is then the chance that
none of n contexts shows a deviation frequent enough to move the mean to the margin, (1 - d)^n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvassay.errors import GateError
from kvassay.measure.resample import MIN_CLUSTERS, Estimate
from kvassay.measure.statistics import Better


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST) of a mean paired difference against -margin and +margin."""

    margin: float
    """In the metric's own unit."""
    above_p: float
    """p of the null hypothesis that the true difference is -margin or less."""
    below_p: float
    """p of the null hypothesis that it is +margin or more."""

    @property
    def p_value(self) -> float:
        """The larger one: both must be small for equivalence."""
        return max(self.above_p, self.below_p)


def equivalence(difference: Estimate, margin: float) -> Equivalence | None:
    """TOST of arm minus dense; None with fewer than `MIN_CLUSTERS` contexts or where no test is possible.

    Raises `GateError` for a margin that is not positive.
    """
    _check(margin)
    above, below = _above(difference, -margin), _above(_mirrored(difference), -margin)
    return None if above is None or below is None else Equivalence(margin, above, below)


def non_inferiority(difference: Estimate, margin: float, better: Better) -> float | None:
    """One-sided p of the null hypothesis that the arm is worse than dense by `margin` or more.

    None as for `equivalence`. Raises `GateError` for a margin that is not positive, or a metric without direction.
    """
    _check(margin)
    if better == "none":
        raise GateError("non-inferiority needs a metric with a direction; test equivalence instead")
    return _above(difference if better == "higher" else _mirrored(difference), -margin)


def superiority(difference: Estimate, lead: float, better: Better) -> float | None:
    """One-sided p of the null hypothesis that one arm is better than the other by `lead` (0 or more) or less.

    difference: the one minus the other, paired. None as for `equivalence`; `GateError` as for `non_inferiority`.
    """
    if better == "none":
        raise GateError("superiority needs a metric with a direction")
    return _above(difference if better == "higher" else _mirrored(difference), lead)


def _above(found: Estimate, bound: float) -> float | None:
    """One-sided p of the null hypothesis that the true mean is `bound` or less."""
    if found.clusters < MIN_CLUSTERS or found.error is None:
        return None
    if math.isnan(found.mean):
        return math.nan
    if found.agreeing:
        return _agreeing(found, bound)
    import scipy.stats  # late: a second to import, and reading results does without

    return float(scipy.stats.t.sf((found.mean - bound) / found.error, found.clusters - 1))


def _agreeing(found: Estimate, bound: float) -> float | None:
    """p where all contexts agree: a share d of deviating contexts, each down to the least value, moves the mean."""
    if found.bounds is None:
        return None
    room = found.mean - found.bounds[0]
    if found.mean <= bound:
        return 1.0
    share = (found.mean - bound) / room if room > 0 else 1.0
    return float(max(0.0, 1 - share) ** found.clusters)


def _mirrored(found: Estimate) -> Estimate:
    bounds = None if found.bounds is None else (-found.bounds[1], -found.bounds[0])
    return Estimate(-found.mean, None, None, found.samples, found.clusters, found.error, bounds)


def _check(margin: float) -> None:
    if not (math.isfinite(margin) and margin > 0):
        raise GateError(f"margin {margin}: must be more than 0")
