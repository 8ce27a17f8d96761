"""A context and a question are the same by weights and tokens, and by nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvassay.trace.identity import context_sha256, question_sha256
from kvassay.trace.reader import read_header
from kvassay.trace.schema import BranchEntry, ModelIdentity, TraceHeader

from . import tiny


def written(path: Path, **changes: Any) -> TraceHeader:
    return read_header(tiny.make(path, **changes).path)[0]


def other_tokens(header: TraceHeader, segment: str) -> TraceHeader:
    name = f"{segment}/tokens.safetensors"
    entry = header.shards[name].model_copy(update={"sha256": "f" * 64})
    return header.model_copy(update={"shards": {**header.shards, name: entry}})


def ids(header: TraceHeader) -> tuple[str, str, str]:
    return context_sha256(header), question_sha256(header, 0), question_sha256(header, 1)


def test_another_recording_of_the_same_tokens_is_the_same(tmp_path: Path) -> None:
    first = written(tmp_path / "one")
    again = written(tmp_path / "two", seed=1, dtype="float16", prefill_chunk=2)
    assert first.shards["prefix/layer_000.safetensors"] != again.shards["prefix/layer_000.safetensors"]
    assert ids(first) == ids(again) and len(set(ids(first))) == 3


def test_other_weights_or_context_tokens_are_another_context(made: tiny.Made, tmp_path: Path) -> None:
    header = read_header(made.path)[0]
    weights = ModelIdentity(name="tiny", weights_sha256="b" * 64, tokenizer_sha256=None, licence="apache-2.0")
    for changed in (header.model_copy(update={"model": weights}), other_tokens(header, "prefix")):
        assert context_sha256(changed) != context_sha256(header) and ids(changed)[1:] == ids(header)[1:]


@pytest.mark.parametrize(
    "change",
    [{"question_tokens": 3}, {"meta": {"scored": [0]}}, {"meta": {"scored": [1]}}],
    ids=str,
)
def test_where_the_question_ends_and_what_is_scored_belong_to_it(made: tiny.Made, change: dict[str, Any]) -> None:
    header = read_header(made.path)[0]
    first = BranchEntry(**{**header.branches[0].model_dump(), **change})
    changed = header.model_copy(update={"branches": (first, header.branches[1])})
    assert question_sha256(changed, 0) != question_sha256(header, 0)
    assert (ids(changed)[0], ids(changed)[2]) == (ids(header)[0], ids(header)[2])


def test_other_question_tokens_are_another_question(made: tiny.Made) -> None:
    header = read_header(made.path)[0]
    changed = other_tokens(header, "branch_001")
    assert ids(changed)[:2] == ids(header)[:2] and ids(changed)[2] != ids(header)[2]
