"""Prose continuation: plain text, the next paragraphs of it are the answer.

Kept because users ask for it, not because it decides: plain-prose NLL hardly sees eviction.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Job, Question
from kvassay.workload.haystack import sentences


@dataclass(frozen=True)
class ProseParams:
    """A question is the first `given` words of an unseen paragraph, its answer the next `continued` words."""

    given: int = 8
    continued: int = 16


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


def _question(paragraph: str, params: ProseParams) -> Question:
    words = paragraph.split(" ")
    given, after = words[: params.given], words[params.given : params.given + params.continued]
    return Question(" ".join(given), " " + " ".join(after), "", unique=False)
