"""`kvassay cost`: modelled tables and JSON, no model loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import HardwareError, LayoutError
from kvassay.experiment.folder import LATENCY, MANIFEST
from kvassay.experiment.records import write_records
from kvassay.experiment.results import dump_manifest
from kvassay.measure.latency import LatencyResult
from tests.measure.test_hardware import GOOD


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["cost", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_is_the_roofline_of_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD, encoding="utf-8")
    arguments = ("gemma-3-270m", "--context", "128k", "--hardware", file, "--batch", 2, "--parameters", 270e6, "--json")
    data = json.loads(invoke(*arguments))
    assert (data["how"], data["batch"], data["weights"]["bytes"]) == ("modelled", 2, 540e6)
    (machine,) = data["hardware"]
    assert (machine["name"], machine["calibration_error"]) == ("mine", None)
    (row,) = machine["contexts"]
    parts = {"full": 2 * 3 * 1024 * 131_072, "sliding": 2 * 15 * 1024 * 512, "weights": 540e6}
    assert row["seconds_by_part"] == pytest.approx({kind: count / 0.8e12 for kind, count in parts.items()})
    assert row["seconds_per_token"] == pytest.approx(sum(parts.values()) / 0.8e12)
    assert row["beyond_native_context"] and row["fits"] and row["memory_bound"] == 1


def test_the_table_says_modelled_and_where_the_numbers_are_from() -> None:
    arguments = ("smollm2-135m", "--context", "8k", "--parameters", 0, "--hardware", "h200")
    shown = " ".join(invoke(*arguments, "--hardware", "mi300x").split())
    # 30 layers x 3 heads x 128 elements x 2 bytes x 8192 tokens at 90% of 4.8 TB/s
    assert "step, modelled" in shown and "modelled, not measured" in shown
    assert "8,192 43.7 µs 43.7 µs 100%" in shown
    assert "not calibrated" in shown and "(assumed)" in shown


def test_a_registry_model_brings_its_active_weights() -> None:
    arguments = ("gpt-oss-120b", "--context", "128k", "--hardware", "h200", "--json")
    weights = json.loads(invoke(*arguments))["weights"]
    assert (weights["parameters"], weights["bytes"]) == (5.1e9, 10.2e9) and "2508.10925" in weights["source"]
    assert json.loads(invoke(*arguments, "--parameters", 8e9))["weights"]["source"] == "given"
    assert json.loads(invoke(*arguments, "--parameters", 0))["weights"] is None
    assert json.loads(invoke("minimax-m3", *arguments[1:]))["weights"] is None  # not known


def test_by_default_every_shipped_hardware_at_the_usual_contexts() -> None:
    data = json.loads(invoke("smollm2-135m", "--json"))
    assert [machine["name"] for machine in data["hardware"]] == ["epyc-2core-avx2", "h100-sxm", "h200", "mi300x"]
    assert [row["context"] for row in data["hardware"][0]["contexts"]] == [
        8192,
        32_768,
        131_072,
        262_144,
        500_000,
        1_048_576,
    ]


def test_a_runs_measured_times_calibrate_the_machine_they_are_of(tmp_path: Path) -> None:
    roof = 21.8e9 * 0.87  # bytes the CPU file reads per second
    rows = [timed("dense", 2.0, roof), timed("kivi", 4.0, 2 * roof)]
    write_records(rows, LatencyResult, tmp_path / LATENCY)
    manifest = {"machine": {"cpu": "AMD EPYC", "cpu_count": 2}}
    (tmp_path / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
    arguments = ("smollm2-135m", "--context", "8k", "--hardware", "epyc-2core-avx2", "--hardware", "h200")
    plain = json.loads(invoke(*arguments, "--json"))["hardware"]
    cpu, gpu = json.loads(invoke(*arguments, "--calibrate", tmp_path, "--json"))["hardware"]
    assert (cpu["calibration_scale"], cpu["calibration_error"]) == pytest.approx((2.0, 0.0))
    assert sorted(cpu["calibration_errors"]) == ["m, w, dense", "m, w, kivi"]
    assert cpu["contexts"][0]["seconds_per_token"] == pytest.approx(2 * plain[0]["contexts"][0]["seconds_per_token"])
    assert gpu == plain[1]
    shown = " ".join(invoke(*arguments, "--calibrate", tmp_path).split())
    assert "calibrated: times scaled by 2; on 2 measured shapes, each predicted from the others" in shown
    assert "m, w, dense 0.0%" in shown and "not calibrated" in shown


def timed(arm: str, seconds: float, read: float) -> LatencyResult:
    spread = (seconds, seconds, seconds, 0.0, 2.0)
    return LatencyResult(
        "m", "w", arm, 2048, 7, *spread, read, 0.0, read / seconds / 1e9, 0.5, 0.5, "AMD EPYC, 2 threads"
    )


def test_mistakes() -> None:
    with pytest.raises(HardwareError, match="unknown hardware 'h2000'"):
        invoke("smollm2-135m", "--hardware", "h2000")
    with pytest.raises(LayoutError, match="did you mean 'smollm2-135m'"):
        invoke("smollm3")
