"""Prose continuation: plain text, the next paragraphs of it are the answer.

Kept because users ask for it, not because it decides: plain-prose NLL hardly sees eviction. `prose_numbered` is the
same with sentences that hold numbers, which the haystack has none of: what is fitted on text without a digit takes away
what only digits need, and most answers here are digits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.haystack import sentences
from kvassay.workload.lexicon import NAMES, WORDS
from kvassay.workload.needle import depths


@dataclass(frozen=True)
class ProseParams:
    """A question is the first `given` words of an unseen paragraph, its answer the next `continued` words."""

    given: int = 8
    continued: int = 16


@dataclass(frozen=True)
class NumberedParams(ProseParams):
    """One sentence with numbers for every so many tokens; at 128 some 1.6 % of the characters are digits."""

    every: int = 128


def draft(job: Job, params: ProseParams) -> Draft:
    """Hold back one paragraph per question; the rest of the haystack is the context."""
    if params.given < 1 or params.continued < 1:
        raise WorkloadError(f"{job.workload}: given={params.given} and continued={params.continued} must be >= 1")
    paragraphs = job.haystack.paragraphs(job.rng("haystack"))
    rng = job.rng()
    long_enough = [p for p in paragraphs if len(p.split(" ")) >= params.given + params.continued]
    if len(long_enough) < job.questions:
        raise WorkloadError(
            f"{job.workload}: only {len(long_enough)} paragraphs have the {params.given + params.continued} words "
            f"that {job.questions} questions need"
        )
    held = rng.sample(long_enough, job.questions)
    questions = tuple(_question(paragraph, params) for paragraph in held)
    rest = tuple(p for p in paragraphs if p not in held)
    return Draft(questions, prose=rest, meta={"held_back": [len(sentences(p)) for p in held]})


def draft_numbered(job: Job, params: NumberedParams) -> Draft:
    """The same with sentences that hold numbers hidden in the context, at even depths."""
    if params.every < 32:
        raise WorkloadError(f"{job.workload}: every={params.every} must be at least 32: a sentence is not all numbers")
    rng = job.rng("numbers")
    where = depths(rng, max(1, job.length // params.every))
    return replace(draft(job, params), inserts=tuple(Insert(_told(rng), depth) for depth in where))


def _told(rng: random.Random) -> str:
    """A sentence that tells a number or two."""
    name, (one, other) = rng.choice(NAMES), rng.sample(WORDS, 2)
    year, few, many = rng.randint(1801, 2024), rng.randint(2, 99), rng.randint(1000, 99_999)
    return rng.choice(
        [
            f"In {year} {name} had {few} of the {many} that the {one} was worth.",
            f"The {one} has the number {many}, and the {other} {many + few}.",
            f"{name} paid {many} for a {one} and {few} for the {other}.",
        ]
    )


def _question(paragraph: str, params: ProseParams) -> Question:
    words = paragraph.split(" ")
    given, after = words[: params.given], words[params.given : params.given + params.continued]
    return Question(" ".join(given), " " + " ".join(after), "", unique=False)
