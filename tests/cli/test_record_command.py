from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.record import record
from kvassay.errors import RecordError, TraceError, WorkloadError
from kvassay.trace import writer
from kvassay.trace.reader import Trace
from tests.record import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(tmp_path_factory.mktemp("models") / "bytes"))


def test_it_records_count_contexts_and_prints_their_folders(model: str, tmp_path: Path) -> None:
    arguments = [model, "--workload", "kv_short", "--context", "1.5k", "--count", "2", "--seed", "3"]
    arguments += ["--out", str(tmp_path), "--param", "questions=1", "--q-tail", "5", "--tap", "lse"]
    result = CliRunner().invoke(record, arguments)
    assert result.exit_code == 0, result.output
    names = [f"kv_short-1536-s3-{index:03d}" for index in range(2)]
    assert result.stdout.splitlines() == [str(tmp_path / name) for name in names]
    traces = [Trace.open(tmp_path / name) for name in names]
    assert [trace.header.recipe.index for trace in traces] == [0, 1]
    for trace in traces:
        assert (trace.prefix.tokens, len(trace.branches), trace.header.q_from) == (1536, 1, 1531)
        assert len(trace.header.taps) == len(trace.layout.layers)


def test_an_interrupted_recording_is_continued_by_the_same_command(model: str, tmp_path: Path) -> None:
    arguments = [model, "--workload", "kv_short", "--context", "1.5k", "--out", str(tmp_path)]
    first = CliRunner().invoke(record, arguments).stdout.splitlines()
    made = Trace.open(first[0]).header.created
    both = CliRunner().invoke(record, [*arguments, "--count", "2"])
    assert both.exit_code == 0, both.output
    assert both.stdout.splitlines() == [first[0], first[0].replace("000", "001")]
    assert f"{first[0]}: holds this recording already" in both.stderr
    assert Trace.open(first[0]).header.created == made
    other = CliRunner().invoke(record, [*arguments, "--q-tail", "5", "--param", "questions=1"])
    assert isinstance(other.exception, RecordError)
    assert str(other.exception) == (
        f"{first[0]}: holds another recording, which differs in recipe, q_from, branches; pass --overwrite or another "
        "--out"
    )
    assert CliRunner().invoke(record, [*arguments, "--overwrite"]).exit_code == 0
    assert Trace.open(first[0]).header.created > made


def test_wrong_input_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    start = ["no-such-model", "--out", str(tmp_path), "--workload"]
    wrong = CliRunner().invoke(record, [*start, "copi"])
    assert isinstance(wrong.exception, WorkloadError)
    assert "did you mean 'copy'?" in str(wrong.exception)
    tap = CliRunner().invoke(record, [*start, "copy", "--tap", "outputs"])
    assert isinstance(tap.exception, RecordError)
    pair = CliRunner().invoke(record, [*start, "copy", "--param", "questions"])
    assert pair.exit_code == 2
    assert "'questions' is not KEY=VALUE" in pair.stderr


def test_a_disk_that_is_too_small_leaves_no_folder(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "free_bytes", lambda path: 1000)
    monkeypatch.setattr("torch.nn.Module.__call__", lambda *_, **__: pytest.fail("the model ran"))
    start = [model, "--workload", "kv_short", "--context", "1.5k"]
    found = CliRunner().invoke(record, [*start, "--out", str(tmp_path / "new" / "traces")])
    assert isinstance(found.exception, TraceError)
    assert re.search(
        r"the trace needs \d{7} bytes and 1000 are free there, so nothing was written", str(found.exception)
    )
    assert list(tmp_path.iterdir()) == []


def test_without_vllm_it_says_how_to_get_it(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    start = [model, "--workload", "copy", "--out", str(tmp_path)]
    found = CliRunner().invoke(record, [*start, "--engine", "vllm"])
    assert isinstance(found.exception, RecordError)
    assert "run `make vllm-setup` once, then this command with `.venv-vllm/bin/kvassay`" in str(found.exception)
    for option, value in (("--layers", "0"), ("--steps", "9"), ("--generate", "4"), ("--block-size", "32")):
        found = CliRunner().invoke(record, [*start, option, value])
        assert isinstance(found.exception, RecordError)
        assert f"{option} is vLLM's alone: add --engine vllm" in str(found.exception)
    wrong = CliRunner().invoke(record, [*start, "--engine", "vllm", "--layers", "a"])
    assert wrong.exit_code == 2
    assert "'a' is not a list of indices" in wrong.stderr
