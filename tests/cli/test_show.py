"""`kvassay ls` and `kvassay show` on a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import ExperimentError
from tests.runs import make_run


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_ls(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    header, line = invoke("ls", tmp_path).splitlines()
    assert header.split() == ["run", "state", "models", "arms", "started", "(UTC)"]
    assert line.split() == [str(tmp_path / "one"), "finished", "tiny-model", "6", "2026-01-02T03:04:05"]


def test_ls_without_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"no such folder; runs go to \./runs"):
        invoke("ls", tmp_path / "none")


def test_show_prints_the_table(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert "snapkv(window=16) keep=0.25      0.62 1.250 0.750 0.75   1/0  250 KiB" in invoke("show", tmp_path)


def test_show_json_holds_every_cell(tmp_path: Path) -> None:
    make_run(tmp_path)
    data = json.loads(invoke("show", tmp_path, "--json"))
    cell = next(cell for cell in data["cells"] if cell["arm"].startswith("snapkv"))
    assert (cell["top1"], cell["top1_diff"], cell["top1_diff_high"]) == (0.625, -0.375, None)
    assert cell["top1_diff_error"] == 0.125
    assert (cell["task_lost"], cell["blocks_freed_whole_block"], cell["samples"]) == (1, 3.0, 4)
    assert data["manifest"]["name"] == "made-up"


def test_show_html_and_picture_print_where_they_are(tmp_path: Path) -> None:
    make_run(tmp_path)
    picture = tmp_path / "p.svg"
    assert invoke("show", tmp_path, "--html", "--picture", picture).split() == [
        str(tmp_path / "report.html"),
        str(picture),
    ]
    assert picture.stat().st_size > 1000


def test_show_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"no manifest\.json in it, so it is not a run folder"):
        invoke("show", tmp_path)
    make_run(tmp_path / "half", finished=False)
    with pytest.raises(ExperimentError, match="this run has not finished; run the same command again"):
        invoke("show", tmp_path / "half")


def test_exported_results_are_shown_as_the_run_is_and_hold_no_context(tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "shared" / "it"
    make_run(run)
    for part in ("traces/t0", "units"):
        (run / part).mkdir(parents=True)
        (run / part / "data.parquet").write_bytes(b"much")
    written = invoke("show", run, "--export", "results", there).split()
    assert sorted(written) == sorted(str(there / path.name) for path in run.iterdir() if path.is_file())
    assert sorted(map(str, there.iterdir())) == sorted(written)
    assert invoke("show", there) == invoke("show", run)
    assert invoke("show", run, "--export", "results", there).split() == written
    before = sorted(run.rglob("*"))
    with pytest.raises(ExperimentError, match="holds a run and its units; choose another folder"):
        invoke("show", there, "--export", "results", run)
    assert sorted(run.rglob("*")) == before
