"""`kvassay try` from the options to the table, on a tiny random model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import ExperimentError
from tests.experiment.test_code import PLUGIN
from tests.experiment.tiny import save_tiny_model

OPTIONS = ["--context", "768", "--contexts", "1", "--questions", "1", "--budget", "keep=0.5"]


def test_a_policy_of_ones_own_beside_the_arms_that_always_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "tiny-llama")
    (tmp_path / "mine.py").write_text(PLUGIN.format(factor="1.0"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["try", str(model), "mine.py:Mine", *OPTIONS], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [line.split()[0] for line in result.stdout.splitlines() if "/48 " in line]
    assert rows[0] == "dense" and "mine" in rows and "random" in rows
    assert rows.index("mine") < rows.index("fp8")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("try-tiny-llama-mine.py-Mine-")
    again = CliRunner().invoke(cli, ["try", str(model), "mine.py:Mine", *OPTIONS], catch_exceptions=False)
    assert "done before" in again.stderr


def test_without_timing_no_clock_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["try", str(model), "snapkv", "--no-timing", *OPTIONS], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "cells.parquet").is_file() and not (folder / "latency.parquet").exists()


def test_a_wrong_policy_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ExperimentError, match=r"^kvassay try: \[arms\] policies: unknown policy 'snapvk' \(did you mean"
    ):
        CliRunner().invoke(cli, ["try", "smollm2-135m", "snapvk"], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_own_prefill_below_the_floor_ends_well_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "tiny-llama")
    (tmp_path / "mine.py").write_text(PLUGIN.format(factor="1.0"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = ["try", str(model), "mine.py:Mine", "svd", "--own-prefill", "--budget", "keep=0.25", *OPTIONS]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "mine keep=0.25 own-prefill" in " ".join(result.stdout.split())
    assert "svd own-prefill" in result.stdout and "mine keep=0.5 own-prefill" not in result.stdout
    end = "Finished, but no arm can be judged in 1 of 1 tables (tiny-llama, kv_short 768): dense itself is below"
    assert result.stdout.splitlines()[-1].startswith(end)
