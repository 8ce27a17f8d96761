from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import ExperimentError
from kvassay.measure.front import front
from kvassay.measure.statistics import Flips, clustered_mean, flips, worst_decile


def test_one_cluster_gives_a_mean_and_no_interval() -> None:
    found = clustered_mean([1.0, 2.0, 6.0], ["a", "a", "a"])
    assert (found.mean, found.low, found.high, found.samples, found.clusters) == (3.0, None, None, 3, 1)
    assert found.half_width is None


def test_equal_clusters_give_an_interval_of_no_width() -> None:
    found = clustered_mean([0.0, 1.0] * 3, [0, 0, 1, 1, 2, 2])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_interval_is_that_of_all_resamples_of_clusters() -> None:
    """Three clusters have 27 equally likely resamples: their exact percentiles are the oracle."""
    clusters = {"a": [0.0, 0.0], "b": [1.0], "c": [1.0, 0.0, 1.0]}
    values = [v for group in clusters.values() for v in group]
    labels = [name for name, group in clusters.items() for _ in group]
    exact = []
    for draw in itertools.product(clusters.values(), repeat=3):
        joined = [v for group in draw for v in group]
        exact.append(sum(joined) / len(joined))
    low, high = np.quantile(exact, [0.025, 0.975], method="inverted_cdf")
    found = clustered_mean(values, labels, seed=3)
    assert found.mean == pytest.approx(0.5)
    assert found.low == pytest.approx(low, abs=1e-9)
    assert found.high == pytest.approx(high, abs=1e-9)
    assert found.half_width == pytest.approx(max(0.5 - low, high - 0.5))


def test_samples_of_one_context_are_not_independent() -> None:
    """Ten copies of each context's answer must not narrow the interval."""
    once = clustered_mean([0.0, 1.0, 1.0, 0.0], "abcd", seed=1)
    often = clustered_mean(
        [v for v in (0.0, 1.0, 1.0, 0.0) for _ in range(10)], [c for c in "abcd" for _ in range(10)], 1
    )
    assert (once.low, once.high) == (often.low, often.high)
    assert once.low is not None and once.low < 0.3


def test_same_seed_same_interval() -> None:
    values, labels = [0.1, 0.9, 0.4, 0.7, 0.2], "abcde"
    assert clustered_mean(values, labels, 5) == clustered_mean(values, labels, 5)


@pytest.mark.parametrize(("values", "labels"), [([], []), ([1.0], [])])
def test_nothing_to_average_is_refused(values: list[float], labels: list[int]) -> None:
    with pytest.raises(ExperimentError, match=f"over {len(values)} values"):
        clustered_mean(values, labels)


def test_nan_is_shown_not_hidden() -> None:
    found = clustered_mean([1.0, math.nan], [0, 1])
    assert math.isnan(found.mean) and found.low is not None and math.isnan(found.low)


def test_flips_count_both_ways() -> None:
    assert flips([True, True, False, False, True], [False, True, True, False, False]) == Flips(2, 1, 5)


def test_worst_decile_of_21_values_is_the_mean_of_the_3_largest() -> None:
    assert worst_decile([float(v) for v in range(21)]) == 19.0
    assert worst_decile([4.0]) == 4.0
    with pytest.raises(ExperimentError):
        worst_decile([])


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
