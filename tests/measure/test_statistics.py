from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from kvassay.errors import ExperimentError
from kvassay.measure.front import front
from kvassay.measure.resample import Estimate, Resampling
from kvassay.measure.statistics import Flips, flips, mcnemar, noise, worst_decile
from tests.measure.means import clustered_mean


def test_one_cluster_gives_a_mean_and_no_interval() -> None:
    found = clustered_mean([1.0, 2.0, 6.0], ["a", "a", "a"])
    assert (found.mean, found.low, found.high, found.samples, found.clusters) == (3.0, None, None, 3, 1)
    assert (found.half_width, found.error, found.agreeing) == (None, None, False)


def test_four_clusters_give_an_error_and_no_interval() -> None:
    found = clustered_mean([0.0, 1.0, 1.0, 0.0], "abcd", bounds=(0, 1))
    assert (found.mean, found.low, found.high) == (0.5, None, None)
    assert found.error == pytest.approx(math.sqrt(1 / 3) / 2)


def test_clusters_that_agree_are_no_certainty() -> None:
    """n agreeing contexts of a bounded metric: a deviation in q of all contexts stays unseen with (1 - q)^n."""
    values, labels = [1.0] * 10, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    found = clustered_mean(values, labels, bounds=(0.0, 1.0))
    assert found.low is not None and found.agreeing
    assert (1 - (1 - found.low)) ** 5 == pytest.approx(0.025)
    assert found.high == 1.0
    assert clustered_mean(values, labels) == Estimate(1.0, None, None, 10, 5, 0.0)  # no bounds, no interval


def test_interval_is_that_of_all_resamples_of_clusters() -> None:
    """Five clusters have 3125 equally likely resamples: their exact percentiles are the oracle."""
    clusters = {"a": [0.0, 0.0], "b": [1.0], "c": [1.0, 0.0, 1.0], "d": [0.5], "e": [0.25, 0.75]}
    values = [v for group in clusters.values() for v in group]
    labels = [name for name, group in clusters.items() for _ in group]
    exact = []
    for draw in itertools.product(clusters.values(), repeat=5):
        joined = [v for group in draw for v in group]
        exact.append(sum(joined) / len(joined))
    # Expanded percentile: 97.5% of a normal becomes that of Student's t with n/(n-1) more variance.
    tail = scipy.stats.norm.cdf(math.sqrt(5 / 4) * scipy.stats.t.ppf(0.025, 4))
    assert 0.0009 < tail < 0.001
    found = clustered_mean(values, labels, seed=3)
    assert found.mean == pytest.approx(0.5)
    # The ends lie far out, where 4999 of 3125 equally likely draws scatter: between the neighbouring tails.
    for end, near, far in ((found.low, tail * 3, tail / 3), (found.high, 1 - tail * 3, 1 - tail / 3)):
        ends = sorted(np.quantile(exact, [near, far]))
        assert end is not None and ends[0] <= end <= ends[1]


def test_twenty_clusters_agree_with_scipys_bootstrap() -> None:
    rng = np.random.default_rng(7)
    values = rng.normal(size=20)
    tail = scipy.stats.norm.cdf(math.sqrt(20 / 19) * scipy.stats.t.ppf(0.025, 19))
    theirs = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, confidence_level=1 - 2 * tail, method="percentile", rng=rng
    ).confidence_interval
    found = clustered_mean(list(values), range(20))
    assert found.low == pytest.approx(theirs.low, abs=0.06)
    assert found.high == pytest.approx(theirs.high, abs=0.06)
    assert found.error == pytest.approx(scipy.stats.sem(values))


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Clustered data with a known mean, 8 and 25 contexts of 4 questions: 95% within what 400 draws allow."""
    for contexts in (8, 25):
        rng = np.random.default_rng(contexts)
        draws = 400
        shared = np.repeat(rng.normal(size=(contexts, draws)), 4, axis=0)
        values = 3 + shared + rng.normal(size=(4 * contexts, draws))
        labels = tuple(np.repeat(np.arange(contexts), 4).tolist())
        found = Resampling(labels).estimates(values, [None] * draws)
        held = sum(e.low <= 3 <= e.high for e in found if e.low is not None and e.high is not None)
        assert 0.91 * draws <= held <= 0.985 * draws
        # Blind to contexts, the same data claim far too much: four times the samples, a quarter of the variance.
        naive = [scipy.stats.sem(column) for column in values.T]
        covered = sum(abs(e.mean - 3) <= 1.96 * s for e, s in zip(found, naive, strict=True))
        assert covered < 0.85 * draws


def test_samples_of_one_context_are_not_independent() -> None:
    """Ten copies of each context's answer must not narrow the interval."""
    answers = (0.0, 1.0, 1.0, 0.0, 1.0, 0.0)
    once = clustered_mean(answers, "abcdef", seed=1)
    often = clustered_mean([v for v in answers for _ in range(10)], [c for c in "abcdef" for _ in range(10)], 1)
    assert (once.low, once.high) == pytest.approx((often.low, often.high))
    assert once.low is not None and once.low < 0.2


