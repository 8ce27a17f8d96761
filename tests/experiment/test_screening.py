"""Screening a finished run in the open loop, and what a run says of where its tokens lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment.plan import make_plan
from kvassay.experiment.results import Results
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.experiment.screen import screen_run
from kvassay.replay.open import open_loop
from kvassay.report.layers import layer_rows
from kvassay.report.retained import kept_rows
from kvassay.trace.reader import Trace
from tests.experiment.test_code import PLUGIN
from tests.experiment.tiny import write_experiment


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("screened")
    file = write_experiment(folder, tiny_model, contexts=2)
    return run(make_plan(load_experiment(file), str(file), folder), folder / "run", jobs=1)


def test_a_runs_own_arms_are_screened_on_its_first_context(results: Results) -> None:
    skipped = screen_run(results)
    assert {label.split()[0] for label in skipped} == {"paged-eviction"}
    found = Results.open(results.path).fidelity
    (name,) = results.first_traces().values()
    assert name == results.manifest["units"][0]["trace"] and {row.trace for row in found} == {name}
    covered = {"dense", "random", "recency", "streaming", "exact_mass", "hindsight", "fp8", "knorm"}
    assert {row.arm.split()[0] for row in found} == covered
    plan = make_plan(load_experiment(results.path / "resolved.toml"), "", results.path)
    (arm,) = (arm for arm in plan.arms if arm.label == "knorm keep=0.5")
    alone = open_loop(Trace.open(results.path / "traces" / name), [arm], plan.protocol)
    assert [row for row in found if row.arm == arm.label] == alone
    rows = [row for row in layer_rows(Results.open(results.path)) if row["arm"] == arm.label]
    assert [row["layer"] for row in rows] == [0, 1]
    mine = [row.output_error for row in alone if row.layer == 1]
    assert rows[1]["error"] == pytest.approx(sum(mine) / 2, rel=1e-4) and len(rows[1]["heads"]) == 4


def test_a_policy_of_a_file_is_found_from_where_one_works_and_must_be_the_one_that_ran(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder does not hold the files of its policies."""
    run_folder = tmp_path / "runs" / "mine"
    shutil.copytree(results.path, run_folder)
    (tmp_path / "mine.py").write_text(PLUGIN.format(factor="1"), encoding="utf-8")
    resolved = run_folder / "resolved.toml"
    text = resolved.read_text(encoding="utf-8")
    assert '["knorm"]' in text
    resolved.write_text(text.replace('["knorm"]', '["mine.py:Mine"]'), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    screen_run(Results.open(run_folder))
    assert "mine keep=0.5" in {row.arm for row in Results.open(run_folder).fidelity}
    manifest = json.loads((run_folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["policy_code"]["mine keep=0.5"] = "0" * 64
    (run_folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"the code of mine keep=0\.5 is not that of the run's results"):
        screen_run(Results.open(run_folder))


def test_where_the_tokens_lie_is_in_the_rows_of_first_questions(results: Results) -> None:
    rows = {(row.trace, row.branch, row.arm): row.kept for row in results.samples()}
    trace = results.manifest["units"][0]["trace"]
    assert rows[trace, 0, "dense"] == (1.0,) * 64 and rows[trace, 1, "dense"] == ()
    recency = rows[trace, 0, "recency keep=0.5"]
    # 384 tokens: 6 to a stretch. Of 192 kept, 2 are sinks, the others the last 190: 31 stretches and 4 tokens.
    assert recency == pytest.approx((2 / 6, *(0.0,) * 31, 4 / 6, *(1.0,) * 31))
    shown = {row["arm"]: row["share"] for row in kept_rows(results)}
    assert shown["recency keep=0.5"] == pytest.approx(recency, abs=1e-3)
    assert "dense" not in shown and "fp8" not in shown
