from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvassay.cli.fidelity import fidelity
from kvassay.errors import KvassayError, PolicyError, TraceError
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.open import open_loop
from kvassay.trace.reader import Trace
from tests.record import tiny
from tests.record.conftest import loaded, sample_of

YARDSTICKS = ["dense", "random", "recency", "streaming", "exact_mass", "hindsight", "fp8"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    sample = sample_of(tiny.token_ids(120), [(tiny.token_ids(5, seed=1), tiny.token_ids(3, seed=2))])
    folder = tmp_path_factory.mktemp("traces") / "t"
    return record_sample(loaded("llama"), sample, folder, RecordOptions(prefill_chunk=64, taps=("output",)))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(fidelity, [str(x) for x in arguments])


def error(result: Result) -> str:
    assert isinstance(result.exception, KvassayError)
    return str(result.exception)


def test_json_holds_the_open_loops_rows_and_the_screening_lines(trace: Trace) -> None:
    result = run(trace.path, "--policy", "knorm", "--policy", "r-kv", "--budget", "keep=0.5", "--json", "--seed", 1)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["digest"] == trace.digest
    assert data["dense_reproduces_output"] < 1e-5
    names = [line["arm"].split()[0] for line in data["arms"]]
    assert names == [*YARDSTICKS, "knorm"]
    assert set(data["skipped"]) == {"paged-eviction keep=0.5", "r-kv keep=0.5"}
    assert [line["kind"] for line in data["arms"] if line["arm"].startswith("hindsight")] == ["reference"]
    arm = Arm(make("knorm"), Budget("keep_tokens", 0.5), Protection(4, 32))
    mine = [row for row in data["layers"] if row["arm"] == arm.label]
    assert [row["output_error"] for row in mine] == [row.output_error for row in open_loop(trace, [arm])]
    line = next(line for line in data["arms"] if line["arm"] == arm.label)
    assert line["output_error"] == pytest.approx(sum(row["output_error"] for row in mine) / 4)
    assert line["worst_error"] == max(row["output_error"] for row in mine)


def test_the_table_shows_every_arm_and_what_was_left_out(trace: Trace) -> None:
    result = run(trace.path, "--policy", "knorm", "--budget", "keep=0.5", "--alone")
    assert result.exit_code == 0, result.output
    assert "knorm keep=0.5" in result.stdout
    assert "random" not in result.stdout
    assert "of the model's own attention output" in result.stdout
    several = run(trace.path, "--policy", "kivi", "--budget", "keep=0.5")
    assert "not replayed: kivi: decides over all layers again" in " ".join(several.stdout.split())


def test_wrong_input_is_one_line(trace: Trace, tmp_path: Path) -> None:
    assert "did you mean 'knorm'?" in error(run(trace.path, "--policy", "knrm"))
    assert isinstance(run(tmp_path / "no", "--policy", "knorm").exception, TraceError)
    assert "not more than the 36 protected" in error(run(trace.path, "--policy", "knorm"))  # keep=0.25 of 120
    alone = run(trace.path, "--policy", "kivi", "--alone")
    assert isinstance(alone.exception, PolicyError)
    assert error(alone).startswith("arm 'kivi' decides over all layers again")
    assert run(trace.path).exit_code == 2
