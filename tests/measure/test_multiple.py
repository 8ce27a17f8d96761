"""The two-sided test against scipy's paired t test, and Holm's correction on a published kind of example."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from kvassay.measure.multiple import holm, two_sided_p
from kvassay.measure.resample import Resampling


def test_with_one_question_per_context_it_is_the_paired_t_test() -> None:
    values = np.random.default_rng(0).normal(0.4, 1.0, size=12)
    found = Resampling(tuple(range(12))).estimates(values[:, None], [None])[0]
    assert two_sided_p(found) == pytest.approx(scipy.stats.ttest_1samp(values, 0.0).pvalue, rel=1e-9)


def test_without_any_difference_p_is_one_and_with_few_contexts_there_is_none() -> None:
    nothing = np.zeros((10, 1))
    assert two_sided_p(Resampling(tuple(range(10))).estimates(nothing, [(-1.0, 1.0)])[0]) == 1.0
    assert two_sided_p(Resampling((0, 0, 1, 1, 2, 2, 3, 3, 3, 3)).estimates(nothing, [(-1.0, 1.0)])[0]) is None


def test_holm_by_hand() -> None:
    # Sorted: 0.005 x4, 0.01 x3, 0.03 x2, 0.04 x1 -> 0.02, 0.03, 0.06, and 0.04 raised to 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_nan_counts_as_a_test() -> None:
    found = holm([0.01, math.nan])
    assert found[0] == 0.02 and math.isnan(found[1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_p_and_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    found = holm(p)
    assert all(a <= b <= min(1.0, len(p) * a) or b == max(found) for a, b in zip(p, found, strict=True))
    assert all(raw <= adjusted <= 1 for raw, adjusted in zip(p, found, strict=True))
    order = sorted(range(len(p)), key=p.__getitem__)
    assert [found[at] for at in order] == sorted(found)
    assert found[order[0]] == pytest.approx(min(1.0, len(p) * p[order[0]]))
