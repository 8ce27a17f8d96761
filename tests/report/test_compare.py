"""`kvassay compare` as people and programs read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.experiment.folder import LATENCY
from kvassay.experiment.records import write_records
from kvassay.measure.latency import LatencyResult
from kvassay.measure.result import BranchResult
from tests.experiment.test_compare import ARM, rows, run_of


def worse(one: BranchResult) -> BranchResult:
    return replace(one, nll=one.nll + 0.2 + int(one.trace[1]) / 100, retained_bytes=128.0 * 1024)


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["compare", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_tables_name_the_change_its_p_and_its_bytes(tmp_path: Path) -> None:
    run_of(tmp_path / "a", rows(), code_sha256="a" * 64)
    run_of(tmp_path / "b", rows(worse), code_sha256="b" * 64)
    lines = invoke(tmp_path / "a", tmp_path / "b").splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    assert "code_sha256  aaaaaaaaaaaa  bbbbbbbbbbbb" in text
    assert "identical to the last bit, wall times aside: dense" in text
    nll = next(line.split() for line in lines if "NLL" in line)
    assert nll[:4] == ["NLL", "1.250", "1.475", "0.225"] and nll[-2:] == ["*", "-"]
    assert next(line.split() for line in lines if "retained bytes" in line)[-5:] == [
        "256",
        "KiB",
        "128",
        "KiB",
        "0.500",
    ]
    assert "over all 5 tests of this comparison" in " ".join(text.split())


def test_json_holds_the_same(tmp_path: Path) -> None:
    run_of(tmp_path / "a", rows())
    run_of(tmp_path / "b", rows(worse))
    data = json.loads(invoke(tmp_path / "a", tmp_path / "b", "--json", "--metric", "nll"))
    (cell,) = (one for one in data["cells"] if one["arm"] == ARM)
    (contrast,) = cell["contrasts"]
    assert contrast["metric"] == "nll" and contrast["significant"] is True
    assert abs(contrast["difference"]["mean"] - 0.225) < 1e-12 and data["comparisons"] == 1


def latency(arm: str, seconds: float, spread: float = 0.1) -> LatencyResult:
    return LatencyResult(
        model="tiny-model",
        trace_set="kv_short 2k",
        arm=arm,
        context_tokens=2048,
        rounds=3,
        attention_seconds=seconds,
        attention_low=seconds * (1 - spread),
        attention_high=seconds * (1 + spread),
        policy_seconds=0.001,
        dense_seconds=0.010,
        read_bytes=1e6,
        flops=1e6,
        gigabytes_per_second=1.0,
        bandwidth_fraction=0.1,
        matrix_fraction=0.1,
        hardware="Some CPU",
    )


def timed(folder: Path, dense: float, arm: float) -> Path:
    results = run_of(folder, rows())
    write_records([latency("dense", dense), latency(ARM, arm)], LatencyResult, results.path / LATENCY)
    return folder


def test_times_are_called_apart_only_where_quartiles_do_not_overlap(tmp_path: Path) -> None:
    output = invoke(timed(tmp_path / "a", 0.010, 0.004), timed(tmp_path / "b", 0.0105, 0.002))
    by_arm = {line.split()[0]: line.split() for line in output.splitlines() if " ms " in line}
    assert by_arm["dense"][1:6] == ["10.00", "ms", "10.50", "ms", "1.050"] and "overlap" in by_arm["dense"]
    assert "apart" in by_arm["snapkv(window=16)"] and "0.500" in by_arm["snapkv(window=16)"]
    assert "dense itself took" not in output
    assert "dense itself took 2.000 of A's time" in invoke(tmp_path / "a", timed(tmp_path / "c", 0.020, 0.004))
