"""Acceptance by hand, by enumeration and by chance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from kvassay.errors import ExperimentError
from kvassay.measure.rejection import (
    acceptance_probability,
    expected_acceptance,
    residual,
    verify_greedy,
    verify_sampled,
)

P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.125, 0.75, 0.125], dtype=torch.float64)


def test_expected_acceptance_by_hand() -> None:
    assert float(expected_acceptance(P, Q)) == 0.125 + 0.25 + 0.125
    assert expected_acceptance(torch.stack([P, P]), torch.stack([P, Q])).tolist() == [1.0, 0.5]
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert float(expected_acceptance(P, one_hot)) == 0.25  # a certain drafter is accepted as often as p says


def test_acceptance_and_residual_by_hand() -> None:
    assert [acceptance_probability(P, Q, token) for token in range(3)] == [1.0, 1 / 3, 1.0]
    # p - q is 3/8, -1/2, 1/8: what is left over is 3 : 0 : 1
    assert residual(P, Q).tolist() == [0.75, 0.0, 0.25]
    assert torch.equal(residual(P, P), P)


@given(st.lists(st.integers(0, 20), min_size=4, max_size=4), st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_the_chance_of_acceptance_is_the_mean_over_drafts(a: list[int], b: list[int]) -> None:
    p, q = (torch.tensor([x + 1.0 for x in one], dtype=torch.float64) for one in (a, b))
    p, q = p / p.sum(), q / q.sum()
    mean = sum(float(q[token]) * acceptance_probability(p, q, token) for token in range(4))
    assert float(expected_acceptance(p, q)) == pytest.approx(mean, abs=1e-12)
    assert float(expected_acceptance(p, q)) == pytest.approx(1 - 0.5 * float((p - q).abs().sum()), abs=1e-12)


def models(seed: int, vocab: int) -> tuple[Callable[[Sequence[int]], Tensor], Callable[[Sequence[int]], Tensor]]:
    """A target and a drafter over a small vocabulary whose distributions depend on all tokens before."""

    def of(which: int) -> Callable[[Sequence[int]], Tensor]:
        def next_of(prefix: Sequence[int]) -> Tensor:
            rng = torch.Generator().manual_seed(hash((seed, which, *prefix)) % 2**31)
            return torch.softmax(1.5 * torch.randn(vocab, generator=rng, dtype=torch.float64), 0)

        return next_of

    return of(0), of(1)


def distribution(
    target: Callable[..., Tensor], draft: Callable[..., Tensor], k: int, vocab: int
) -> dict[tuple[int, ...], float]:
    """Exact probability of the first `k` tokens of the text, over all drafts, coin flips and draws."""
    found: dict[tuple[int, ...], float] = {}

    def emit(tokens: tuple[int, ...], chance: float) -> None:
        # A round may end before `k` tokens; what comes next is then the target's own choice.
        if len(tokens) < k:
            for token in range(vocab):
                emit((*tokens, token), chance * float(target(tokens)[token]))
            return
        found[tokens[:k]] = found.get(tokens[:k], 0.0) + chance

    for drafted in itertools.product(range(vocab), repeat=k):
        chance = 1.0
        for at, token in enumerate(drafted):
            chance *= float(draft(drafted[:at])[token])
        kept = chance
        for at, token in enumerate(drafted):
            p, q = target(drafted[:at]), draft(drafted[:at])
            accept = acceptance_probability(p, q, token)
            for instead in range(vocab):
                if accept < 1:
                    emit((*drafted[:at], instead), kept * (1 - accept) * float(residual(p, q)[instead]))
            kept *= accept
        for bonus in range(vocab):
            emit((*drafted, bonus), kept * float(target(drafted)[bonus]))
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_is_emitted_follows_the_target_exactly(k: int) -> None:
    target, draft = models(3, 3)
    found = distribution(target, draft, k, 3)
    for tokens in itertools.product(range(3), repeat=k):
        wanted = 1.0
        for at, token in enumerate(tokens):
            wanted *= float(target(tokens[:at])[token])
        assert found[tokens] == pytest.approx(wanted, abs=1e-12)


def test_sampled_output_follows_the_target() -> None:
    """Chi-square of pairs of tokens from rounds of two drafts against the target's own chain, seed fixed."""
    target, draft = models(5, 4)
    rng = torch.Generator().manual_seed(11)
    counts = dict.fromkeys(itertools.product(range(4), repeat=2), 0)
    accepted, trials = 0, 6000
    for _ in range(trials):
        drafted: list[int] = []
        for _ in range(2):
            drafted.append(int(torch.multinomial(draft(drafted), 1, generator=rng)))
        q = torch.stack([draft(drafted[:at]) for at in range(2)])
        p = torch.stack([target(drafted[:at]) for at in range(3)])
        found = verify_sampled(drafted, q, p, rng)
        accepted += found.accepted > 0
        first, *more = found.tokens
        second = more[0] if more else int(torch.multinomial(target([first]), 1, generator=rng))
        counts[first, second] += 1
    wanted = [float(target([])[a] * target([a])[b]) * trials for a, b in counts]
    assert chisquare(list(counts.values()), wanted).pvalue > 0.01
    drafts = [float(draft([])[a] * draft([a])[b]) * trials for a, b in counts]
    assert chisquare(list(counts.values()), drafts).pvalue < 1e-6  # the test can tell the two apart
    assert accepted / trials == pytest.approx(float(expected_acceptance(target([]), draft([]))), abs=0.02)


def test_greedy_verification_by_hand() -> None:
    assert verify_greedy([5, 6, 7], [5, 6, 7, 8]) == (3, (5, 6, 7, 8))  # and a bonus token
    assert verify_greedy([5, 6, 7], [5, 9, 7, 8]) == (1, (5, 9))  # recovered; the match after it does not count
    assert verify_greedy([5], [4, 9]) == (0, (4,))
    assert verify_greedy([], [4]) == (0, (4,))
    with pytest.raises(ExperimentError, match="2 draft tokens are verified by 3 rows of the target, not 2"):
        verify_greedy([1, 2], [1, 2])


@given(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=5, max_size=5), st.integers(0, 9))
def test_greedy_is_sampling_from_certain_distributions(draft: list[int], best: list[int], seed: int) -> None:
    best = best[: len(draft) + 1]
    certain = torch.eye(3, dtype=torch.float64)
    rng = torch.Generator().manual_seed(seed)
    assert verify_sampled(draft, certain[draft], certain[best], rng) == verify_greedy(draft, best)
