"""Needles in prose: one pass code (`needle_single`), several that must be told apart (`needle_multikey`), or several in
text that is fed as if generated (`needle_generated`).

A single needle may veto a policy, never promote it: it stays at 100 % where reasoning already breaks. Needles in
generated text ask what a policy that leaves prompts alone loses of what came later.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvassay.errors import WorkloadError
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.lexicon import NAMES


@dataclass(frozen=True)
class NeedleParams:
    """`keys` needles with codes of `digits` digits; only as many as `questions` are asked for."""

    keys: int = 6
    digits: int = 5


@dataclass(frozen=True)
class SingleParams:
    """One needle with a code of `digits` digits."""

    digits: int = 5


@dataclass(frozen=True)
class GeneratedParams:
    """The last `generated` tokens of the document follow the context, `keys` needles among them and none before."""

    generated: int = 1024
    keys: int = 4
    digits: int = 5


CLEAR = 128
"""Tokens between the end of the prompt and the first place of a needle: a sentence is not cut to put one in."""


def draft(job: Job, params: NeedleParams) -> Draft:
    """Hide `keys` sentences "The pass code of NAME is 48213." at even depths; ask for some of them."""
    if not job.questions <= params.keys <= len(NAMES):
        raise WorkloadError(
            f"{job.workload}: keys={params.keys} must lie between questions={job.questions} and {len(NAMES)}"
        )
    rng = job.rng()
    names = rng.sample(NAMES, params.keys)
    codes = numbers(rng, params.keys, params.digits)
    facts = [f"The pass code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
    inserts = tuple(Insert(fact, depth) for fact, depth in zip(facts, depths(rng, params.keys), strict=True))
    asked = sorted(rng.sample(range(params.keys), job.questions))
    questions = tuple(
        Question(f"The pass code of {names[i]} is", f" {codes[i]}", facts[i], meta={"key": names[i]}) for i in asked
    )
    listed = ", ".join(names[i] for i in asked)
    return Draft(questions, inserts, preview=f"Now say the pass codes of {listed}.", keys=tuple(names))


def draft_single(job: Job, params: SingleParams) -> Draft:
    """The same with one key."""
    return draft(job, NeedleParams(keys=1, digits=params.digits))


def draft_generated(job: Job, params: GeneratedParams) -> Draft:
    """The same with all needles in text that is fed token by token, as if generated."""
    if params.generated < 2 * CLEAR:
        raise WorkloadError(f"{job.workload}: generated={params.generated} must be at least {2 * CLEAR}")
    made = draft(job, NeedleParams(params.keys, params.digits))
    first = (job.length + CLEAR) / (job.length + params.generated)
    inserts = tuple(replace(insert, depth=first + (1 - first) * insert.depth) for insert in made.inserts)
    return replace(made, inserts=inserts, generated=params.generated, preview="")


def numbers(rng: random.Random, count: int, digits: int) -> list[str]:
    """`count` distinct numbers of `digits` digits without a leading zero."""
    low = 10 ** (digits - 1)
    if digits < 1 or 9 * low < count:
        raise WorkloadError(f"digits={digits} cannot give {count} distinct numbers")
    return [str(number) for number in rng.sample(range(low, 10 * low), count)]


def depths(rng: random.Random, count: int) -> list[float]:
    """`count` depths, one drawn inside each of `count` equal parts of the prose, so that none crowd."""
    return [(i + 0.1 + 0.8 * rng.random()) / count for i in range(count)]
