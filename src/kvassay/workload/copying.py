"""Copying: a list of random words stands in the prose; the question repeats a few, the answer goes on."""

from __future__ import annotations

from dataclasses import dataclass

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.lexicon import WORDS

HEAD = "A list of random words:\n- "


@dataclass(frozen=True)
class CopyParams:
    """One list of `words` words; a question repeats `given` of them, the answer is the next `copied`."""

    words: int = 24
    given: int = 6
    copied: int = 4


def draft(job: Job, params: CopyParams) -> Draft:
    """Hide one list of distinct words; every question starts at a place of its own."""
    needed = params.given + params.copied
    starts = params.words - needed + 1
    if params.given < 1 or params.copied < 1 or starts < job.questions:
        raise WorkloadError(
            f"{job.workload}: given={params.given} and copied={params.copied} must be at least 1 and, with "
            f"{job.questions} questions, together at most words={params.words} - {job.questions - 1}"
        )
    if params.words > len(WORDS):
        raise WorkloadError(f"{job.workload}: words={params.words} is more than the {len(WORDS)} there are")
    rng = job.rng()
    words = rng.sample(WORDS, params.words)
    listed = Insert(HEAD + "\n- ".join(words), 0.1 + 0.8 * rng.random(), "\n\n")
    questions = tuple(
        _question(words[at : at + params.given], words[at + params.given : at + needed])
        for at in sorted(rng.sample(range(starts), job.questions))
    )
    preview = "Now repeat parts of the list of random words."
    return Draft(questions, (listed,), preview=preview, keys=tuple(words))


def _question(given: list[str], copied: list[str]) -> Question:
    answer = " " + "\n- ".join(copied)
    return Question(
        HEAD + "\n- ".join(given) + "\n-",
        answer,
        "\n- ".join([*given, *copied]),
        scored_text=_word_ranges(copied),
    )


def _word_ranges(words: list[str]) -> tuple[tuple[int, int], ...]:
    """Character ranges of the words in " a\n- b": dashes say nothing about memory, so they do not count."""
    ranges, at = [], 1
    for word in words:
        ranges.append((at, at + len(word)))
        at += len(word) + len("\n- ")
    return tuple(ranges)
