"""Counters as vLLM adds them up, by hand."""

from __future__ import annotations

import pytest

from kvassay.errors import ExperimentError
from kvassay.measure.acceptance import Counters, Round, pooled, tally
from kvassay.measure.acceptance_cards import ACCEPTANCE_CARDS
from kvassay.measure.rejection import verify_greedy

ROUNDS = (
    Round(3, 3, (1.0, 0.5, 0.25)),
    Round(3, 1, (0.75, 0.5)),
    Round(0, 0, ()),
    Round(2, 0, (0.25,)),
)


def test_counters_by_hand() -> None:
    found = tally(ROUNDS, 3)
    assert found == Counters(
        k=3,
        rounds=4,
        num_drafts=3,
        num_draft_tokens=8,
        num_accepted_tokens=4,
        num_accepted_tokens_per_pos=(2, 1, 1),
        num_draft_tokens_per_pos=(3, 3, 2),
        reached_per_pos=(3, 2, 1),
        overlap_per_pos=(2.0, 1.0, 0.25),
    )
    assert found.acceptance_rate == 4 / 8
    assert found.accepted_length == 4 / 3
    assert found.mean_acceptance_length == 1 + 4 / 3
    assert found.accepted_per_pos == (2 / 3, 1 / 3, 1 / 3)
    assert (found.emitted_tokens, found.emitted_length) == (8, 2.0)
    assert found.greedy_acceptance == 2 / 3
    assert found.expected_per_pos == (2 / 3, 0.5, 0.25)
    assert found.expected_acceptance == 2 / 3


def test_a_shorter_draft_is_the_beginning_of_a_longer_one() -> None:
    found = tally(ROUNDS, 1)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 3, 2)
    assert (found.num_accepted_tokens_per_pos, found.overlap_per_pos) == ((2,), (2.0,))
    assert found.emitted_tokens == 6


def test_the_length_accepted_is_what_the_positions_add_up_to() -> None:
    for k in range(1, 4):
        found = tally(ROUNDS, k)
        assert sum(found.num_accepted_tokens_per_pos) == found.num_accepted_tokens
        assert sum(found.num_draft_tokens_per_pos) == found.num_draft_tokens
        assert found.emitted_tokens == sum(len(verify_greedy(d, b).tokens) for d, b in _texts(k))


def _texts(k: int) -> list[tuple[list[int], list[int]]]:
    """Drafts and targets that give `ROUNDS` cut to k tokens: draft tokens 0, the target's 0 while it accepts."""
    cut = [(min(r.drafted, k), min(r.accepted, k)) for r in ROUNDS]
    return [([0] * d, [0] * a + [1] * (d + 1 - a)) for d, a in cut]


def test_nothing_drafted_has_no_rate() -> None:
    found = tally([Round(0, 0, ()), Round(0, 0, ())], 2)
    assert found.acceptance_rate is found.accepted_length is found.greedy_acceptance is None
    assert found.expected_per_pos == (None, None)
    assert (found.mean_acceptance_length, found.emitted_length) == (1.0, 1.0)


def test_questions_pool_by_addition() -> None:
    assert pooled([tally(ROUNDS[:1], 3), tally(ROUNDS[1:], 3)]) == tally(ROUNDS, 3)
    with pytest.raises(ExperimentError, match=r"k = \[2, 3\] do not add up"):
        pooled([tally(ROUNDS, 2), tally(ROUNDS, 3)])


def test_every_card_is_of_a_figure() -> None:
    assert set(ACCEPTANCE_CARDS) <= {name for name, value in vars(Counters).items() if isinstance(value, property)}
    assert all("/" in card.formula or "mean over" in card.formula for card in ACCEPTANCE_CARDS.values())
