"""What a planned number of contexts and questions can tell apart: asked before a run, when a gate is declared.

The spread of one question's paired difference is a stated assumption; the answer is no better than that. Power is
that of the t test on context means, from the noncentral t distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvassay.errors import GateError
from kvassay.measure.resample import MIN_CLUSTERS

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Spread:
    """Spread of paired differences, per question, in the metric's unit."""

    deviation: float
    """Standard deviation over all questions, >= 0."""
    correlation: float
    """Intra-class correlation: share of the variance that questions of one context have in common, 0 to 1."""
    source: str
    """Where it comes from, for people: `assumed: 10% of answers flip`."""

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if not (math.isfinite(self.deviation) and self.deviation >= 0):
            raise GateError(f"standard deviation {self.deviation}: must be 0 or more")
        if not 0 <= self.correlation <= 1:
            raise GateError(f"correlation within a context {self.correlation}: must be 0 to 1")

    def error(self, contexts: int, questions: int) -> float:
        """Standard error of a mean over so many contexts of so many questions each."""
        return self.deviation * math.sqrt((1 + (questions - 1) * self.correlation) / (contexts * questions))


def assumed_flips(share: float, correlation: float = 0.5) -> Spread:
    """Spread of a right-or-wrong metric when `share` of the answers flip, as often one way as the other.

    A difference is then -1, 0 or 1, of variance `share`. Raises `GateError` unless `share` is in (0, 1].
    """
    if not 0 < share <= 1:
        raise GateError(f"share of answers that flip {share}: must be more than 0 and at most 1")
    source = f"assumed: {share:.0%} of answers flip, correlation {correlation:g} within a context"
    return Spread(math.sqrt(share), correlation, source)


def smallest_difference(error: float, contexts: int, *, alpha: float = ALPHA, power: float = POWER) -> float | None:
    """Smallest true difference that a one-sided test at `alpha` finds with probability `power`.

    It is the smallest margin, too, within which an arm equal to dense is found non-inferior with that probability.
    None with fewer than `MIN_CLUSTERS` contexts: nothing is judged there.

    Args:
        error: standard error of the mean paired difference, from `Spread.error`.
        contexts: planned contexts.
        alpha: probability of finding a difference that is not there.
        power: probability of finding one that is.

    Raises:
        GateError: a probability outside (0, 1), or power not above alpha.
    """
    if not 0 < alpha < power < 1:
        raise GateError(f"alpha {alpha} and power {power}: 0 < alpha < power < 1 is needed")
    if contexts < MIN_CLUSTERS:
        return None
    import scipy.optimize  # late: a second to import
    import scipy.stats

    degrees = contexts - 1
    critical = float(scipy.stats.t.isf(alpha, degrees))
    shift = scipy.optimize.brentq(lambda d: scipy.stats.nct.sf(critical, degrees, d) - power, 0, critical + 50)
    return float(shift) * error


def contexts_needed(
    spread: Spread, questions: int, margin: float, *, alpha: float = ALPHA, power: float = POWER, most: int = 100_000
) -> int | None:
    """Fewest contexts of `questions` questions that detect `margin`; None if `most` are not enough."""
    if not margin > 0:
        raise GateError(f"margin {margin}: must be more than 0")

    def enough(contexts: int) -> bool:
        found = smallest_difference(spread.error(contexts, questions), contexts, alpha=alpha, power=power)
        return found is not None and found <= margin

    if not enough(most):
        return None
    low, high = MIN_CLUSTERS - 1, most  # `low` is never enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
