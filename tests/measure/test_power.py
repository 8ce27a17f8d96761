from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from kvassay.errors import GateError
from kvassay.measure.power import (
    Spread,
    assumed_flips,
    contexts_needed,
    smallest_difference,
)


def test_the_smallest_difference_is_found_with_the_power_asked_for() -> None:
    """Simulated: 10 contexts with that true difference, tested by scipy, 4000 times."""
    rng = np.random.default_rng(2)
    difference = smallest_difference(1 / math.sqrt(10), 10)
    assert difference is not None
    samples = rng.normal(difference, 1.0, size=(4000, 10))
    found = (scipy.stats.ttest_1samp(samples, 0, axis=1, alternative="greater").pvalue < 0.05).mean()
    assert 0.775 <= found <= 0.825


def test_many_contexts_approach_the_normal_formula() -> None:
    wanted = scipy.stats.norm.isf(0.05) + scipy.stats.norm.ppf(0.8)
    found = smallest_difference(1.0, 100_000)
    assert found == pytest.approx(wanted, rel=1e-3)


def test_standard_error_by_hand() -> None:
    assert Spread(0.5, 0.0, "").error(25, 4) == pytest.approx(0.05)  # independent: 0.5 / sqrt(100)
    assert Spread(0.5, 1.0, "").error(25, 4) == pytest.approx(0.1)  # copies: 0.5 / sqrt(25)
    assert assumed_flips(0.25).deviation == 0.5


def test_contexts_needed_is_the_fewest() -> None:
    spread = assumed_flips(0.1, 0.3)
    number = contexts_needed(spread, 4, 0.05)
    assert number is not None
    enough = smallest_difference(spread.error(number, 4), number)
    fewer = smallest_difference(spread.error(number - 1, 4), number - 1)
    assert enough is not None and fewer is not None and enough <= 0.05 < fewer
    assert contexts_needed(spread, 4, 1e-6) is None
    assert contexts_needed(Spread(0.0, 0.0, ""), 4, 0.05) == 5


def test_too_few_contexts_detect_nothing() -> None:
    assert smallest_difference(0.001, 4) is None


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(GateError, match=r"alpha 0\.9 and power 0\.8"):
        smallest_difference(1.0, 10, alpha=0.9)
    with pytest.raises(GateError, match="correlation within a context 2"):
        Spread(1.0, 2.0, "")
    with pytest.raises(GateError, match="answers that flip 0"):
        assumed_flips(0.0)
    with pytest.raises(GateError, match="margin 0"):
        contexts_needed(assumed_flips(0.1), 1, 0.0)
