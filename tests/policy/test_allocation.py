"""Bit allocation against brute force, and the bisection as published against the exact steps."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.allocation import bisect, greedy, hull
from kvassay.policy.distortion import PUBLISHED, table

LLAMA_K, LLAMA_V = (table(side) for side in PUBLISHED["llama-3.1-8b"])


def cost(weight: list[float], widths: tuple[int, ...], of: dict[int, float]) -> float:
    return math.fsum(w * of[b] for w, b in zip(weight, widths, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    weight=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5),
    bits=st.integers(0, 80),
    of=st.sampled_from([dict(LLAMA_V), dict(LLAMA_K), {0: 1.0, 4: 0.0062, 16: 0.0}, {0: 1.0, 16: 0.0}]),
)
def test_no_allocation_of_as_many_bits_is_better(weight: list[float], bits: int, of: dict[int, float]) -> None:
    found = tuple(greedy(torch.tensor([weight], dtype=torch.float64), of, bits)[0].tolist())
    used = sum(found)
    assert used <= bits
    every = (c for c in itertools.product(of, repeat=len(weight)) if sum(c) <= used)
    best = min(cost(weight, c, of) for c in every)
    assert cost(weight, found, of) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_the_published_slopes_decide_who_is_raised_next() -> None:
    """Values of Llama-3.1-8B: 0.3435 per bit to 2, 0.1495 to 4, 3.49e-3 to 8, 6.1e-6 to 16."""
    slopes = [(LLAMA_V[a] - LLAMA_V[b]) / (b - a) for a, b in itertools.pairwise((0, 2, 4, 8, 16))]
    assert slopes == pytest.approx([0.3435, 0.1495, 3.49e-3, 6.1e-6], rel=5e-3)
    weight = torch.tensor([[1.0, 0.4, 0.02, 0.001]])
    raised = [greedy(weight, LLAMA_V, bits)[0].tolist() for bits in (2, 4, 6, 8, 10, 14, 18, 26)]
    assert raised[:4] == [[2, 0, 0, 0], [4, 0, 0, 0], [4, 2, 0, 0], [4, 4, 0, 0]]
    assert raised[4:] == [[4, 4, 2, 0], [8, 4, 2, 0], [8, 4, 4, 0], [8, 8, 4, 4]]


def test_all_fits_or_nothing_does() -> None:
    weight = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
    assert greedy(weight, LLAMA_V, 32).tolist() == [[16, 16]] * 2
    assert greedy(weight, LLAMA_V, 1).tolist() == [[0, 0]] * 2


def test_an_infinite_weight_is_served_whole_before_all_others() -> None:
    assert greedy(torch.tensor([[5.0, torch.inf, 5.0]]), LLAMA_V, 18).tolist() == [[2, 16, 0]]


def test_rows_have_budgets_of_their_own() -> None:
    rows = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    together = greedy(rows, LLAMA_V, 163)
    assert torch.equal(together, torch.cat([greedy(row[None], LLAMA_V, 163) for row in rows]))
    assert bool((together.sum(1) <= 163).all()) and bool((together.sum(1) > 163 - 8).all())


def test_a_least_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BudgetError, match="50 units of at least 2 bits take 100 bits, 99 may be used"):
        greedy(torch.ones(1, 50), {2: 0.3, 4: 0.01, 16: 0.0}, 99)


def test_a_width_above_the_hull_is_never_taken() -> None:
    odd = {0: 1.0, 2: 0.9, 4: 0.1, 16: 0.0}
    assert hull(odd) == [0, 4, 16]
    assert greedy(torch.tensor([[2.0, 1.0]]), odd, 6).tolist() == [[4, 0]]


def test_a_table_that_rises_is_refused() -> None:
    with pytest.raises(PolicyError, match="must fall with every width"):
        hull({0: 1.0, 2: 0.1, 4: 0.2})


@pytest.mark.parametrize("mean", [0.5, 1.0, 2.5, 4.0, 9.0])
@pytest.mark.parametrize("of", [LLAMA_K, LLAMA_V])
def test_the_bisection_comes_to_the_same_up_to_its_tolerance(of: dict[int, float], mean: float) -> None:
    weight = torch.rand(1, 2000, generator=torch.Generator().manual_seed(1)).double() ** 4
    bits = int(mean * 2000)
    exact, published = greedy(weight, of, bits), bisect(weight, of, bits)
    assert float(published.double().mean()) == pytest.approx(mean, rel=0.0101)
    assert float((exact != published).double().mean()) < 0.02
    at_equal_bits = greedy(weight, of, int(published.sum()))
    assert torch.equal(at_equal_bits, published)


def test_the_bisection_overshoots_on_ties_and_the_exact_steps_do_not() -> None:
    weight, bits = torch.ones(1, 100), 100
    assert int(bisect(weight, LLAMA_V, bits).sum()) in (0, 200)
    assert int(greedy(weight, LLAMA_V, bits).sum()) == 100
