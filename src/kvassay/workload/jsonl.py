"""Importer: traces of a real reasoning model, one JSON object a line with prompt, reasoning and answer.

The context is the first `length` tokens of prompt and reasoning; the branch is what the model wrote next, so
it is teacher-forced. With `score = "far"` only tokens count that were written before, but not within the last
`far` tokens: those a policy can only get right by what it kept from far back.

The prompt stands inside the context, so such a sample is always query-aware, and says so.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvassay.errors import WorkloadError, did_you_mean
from kvassay.workload.framing import Framing
from kvassay.workload.sample import Branch, Sample

SCORES = ("far", "all")


@dataclass(frozen=True)
class JsonlParams:
    """`path` and the keys in it; `row` is a line number from 0 (-1 = the sample's index).

    The question is the first `given` tokens after the context, the answer the next `continued` ones.
    """

    path: str = ""
    row: int = -1
    prompt_key: str = "prompt"
    reasoning_key: str = "reasoning"
    answer_key: str = "answer"
    opener: str = "\n<think>\n"
    closer: str = "\n</think>\n"
    given: int = 1
    continued: int = 64
    score: str = "far"
    far: int = 512


def build(framing: Framing, params: JsonlParams, *, length: int, seed: int, index: int) -> Sample:
    """Return one sample of one row. Raises `WorkloadError` for a bad file, key, or a trace that is too short."""
    check(params)
    number = index if params.row < 0 else params.row
    row = _row(params, number)
    text = framing.head + row[params.prompt_key] + framing.tail + params.opener + row[params.reasoning_key]
    ids = framing.context_ids(text + params.closer + row[params.answer_key])
    needed = length + params.given + params.continued
    if len(ids) < needed:
        raise WorkloadError(
            f"{params.path}:{number + 1}: the trace has {len(ids)} tokens, but length {length} with given="
            f"{params.given} and continued={params.continued} takes {needed}"
        )
    split = length + params.given
    scored = _scored(ids, split, needed, params, number)
    branch = Branch(
        tuple(ids[length:split]),
        tuple(ids[split:needed]),
        framing.decode(ids[length:split]),
        framing.decode(ids[split:needed]),
        scored,
        1.0,
        {"score": params.score, "trace_tokens": len(ids), "final_answer": row[params.answer_key]},
    )
    source = {
        "source": Path(params.path).name,
        "sha256": hashlib.sha256(Path(params.path).read_bytes()).hexdigest(),
        "python": platform.python_version(),
    }
    meta = {**framing.provenance(), "canonical": True, "row": number, "haystack": source}
    return Sample("jsonl", seed, index, tuple(ids[:length]), (branch,), True, meta)


def check(params: JsonlParams) -> None:
    """Refuse parameters that no file could satisfy, without reading one. Raises `WorkloadError`."""
    if not params.path:
        raise WorkloadError(
            "jsonl: params.path is needed: a file with one JSON object of prompt, reasoning, answer a line"
        )
    if params.score not in SCORES:
        raise WorkloadError(f"jsonl: score '{params.score}'{did_you_mean(params.score, SCORES)}")
    if params.given < 1 or params.continued < 1 or params.far < 0:
        raise WorkloadError(
            f"jsonl: given={params.given} and continued={params.continued} must be >= 1, far={params.far} >= 0"
        )


def check_rows(params: JsonlParams, contexts: int) -> None:
    """Refuse a file that lacks one of the first `contexts` rows, or their keys. Raises `WorkloadError`."""
    for index in range(contexts):
        _row(params, index if params.row < 0 else params.row)


def recurring(ids: Sequence[int], start: int, stop: int, far: int) -> list[int]:
    """Positions in [start, stop) whose token came before, but not among the `far` tokens just before it."""
    last: dict[int, int] = {}
    found = []
    for position in range(stop):
        token = ids[position]
        if position >= start and token in last and position - last[token] > far:
            found.append(position)
        last[token] = position
    return found


def _scored(ids: Sequence[int], split: int, stop: int, params: JsonlParams, number: int) -> tuple[int, ...]:
    """Indices into the answer."""
    if params.score == "all":
        return tuple(range(stop - split))
    scored = tuple(position - split for position in recurring(ids, split, stop, params.far))
    if not scored:
        raise WorkloadError(
            f"{params.path}:{number + 1}: none of the {stop - split} answer tokens recurs from more than "
            f"far={params.far} tokens back; raise continued or use score='all'"
        )
    return scored


def _row(params: JsonlParams, number: int) -> Mapping[str, Any]:
    """One row with its three texts."""
    lines = _lines(params.path)
    if not 0 <= number < len(lines):
        raise WorkloadError(f"{params.path}: row {number} was asked for, the file has {len(lines)}")
    try:
        row = json.loads(lines[number])
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{params.path}:{number + 1}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{params.path}:{number + 1}: not a JSON object")
    for key in (params.prompt_key, params.reasoning_key, params.answer_key):
        if not isinstance(row.get(key), str):
            raise WorkloadError(
                f"{params.path}:{number + 1}: key '{key}' is missing or no text{did_you_mean(key, row)}"
            )
    return row


@lru_cache(maxsize=2)
def _lines(path: str) -> tuple[str, ...]:
    """The lines that are not blank."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    return tuple(line for line in text.split("\n") if line.strip())
