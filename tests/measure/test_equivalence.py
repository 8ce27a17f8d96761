from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from kvassay.errors import GateError
from kvassay.measure.equivalence import equivalence, non_inferiority
from kvassay.measure.resample import Estimate
from tests.measure.means import clustered_mean

SAMPLE = [0.02, -0.01, 0.05, 0.0, 0.03, -0.04, 0.01, 0.02]


def test_with_one_question_per_context_it_is_two_t_tests() -> None:
    found = equivalence(clustered_mean(SAMPLE, range(8)), 0.05)
    assert found is not None
    above = scipy.stats.ttest_1samp(SAMPLE, -0.05, alternative="greater").pvalue
    below = scipy.stats.ttest_1samp(SAMPLE, 0.05, alternative="less").pvalue
    assert (found.above_p, found.below_p) == pytest.approx((above, below))
    assert found.p_value == pytest.approx(max(above, below)) and found.p_value < 0.05


def test_questions_of_one_context_count_once() -> None:
    """With equal contexts it is the t test on their means, however many questions repeat them."""
    labels = [c for c in range(8) for _ in range(3)]
    spread = [v + d for v in SAMPLE for d in (-0.5, 0.0, 0.5)]
    found, plain = (equivalence(clustered_mean(v, c), 0.05) for v, c in ((spread, labels), (SAMPLE, range(8))))
    assert found is not None and plain is not None
    assert found.p_value == pytest.approx(plain.p_value)


def test_non_inferiority_looks_one_way_only() -> None:
    better = clustered_mean([v + 1 for v in SAMPLE], range(8))
    assert non_inferiority(better, 0.05, "higher") == pytest.approx(
        scipy.stats.ttest_1samp([v + 1 for v in SAMPLE], -0.05, alternative="greater").pvalue
    )
    worse = non_inferiority(better, 0.05, "lower")  # for a loss, one more is worse
    assert worse is not None and worse > 0.99
    apart = equivalence(better, 0.05)
    assert apart is not None and apart.p_value > 0.99


def test_agreement_of_all_contexts_is_judged_by_their_number() -> None:
    """All differences 0 on 40 contexts: a loss of 0.1 on average needs 1 in 10 contexts, unseen with 0.9^40."""
    flat = clustered_mean([0.0] * 40, range(40), bounds=(-1.0, 1.0))
    found = equivalence(flat, 0.1)
    assert found is not None and found.above_p == pytest.approx(0.9**40) and found.below_p == pytest.approx(0.9**40)
    # The interval says the same: at its end the p is 2.5%.
    assert flat.low is not None
    at_end = non_inferiority(flat, -flat.low, "higher")
    assert at_end == pytest.approx(0.025)
    assert equivalence(clustered_mean([0.0] * 40, range(40)), 0.1) is None  # no bounds: nothing follows
    assert non_inferiority(clustered_mean([-0.2] * 9, range(9), bounds=(-1, 1)), 0.1, "higher") == 1.0


def test_too_few_contexts_are_not_tested() -> None:
    assert equivalence(clustered_mean([0.0, 0.1, 0.2, 0.1], range(4)), 0.5) is None
    assert non_inferiority(Estimate(0.0, None, None, 1, 1), 0.5, "higher") is None


def test_wrong_margins_are_refused() -> None:
    found = clustered_mean(SAMPLE, range(8))
    for margin in (0.0, -0.1, math.nan, math.inf):
        with pytest.raises(GateError, match="must be more than 0"):
            equivalence(found, margin)
    with pytest.raises(GateError, match="needs a metric with a direction"):
        non_inferiority(found, 0.1, "none")


def test_an_arm_at_the_margin_is_called_equivalent_as_rarely_as_alpha_says() -> None:
    """True difference exactly at the margin, clustered data: at most 5% may pass, and about so many do."""
    rng = np.random.default_rng(11)
    passed = 0
    for _ in range(400):
        shared = np.repeat(rng.normal(size=12), 3)
        values = -0.5 + shared + rng.normal(size=36)
        p = non_inferiority(clustered_mean(list(values), np.repeat(np.arange(12), 3).tolist()), 0.5, "higher")
        passed += p is not None and p < 0.05
    assert 0.02 * 400 <= passed <= 0.085 * 400


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=5, max_size=10),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
)
def test_a_wider_margin_is_easier_and_the_mirror_image_no_different(
    values: list[float], small: float, more: float
) -> None:
    found = clustered_mean(values, range(len(values)), bounds=(-1, 1))
    mirrored = clustered_mean([-v for v in values], range(len(values)), bounds=(-1, 1))
    narrow, wide, mirror = equivalence(found, small), equivalence(found, small + more), equivalence(mirrored, small)
    assert narrow is not None and wide is not None and mirror is not None
    assert wide.p_value <= narrow.p_value + 1e-12
    assert mirror.p_value == pytest.approx(narrow.p_value, abs=1e-9)
