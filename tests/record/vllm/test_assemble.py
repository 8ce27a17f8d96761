"""Traces made from hand-made captures are, row by row, the traces that the rows came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.record.again import rerecord
from kvassay.record.load import LoadedModel, describe, load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.record.vllm.capture import Capture, CapturedGroup, Head, Step
from kvassay.record.vllm.served import served_traces
from kvassay.replay.open import output_errors
from kvassay.trace.reader import Trace
from kvassay.trace.render import evidence
from kvassay.trace.verify import verify
from tests.record import tiny
from tests.record.conftest import sample_of

from .steps import Rows, arrived, head_of, step, write

CONTEXT = list(range(65, 75))
"""10 tokens: 2 blocks of 4, and 2 tokens that each question computes again."""
QUESTIONS = ([80, 81], [90])
ANSWERS = ([82, 83], [91])
A, B = ([*CONTEXT, *q] for q in QUESTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="module")
def original(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    loaded: LoadedModel = load(folder)
    sample = sample_of(CONTEXT, list(zip(QUESTIONS, ANSWERS, strict=True)))
    options = RecordOptions(q_tail=10, taps=("output",), logits_k=3)
    return record_sample(loaded, sample, tmp_path_factory.mktemp("t") / "original", options)


def steps(temperature: float = 0.0) -> list[Step]:
    """a prefills in two chunks; b hits two blocks in the step in which a decodes, and goes first in the batch."""
    a, b = ((1, 2, 3),), ((1, 2, 4),)
    asked = {"temperature": temperature, "max_tokens": 3}
    return [
        step(0, ("a", 0, A[:8]), tables={"a": ((1, 2),)}, arrived=(arrived("a", A, **asked),)),
        step(1, ("a", 8, A[8:]), tables={"a": a}),
        step(
            2,
            ("b", 8, B[8:]),
            ("a", 12, [82]),
            tables={"a": ((1, 2, 3, 5),), "b": b},
            arrived=(arrived("b", B, 8, **asked),),
        ),
        step(3, ("b", 11, [91]), ("a", 13, [83]), tables={"a": ((1, 2, 3, 5),), "b": b}),
    ]


def capture(where: Path, original: Trace, model: Path, made: list[Step] | None = None, **changes: Any) -> Capture:
    everything = {"output": True, "logits_k": 3, "logits_from": 10, "model": str(model), **changes}
    head: Head = head_of([0, 1, 2, 3], **everything)
    return write(where, head, steps() if made is None else made, Rows(original, {"a": 0, "b": 1}, head))


def test_a_servers_requests_give_back_the_trace(folder: Path, original: Trace, tmp_path: Path) -> None:
    capture(tmp_path / "c", original, folder)
    (made,) = served_traces(tmp_path / "c", tmp_path / "traces")
    assert verify(made.path).ok
    header = made.header
    assert (header.prefix.tokens, [b.tokens for b in header.branches]) == (10, [4, 2])
    assert [b.question_tokens for b in header.branches] == [2, 1]
    assert [b.answer_text for b in header.branches] == ["st", "|"]  # the tokenizer numbers letters from "!" on
    assert (header.sampling.mode, header.sampling.max_new_tokens) == ("greedy", 3)
    assert (header.attention, header.versions.vllm, header.subset) == ("vllm", "0.32.0", None)
    assert header.model.weights_sha256 == describe(folder).identity().weights_sha256
    for mine, theirs in zip(made.segments, original.segments, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids)
        for layer in range(4):
            assert torch.equal(mine.k(layer), theirs.k(layer))
            assert torch.equal(mine.v(layer), theirs.v(layer))
            assert torch.equal(mine.q(layer), theirs.q(layer))
            assert torch.equal(mine.tap(f"output_{layer:03d}"), theirs.tap(f"output_{layer:03d}"))
    for ours, other in zip(made.branches, original.branches, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours.top_logits, other.top_logits, strict=True))
    assert max(error.error for error in output_errors(made)) < 1e-5
    with pytest.raises(RecordError, match=r"recorded in vLLM 0\.32\.0"):
        rerecord(header, tmp_path / "again")


def test_a_part_of_layers_heads_and_queries(folder: Path, original: Trace, tmp_path: Path) -> None:
    head = head_of([1, 3], kv_heads=(1,), q_from=7, model=str(folder), output=True)
    rows = Rows(original, {"a": 0, "b": 1}, head)

    def narrow(made: Step) -> dict[str, torch.Tensor]:
        return {name: t[:, [1]] if name[-1] in "kv" else t[:, 2:] for name, t in rows(made).items()}

    write(
        tmp_path / "c",
        head.model_copy(update={"groups": (CapturedGroup(layers=(0, 1, 2, 3), block_size=4),)}),
        steps(),
        narrow,
    )
    (made,) = served_traces(tmp_path / "c", tmp_path / "traces")
    assert made.header.subset is not None
    assert (made.header.subset.layers, made.header.subset.kv_heads) == ((1, 3), (1,))
    assert evidence(made.header)["part"] == "layers 1, 3 of the model; KV heads 1"
    assert made.header.logits is None
    for index, layer in enumerate((1, 3)):
        assert torch.equal(made.prefix.k(index), original.prefix.k(layer)[:, [1]])
        assert torch.equal(made.prefix.q(index), original.prefix.q(layer, 7)[:, 2:])
        assert torch.equal(made.branches[1].q(index), original.branches[1].q(layer)[:, 2:])
    assert max(error.error for error in output_errors(made)) < 1e-5


def test_sampled_requests_say_so(folder: Path, original: Trace, tmp_path: Path) -> None:
    capture(tmp_path / "c", original, folder, steps(0.7))
    (made,) = served_traces(tmp_path / "c", tmp_path / "traces")
    assert (made.header.sampling.mode, made.header.sampling.temperature) == ("sampled", 0.7)


def test_requests_cut_off_by_the_limits_are_left_out(folder: Path, original: Trace, tmp_path: Path) -> None:
    capture(tmp_path / "c", original, folder, steps()[:1])
    with pytest.raises(RecordError, match="1 requests in 1 steps, none of them whole"):
        list(served_traces(tmp_path / "c", tmp_path / "traces"))
    capture(tmp_path / "d", original, folder, steps()[:3])
    (made,) = served_traces(tmp_path / "d", tmp_path / "traces")
    assert [branch.tokens for branch in made.branches] == [3, 1]