def test_columns_are_resampled_together_and_do_not_change_one_another() -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(size=(30, 3))
    labels = tuple(range(30))
    together = Resampling(labels, 4).estimates(values, [None] * 3)
    for column, found in enumerate(together):
        alone = clustered_mean(list(values[:, column]), labels, 4)
        assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high), abs=1e-12)
    shifted = Resampling(labels, 4).estimates(values + 2, [None] * 3)
    assert [e.low for e in shifted] == pytest.approx([e.low + 2 for e in together if e.low is not None])


def test_same_seed_same_interval() -> None:
    values, labels = [0.1, 0.9, 0.4, 0.7, 0.2], "abcde"
    assert clustered_mean(values, labels, 5) == clustered_mean(values, labels, 5)


@pytest.mark.parametrize(("values", "labels"), [([], []), ([1.0], [])])
def test_nothing_to_average_is_refused(values: list[float], labels: list[int]) -> None:
    with pytest.raises(ExperimentError, match=f"over {len(values)} values"):
        clustered_mean(values, labels)


def test_nan_is_shown_not_hidden() -> None:
    found = clustered_mean([1.0, math.nan, 2.0, 3.0, 4.0], range(5))
    assert math.isnan(found.mean) and found.low is not None and math.isnan(found.low)
    assert math.isnan(worst_decile([1.0, math.nan])) and math.isnan(worst_decile([math.nan, 1.0], "higher"))


def test_flips_count_both_ways() -> None:
    found = flips([True, True, False, False, True], [False, True, True, False, False])
    assert found == Flips(2, 1, 5, 1.0)


@given(st.integers(0, 30), st.integers(0, 30))
def test_mcnemar_is_the_exact_binomial_test(lost: int, won: int) -> None:
    p = mcnemar(lost, won)
    if lost + won:
        assert p == pytest.approx(scipy.stats.binomtest(min(lost, won), lost + won, 0.5).pvalue)
        tail = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1)) / 2 ** (lost + won)
        assert p == pytest.approx(min(1.0, 2 * tail))
    else:
        assert p == 1.0


def test_worst_decile_of_21_values_is_the_mean_of_the_3_worst() -> None:
    values = [float(v) for v in range(21)]
    assert (worst_decile(values), worst_decile(values, "higher"), worst_decile(values, "none")) == (19.0, 1.0, 19.0)
    assert worst_decile([4.0]) == 4.0
    with pytest.raises(ExperimentError):
        worst_decile([])


def test_noise_is_the_larger_of_the_arms_half_width_and_dense_agains_reach() -> None:
    own = Estimate(0.1, 0.05, 0.2, 20, 10, 0.03)
    assert noise(own, None) == pytest.approx(0.1)
    assert noise(own, Estimate(0.0, -0.02, 0.03, 20, 10, 0.01)) == pytest.approx(0.1)
    assert noise(own, Estimate(-0.1, -0.3, 0.1, 20, 10, 0.1)) == pytest.approx(0.3)
    # Exact agreement of dense' is what was seen, not how much might have been missed.
    assert noise(own, Estimate(0.0, -0.3, 0.3, 20, 10, 0.0, (-1, 1))) == pytest.approx(0.1)
    assert noise(Estimate(0.1, None, None, 4, 4, 0.03), own) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=5, max_size=12), st.integers(1, 3))
def test_an_interval_lies_round_the_mean_and_within_the_bounds(means: list[float], copies: int) -> None:
    labels = [c for c in range(len(means)) for _ in range(copies)]
    found = clustered_mean([v for v in means for _ in range(copies)], labels, bounds=(0.0, 1.0))
    assert found.low is not None and found.high is not None
    assert -1e-9 <= found.low <= found.mean + 1e-9 and found.mean - 1e-9 <= found.high <= 1 + 1e-9
    assert found.high > found.low  # never a certainty


def test_front_by_hand() -> None:
    points = {
        "dense": (1.0, 0.9),
        "good": (0.25, 0.8),
        "twin": (0.25, 0.8),
        "dearer": (0.5, 0.8),
        "worse": (0.25, 0.7),
        "cheap": (0.1, 0.2),
        "broken": (0.0, math.nan),
    }
    assert front(points) == {"dense", "good", "twin", "cheap"}


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_every_point_is_on_the_front_or_beaten_by_one_that_is(points: dict[str, tuple[int, int]]) -> None:
    on = front(points)
    assert on
    for name, (cost, quality) in points.items():
        beaten = any(points[o][0] <= cost and points[o][1] >= quality and points[o] != (cost, quality) for o in on)
        assert beaten != (name in on)
