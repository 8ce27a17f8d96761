"""Export to lm-evaluation-harness: the numbers of the cells under its keys, and its own tools read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.report.lm_eval_json import write_lm_eval
from tests.runs import ARMS, make_run

TASK = "kv_short__2k"


def exported(folder: Path) -> dict[str, dict[str, Any]]:
    make_run(folder / "run")
    found = CliRunner().invoke(cli, ["show", str(folder / "run"), "--export", "lm-eval", str(folder / "out")])
    assert found.exit_code == 0, found.output
    files = [Path(line) for line in found.output.splitlines()]
    assert len(files) == len(ARMS) == len(list((folder / "out").iterdir()))
    assert {file.name for file in files} == {"results_2026-01-02T04-04-05+00-00.json"}
    return {data["model_name"]: data for data in (json.loads(file.read_text()) for file in files)}


def test_a_file_per_arm_holds_the_cell(tmp_path: Path) -> None:
    data = exported(tmp_path)["tiny-model__snapkv(window=16) keep=0.25"]
    numbers = data["results"][TASK]
    assert (numbers["top1,none"], numbers["top1_stderr,none"], numbers["nll,none"]) == (0.625, 0.125, 1.25)
    assert (numbers["retained_fraction,none"], numbers["freed_fraction_whole_block,none"]) == (0.25, 3 / 128)
    assert numbers["alias"] == "kv_short 2k" and numbers["sample_len"] == 4
    assert data["n-samples"] == {TASK: {"original": 4, "effective": 4}}
    better = data["higher_is_better"][TASK]
    assert (better["top1"], better["nll"], better["generated_tokens"]) == (True, False, None)
    assert better["freed_fraction_compaction"] is True
    arguments = data["config"]["model_args"]
    assert (arguments["policy"], arguments["budget"], arguments["sink"]) == ("snapkv(window=16)", "keep=0.25", 4)
    assert data["date"] == 1767323045.0
    assert data["configs"][TASK]["metadata"]["query_aware"] is False


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    results = make_run(tmp_path / "run")
    first = [file.read_bytes() for file in write_lm_eval(results, tmp_path / "out")]
    assert [file.read_bytes() for file in write_lm_eval(results, tmp_path / "out")] == first


@pytest.mark.lm_eval
def test_the_harness_itself_makes_its_table_of_it(tmp_path: Path) -> None:
    from lm_eval.result_schema import EvalResults
    from lm_eval.utils import get_results_filenames, make_table, sanitize_model_name

    files = write_lm_eval(make_run(tmp_path / "run"), tmp_path / "out")
    assert len(get_results_filenames([str(file) for file in files])) == len(files)
    data = exported(tmp_path / "again")["tiny-model__snapkv(window=16) keep=0.25"]
    lines = [[part.strip() for part in line.split("|")] for line in make_table(data).splitlines()]
    top1 = next(line for line in lines if "top1" in line)
    assert top1[5:10] == ["top1", "↑", "0.6250", "±", "0.125"]
    assert set(data) - set(EvalResults.__annotations__) == {"kvassay_version"}
    assert sanitize_model_name(data["model_name_sanitized"]) == data["model_name_sanitized"]
