"""Scores of a free-running reply against an exact answer. Every score names its unit and direction.

Short answers are looked for in the first line that is not blank, never further: models go on talking, and a
later line may hold the answer by chance. Numbers are compared as the first integer of that line, not as a
substring (`52` is inside `1523`). Labels are compared as whole replies, any of the allowed ones, never word by
word. The raw reply stays beside the value, so that a low score can be read before retrieval is blamed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvassay.errors import WorkloadError, did_you_mean


@dataclass(frozen=True)
class Scorer:
    """A score of one reply, in [0, 1]; `function` takes the reply and the answers, any of which is right."""

    name: str
    unit: str
    about: str
    function: Callable[[str, Sequence[str]], float]
    higher_is_better: bool = True


@dataclass(frozen=True)
class TaskScore:
    """One value of one scorer, with the raw `reply` it was given for."""

    scorer: str
    value: float
    unit: str
    higher_is_better: bool
    reply: str


def first_line(text: str) -> str:
    """The first line that is not blank, stripped; "" if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def normalise(text: str) -> str:
    """Lower case, single spaces, no quotes or punctuation around; Unicode compatibility forms folded."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip("\"'`.,;:!? ")


def exact_line(reply: str, answers: Sequence[str]) -> float:
    """1.0 if the normalised first line equals any answer as a whole."""
    line = normalise(first_line(reply))
    return float(any(line == normalise(answer) for answer in answers))


def starts_with(reply: str, answers: Sequence[str]) -> float:
    """1.0 if the normalised first line starts with any answer that ends there at a word boundary."""
    line = normalise(first_line(reply))
    return float(any(re.match(rf"{re.escape(normalise(answer))}(?!\w)", line) for answer in answers))


def first_integer(reply: str, answers: Sequence[str]) -> float:
    """1.0 if the first integer of the first line equals any answer as an integer; decimals are passed over."""
    found = _integer(first_line(reply))
    wanted = [_integer(answer) for answer in answers]
    if None in wanted:
        raise WorkloadError(f"first_integer: the answer {answers[wanted.index(None)]!r} holds no integer")
    return float(found is not None and found in wanted)


def prefix_words(reply: str, answers: Sequence[str]) -> float:
    """Share of the answer's words that the reply gives, in order, before it first differs (best answer)."""
    said = reply.casefold().split()
    return max(_prefix_share(said, answer.casefold().split()) for answer in answers)


def prefix_steps(reply: str, answers: Sequence[str]) -> float:
    """Share of the answer's steps (its lines) that the reply gives, in order, before it first differs."""
    said = [normalise(line) for line in reply.splitlines() if line.strip()]
    return max(
        _prefix_share(said, [normalise(line) for line in answer.splitlines() if line.strip()]) for answer in answers
    )


def first_divergence(reply: Sequence[int], answer: Sequence[int]) -> int | None:
    """Index of the first answer token that the reply misses (a short reply misses there); None if it has all."""
    if not answer:
        raise WorkloadError("first_divergence: the answer has no tokens")
    for i, token in enumerate(answer):
        if i >= len(reply) or reply[i] != token:
            return i
    return None


def token_prefix(reply: Sequence[int], answer: Sequence[int]) -> float:
    """Share (0..1) of the answer's tokens that the reply gives before it first differs; higher is better."""
    at = first_divergence(reply, answer)
    return 1.0 if at is None else at / len(answer)


def divergence_step(reply: Sequence[int], answer: Sequence[int], step_ends: Sequence[int]) -> int | None:
    """The step (0-based) in which the reply first differs, None if it never does; later is better.

    `step_ends` are exclusive token indices. Raises `WorkloadError` unless they rise to the answer's length.
    """
    ends = list(step_ends)
    if not ends or ends != sorted(set(ends)) or ends[-1] != len(answer):
        raise WorkloadError(f"divergence_step: ends {ends} must rise to the answer's length {len(answer)}")
    at = first_divergence(reply, answer)
    return None if at is None else next(i for i, end in enumerate(ends) if at < end)


SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        scorer.name: scorer
        for scorer in (
            Scorer("exact_line", "0 or 1 per reply", "first line is an answer or label, as a whole", exact_line),
            Scorer("starts_with", "0 or 1 per reply", "first line starts with an answer", starts_with),
            Scorer("first_integer", "0 or 1 per reply", "first integer is the answer", first_integer),
            Scorer("prefix_words", "share of words, 0..1", "words before the first difference", prefix_words),
            Scorer("prefix_steps", "share of steps, 0..1", "steps before the first difference", prefix_steps),
        )
    }
)


def score(name: str, reply: str, answers: Sequence[str]) -> TaskScore:
    """Score one reply; any of `answers` is right. Raises `WorkloadError` for an unknown scorer or no answer."""
    if name not in SCORERS:
        raise WorkloadError(f"unknown scorer '{name}'{did_you_mean(name, SCORERS)}")
    if isinstance(answers, str):
        raise WorkloadError(f"answers must be a list of texts, not the text {answers!r}")
    if not answers or not all(normalise(answer) for answer in answers):
        raise WorkloadError(f"answers must each hold a letter or a digit, not {list(answers)!r}")
    scorer = SCORERS[name]
    return TaskScore(name, scorer.function(reply, answers), scorer.unit, scorer.higher_is_better, reply)


def score_answer(workload: str, reply: str, answer: str, meta: Mapping[str, Any]) -> float:
    """Score of a reply to one branch, in [0, 1], by the scorer that the branch's `meta` names.

    Branches that no workload made (hand-made traces) have none: they are scored by `prefix_words`.
    """
    name = meta.get("scorer", "prefix_words")
    try:
        return score(name, reply, [answer]).value
    except WorkloadError as error:
        raise WorkloadError(f"{workload}: {error}") from None


def _prefix_share(said: Sequence[str], wanted: Sequence[str]) -> float:
    """How many of the wanted items come first in what was said, as a share."""
    matched = 0
    for mine, theirs in zip(said, wanted, strict=False):
        if mine != theirs:
            break
        matched += 1
    return matched / len(wanted)


def _integer(text: str) -> int | None:
    """The first integer; thousands may be grouped by commas, and a number with a decimal part is passed over."""
    for match in re.finditer(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text):
        if "." not in match[0]:
            return int(match[0].replace(",", ""))
    return None
