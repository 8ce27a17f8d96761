"""Common words: each collector writes down words all over the text, one word far more often than the others.

The question is the start of one more such line, so the answer is the word that the counts make most likely.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.lexicon import NAMES, WORDS
from kvassay.workload.needle import depths


@dataclass(frozen=True)
class WordsParams:
    """One collector per question, with one word picked `common` times and `rare` others picked once."""

    common: int = 12
    rare: int = 4


def draft(job: Job, params: WordsParams) -> Draft:
    """Scatter the lines of one collector per question; each has a common word of its own."""
    if params.common < 2 or params.rare < 1:
        raise WorkloadError(f"{job.workload}: common={params.common} must be >= 2 and rare={params.rare} >= 1")
    needed = job.questions * (params.rare + 1)
    if needed > len(WORDS):
        raise WorkloadError(f"{job.workload}: rare={params.rare} needs {needed} words, there are {len(WORDS)}")
    rng = job.rng()
    drawn = rng.sample(WORDS, needed)
    names = rng.sample(NAMES, job.questions)
    facts, questions = [], []
    for i, name in enumerate(names):
        common, *rare = drawn[i * (params.rare + 1) : (i + 1) * (params.rare + 1)]
        facts += [f"{name}: {word}" for word in [common] * params.common + rare]
        questions.append(Question(f"{name}:", f" {common}", "", unique=False, meta={"count": params.common}))
    rng.shuffle(facts)
    inserts = tuple(Insert(fact, depth, "\n") for fact, depth in zip(facts, depths(rng, len(facts)), strict=True))
    preview = f"Now say which word was picked most often by {', '.join(names)}."
    return Draft(tuple(questions), inserts, preview=preview, keys=tuple(drawn))
