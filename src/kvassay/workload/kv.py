"""Key-value retrieval: a block of pairs in the prose, one value is asked for by its key.

`kv_uuid` is the published form (UUID keys and values); `kv_short` has word keys and digit values, which the
small models can do, so it is the default one there.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

from kvassay.errors import WorkloadError, did_you_mean
from kvassay.workload.assemble import Draft, Insert, Job, Question
from kvassay.workload.lexicon import WORDS
from kvassay.workload.needle import numbers


@dataclass(frozen=True)
class KvParams:
    """`pairs` pairs; `value` is `digits` or `hex` of `size` characters."""

    pairs: int = 16
    value: str = "digits"
    size: int = 4


@dataclass(frozen=True)
class UuidParams:
    """`pairs` pairs of random UUIDs; only the first `answer_chars` characters of the value are asked for."""

    pairs: int = 12
    answer_chars: int = 8


def draft_short(job: Job, params: KvParams) -> Draft:
    """Word keys, short values: one line per pair."""
    rng = job.rng()
    _enough(job, params.pairs, len(WORDS))
    keys = rng.sample(WORDS, params.pairs)
    if params.value == "digits":
        values = numbers(rng, params.pairs, params.size)
    elif params.value == "hex":
        values = _hex(rng, params.pairs, params.size)
    else:
        raise WorkloadError(f"{job.workload}: value '{params.value}'{did_you_mean(params.value, ('digits', 'hex'))}")
    return _pairs(job, rng, keys, values, params.size)


def draft_uuid(job: Job, params: UuidParams) -> Draft:
    """UUID keys and values."""
    rng = job.rng()
    _enough(job, params.pairs, 10_000)
    if not 1 <= params.answer_chars <= 36:
        raise WorkloadError(f"{job.workload}: answer_chars={params.answer_chars} must lie between 1 and 36")
    ids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * params.pairs)]
    return _pairs(job, rng, ids[: params.pairs], ids[params.pairs :], params.answer_chars)


def _enough(job: Job, pairs: int, most: int) -> None:
    if not job.questions <= pairs <= most:
        raise WorkloadError(f"{job.workload}: pairs={pairs} must lie between questions={job.questions} and {most}")


def _hex(rng: random.Random, count: int, size: int) -> list[str]:
    """`count` distinct lower-case hex strings of `size` characters."""
    if size < 1 or 16**size < count:
        raise WorkloadError(f"size={size} cannot give {count} distinct hex values")
    return [f"{value:0{size}x}" for value in rng.sample(range(16**size), count)]


def _pairs(job: Job, rng: random.Random, keys: list[str], values: list[str], shown: int) -> Draft:
    """One block of pairs at a random depth; each question repeats a key and opens the value's quote."""
    lines = [f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True)]
    block = Insert("\n".join(lines), 0.1 + 0.8 * rng.random(), "\n\n")
    asked = sorted(rng.sample(range(len(keys)), job.questions))
    questions = tuple(
        Question(
            f'"{keys[i]}": "',
            values[i][:shown],
            lines[i],
            unique=shown == len(values[i]),
            meta={"key": keys[i]},
        )
        for i in asked
    )
    listed = ", ".join(f'"{keys[i]}"' for i in asked)
    return Draft(questions, (block,), preview=f"Now look up {listed}.", keys=tuple(keys))
