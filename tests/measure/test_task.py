"""Scorers, with the public faults they are built against."""

from __future__ import annotations

import pytest

from kvassay.errors import WorkloadError
from kvassay.measure.task import (
    SCORERS,
    divergence_step,
    first_divergence,
    normalise,
    score,
    score_answer,
    token_prefix,
)


def test_numbers_are_the_first_integer_not_a_substring() -> None:
    """InfiniteBench number_string: scored by substring, a model rises from 56.61 % to 59.15 %."""
    assert score("first_integer", "The code is 8888888123.", ["8888888"]).value == 0.0
    assert score("first_integer", "It is 12, not 52.", ["52"]).value == 0.0
    assert score("first_integer", "52 or 12", ["52"]).value == 1.0
    assert score("first_integer", " 48,213 is the code", [" 48213"]).value == 1.0
    assert score("first_integer", "about 3.5, so 4", ["4"]).value == 1.0
    assert score("first_integer", "-7", ["7"]).value == 0.0
    assert score("first_integer", "none", ["7"]).value == 0.0
    assert score("first_integer", "007", ["7"]).value == 1.0
    with pytest.raises(WorkloadError, match="'seven' holds no integer"):
        score("first_integer", "7", ["7", "seven"])


def test_labels_are_whole_and_any_of_them_counts() -> None:
    """InfiniteBench #18: 'STAMP PAID' scored 0 since the reply was split in words, and only one label was read."""
    assert score("exact_line", "STAMP PAID", ["STAMP PAID"]).value == 1.0
    assert score("exact_line", "STAMP PAID", ["FRANKED", "STAMP PAID"]).value == 1.0
    assert score("exact_line", "STAMP", ["STAMP PAID"]).value == 0.0
    assert score("exact_line", "PAID", ["STAMP PAID", "FRANKED"]).value == 0.0
    with pytest.raises(WorkloadError, match="must be a list of texts, not the text 'STAMP PAID'"):
        score("exact_line", "S", "STAMP PAID")  # type: ignore[arg-type]


def test_only_the_first_line_counts() -> None:
    """OpenCompass #623: trec, triviaqa, samsum, lsht go on with made-up questions after the answer."""
    assert score("exact_line", "\nLocation\nQuestion: what is a zebra?\nType: Animal", ["Location"]).value == 1.0
    assert score("exact_line", "\nLocation\nQuestion: what is a zebra?\nType: Animal", ["Animal"]).value == 0.0
    assert score("first_integer", "I do not know\n48213", ["48213"]).value == 0.0


def test_the_raw_reply_stays_beside_the_value() -> None:
    """RULER #63: low vt and cwe scores were settled by looking at the replies."""
    result = score("starts_with", "Sorry, I can't.\n", ["harbor"])
    assert result.reply == "Sorry, I can't.\n"
    assert (result.value, result.unit, result.higher_is_better) == (0.0, "0 or 1 per reply", True)


def test_starts_with_ends_at_a_word() -> None:
    assert score("starts_with", ' 4328"\n"attic": "1111"', ["4328"]).value == 1.0
    assert score("starts_with", "43289", ["4328"]).value == 0.0
    assert score("starts_with", "harbor is", [" Harbor"]).value == 1.0
    assert score("starts_with", "the harbor", ["harbor"]).value == 0.0
    assert score("starts_with", "c++ (all)", ["C++ (all)"]).value == 1.0


def test_normalising() -> None:
    assert normalise('  "The  ﬁrst Answer". ') == "the first answer"
    assert normalise("...") == ""


def test_prefix_words_stops_at_the_first_difference() -> None:
    answer = " Hugo. Hugo lives at number 4821"
    assert score("prefix_words", answer + ". More text", [answer]).value == 5 / 6  # "4821." is not "4821"
    assert score("prefix_words", answer + "\nMore", [answer]).value == 1.0
    assert score("prefix_words", " Hugo. Anna lives at number 4821", [answer]).value == 1 / 6
    assert score("prefix_words", " Anna. Hugo lives at number 4821", [answer]).value == 0.0
    assert score("prefix_words", "", [answer]).value == 0.0
    assert score("prefix_words", "b c", ["a", "b d"]).value == 0.5


def test_prefix_steps_counts_whole_lines() -> None:
    answer = " oak + 9. oak: 889. attic: 898.\nrabbit = onion + 4."
    assert score("prefix_steps", answer + "\nmore", [answer]).value == 1.0
    assert score("prefix_steps", " oak + 9. oak: 889. attic: 898.\nrabbit = oak + 4.", [answer]).value == 0.5
    assert score("prefix_steps", " oak + 9. oak: 889. attic: 899.\nrabbit = onion + 4.", [answer]).value == 0.0


def test_first_divergence_and_token_prefix() -> None:
    assert first_divergence([1, 2, 3, 9], [1, 2, 3]) is None
    assert first_divergence([1, 2, 4], [1, 2, 3]) == 2
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([], [1]) == 0
    assert token_prefix([1, 2, 4], [1, 2, 3]) == 2 / 3
    assert token_prefix([5], [1, 2, 3]) == 0.0
    assert token_prefix([1, 2, 3, 4], [1, 2, 3]) == 1.0
    with pytest.raises(WorkloadError, match="the answer has no tokens"):
        first_divergence([1], [])


def test_the_step_of_the_first_difference() -> None:
    answer = [1, 2, 3, 4, 5, 6]
    assert divergence_step(answer, answer, [2, 4, 6]) is None
    assert divergence_step([9, 2, 3, 4, 5, 6], answer, [2, 4, 6]) == 0
    assert divergence_step([1, 9, 3, 4, 5, 6], answer, [2, 4, 6]) == 0
    assert divergence_step([1, 2, 9, 4, 5, 6], answer, [2, 4, 6]) == 1
    assert divergence_step([1, 2, 3, 4, 5], answer, [2, 4, 6]) == 2
    for ends in ([], [2, 4], [4, 2, 6], [2, 2, 6], [2, 7]):
        with pytest.raises(WorkloadError, match="must rise to the answer's length 6"):
            divergence_step(answer, answer, ends)


def test_score_answer_uses_the_scorer_of_the_branch() -> None:
    assert score_answer("needle", " 48213 and so on", " 48213", {"scorer": "first_integer"}) == 1.0
    assert score_answer("mine", "a b x", "a b c d", {}) == 0.5
    with pytest.raises(WorkloadError, match=r"mine: unknown scorer 'first_intger' \(did you mean 'first_integer'"):
        score_answer("mine", "a", "a", {"scorer": "first_intger"})
    with pytest.raises(WorkloadError, match="mine: answers must each hold a letter or a digit"):
        score_answer("mine", "a", " .", {})


def test_every_scorer_names_unit_and_direction() -> None:
    for name, scorer in SCORERS.items():
        assert scorer.name == name
        assert scorer.unit.startswith(("0 or 1 per ", "share of "))
        assert scorer.higher_is_better
