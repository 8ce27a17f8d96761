"""Long rows of an experiment: what is planned, computed once, continued, and what they may not say."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import ExperimentError, KvassayError
from kvassay.experiment import long
from kvassay.experiment.folder import LONG, RESOLVED, RunFolder
from kvassay.experiment.listing import RunLine, list_runs
from kvassay.experiment.long import LongPlan, LongUnit, growing_layers, long_rows, plan_long, read_long, run_long
from kvassay.experiment.progress import Silent
from kvassay.experiment.schema import load_experiment
from kvassay.layout.bytes import bytes_at
from kvassay.layout.config import from_config
from kvassay.measure.long import LongRow
from kvassay.record.synthetic import validity
from kvassay.record.synthetic.statistics import shipped
from tests.experiment.tiny import save_tiny_model, write_experiment

TEXT = """
[experiment]
name = "far"

[[long]]
row = "{row}"
lengths = ["{length}"]
layers = {layers}
question = 3

[arms]
policies = ["recency", "h2o", "dense", "pyramidkv"]
budgets = ["keep=0.5"]
always_on = false
"""


def plan_of(folder: Path, row: str = "smollm2-135m", length: str = "512", layers: int = 2) -> LongPlan:
    file = folder / "far.toml"
    file.write_text(TEXT.format(row=row, length=length, layers=layers))
    return plan_long(load_experiment(file), str(file), folder)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[LongUnit]:
    """Units are computed in this process, which costs no start; what was computed."""
    done: list[LongUnit] = []

    def compute(plan: LongPlan, unit: LongUnit, listener: object) -> list[LongRow]:
        done.append(unit)
        return long_rows(plan, unit, lambda step: None)

    monkeypatch.setattr(long, "_in_a_process", compute)
    return done


def test_layers_are_evenly_spaced_among_those_that_grow(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "step-3.7-flash", "1m", 3)
    growing = [layer.index for layer in growing_layers(from_config("step-3.7-flash"))]
    assert len(growing) == 12
    assert [unit.layer for unit in plan.units] == [growing[2], growing[6], growing[10]]
    assert {(unit.tokens, unit.like_it, unit.replayed) for unit in plan.units} == {(1 << 20, 12, 3)}


@pytest.mark.parametrize(
    "row", ["hy3", "granite-4.1-8b", "granite-4.1-30b", "step-3.7-flash", "north-mini-code-1.0", "mimo-v2.5"]
)
def test_the_named_models_have_layers_that_grow_and_their_length_is_planned(tmp_path: Path, row: str) -> None:
    plan = plan_of(tmp_path, row, "1m", 1)
    (unit,) = plan.units
    assert set(plan.refused(unit)) == {"h2o keep=0.5", "pyramidkv keep=0.5"}
    assert "multiply-adds), per layer at 1048576 tokens" in plan.refused(unit)["h2o keep=0.5"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"smollm2-135m"', '"smollm"', r"\[\[long\]\] 1: row: "),
        ('"smollm2-135m"', '"deepseek-v3.2"', "'deepseek-v3.2' has no layer with keys and values per head that grow"),
        ('"512"', '"30"', "budget keep=0.5 gives 15 of 30 tokens, not more than the 36 protected"),
        ('["512"]', "[]", r"\[\[long\]\] 1: lengths: "),
        ("question = 3", "questions = 3", r"unknown key 'questions' \(did you mean 'question'\?\)"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "far.toml"
    file.write_text(TEXT.format(row="smollm2-135m", length="512", layers=1).replace(old, new))
    with pytest.raises(ExperimentError, match=message):
        plan_long(load_experiment(file), str(file), tmp_path)


def test_an_experiment_of_nothing_is_refused_and_a_workload_needs_models(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    head, arms = '[experiment]\nname = "x"\n', '[arms]\nbudgets = ["keep=0.5"]\n'
    file.write_text(head + arms)
    with pytest.raises(ExperimentError, match=r"nothing to run: neither a \[\[workload\]\] nor a \[\[long\]\]"):
        load_experiment(file)
    file.write_text(head + '[[workload]]\nname = "kv_short"\nlength = "2k"\n' + arms)
    with pytest.raises(ExperimentError, match=r"there is a \[\[workload\]\], so \[experiment\] must list models"):
        load_experiment(file)


def test_rows_are_computed_once_and_hold_bytes_traffic_and_time(tmp_path: Path, here: list[LongUnit]) -> None:
    plan = plan_of(tmp_path)
    rows = run_long(plan, tmp_path / "run", Silent())
    assert [unit.layer for unit in here] == [7, 22]
    assert [(row.layer, row.arm) for row in rows] == [
        (layer, arm) for layer in (7, 22) for arm in ("recency keep=0.5", "h2o keep=0.5", "dense")
    ]
    first, dense = rows[0], rows[2]
    assert (first.source, first.row, first.tokens, first.layers_like_it, first.layers_replayed) == (
        *("synthetic", "smollm2-135m", 512, 30, 2),
    )
    assert dense.retained_bytes == 512 * 3 * 128 * 2
    assert (first.retained_fraction, first.blocks_total, first.blocks_freed_layer) == (0.5, 32, 15)
    # Three queries see 513, 514 and 515 tokens, of the context half.
    assert first.read_bytes == pytest.approx((256 + 2) * 3 * 128 * 2)
    assert first.read_fraction == pytest.approx(258 / 514)
    assert first.peak_rss_bytes > 1 << 27
    assert rows == run_long(plan, tmp_path / "run", Silent())
    assert len(here) == 2
    assert read_long(tmp_path / "run")[0] == rows
    assert list(read_long(tmp_path / "run")[1]) == ["pyramidkv keep=0.5"]


def test_a_killed_run_is_continued_by_unit(
    tmp_path: Path, here: list[LongUnit], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, compute = plan_of(tmp_path), long._in_a_process

    def dies(plan: LongPlan, unit: LongUnit, listener: object) -> list[LongRow]:
        if here:
            raise KeyboardInterrupt
        return compute(plan, unit, listener)  # type: ignore[arg-type]

    monkeypatch.setattr(long, "_in_a_process", dies)
    with pytest.raises(KeyboardInterrupt):
        run_long(plan, tmp_path / "run", Silent())
    folder = RunFolder(tmp_path / "run")
    assert len(list(folder.long_rows.iterdir())) == 1
    monkeypatch.setattr(long, "_in_a_process", compute)
    assert len(run_long(plan, tmp_path / "run", Silent())) == 6
    assert [unit.layer for unit in here] == [7, 22]


def comparison(tau: float) -> validity.Comparison:
    return validity.Comparison(shipped().sha256, "m", 9, 3, 64, 64, 8000, 12, {"0.1": tau, "0.25": 1.0, "0.5": 1.0})


@pytest.mark.parametrize(("tau", "judges"), [(0.81, True), (0.79, False), (None, False)])
def test_quality_is_there_only_where_synthetic_rows_were_found_valid(
    tmp_path: Path, here: list[LongUnit], monkeypatch: pytest.MonkeyPatch, tau: float | None, judges: bool
) -> None:
    found = () if tau is None else (comparison(tau),)
    monkeypatch.setattr(validity, "known", lambda: found)
    for row in run_long(plan_of(tmp_path, layers=1), tmp_path / "run", Silent()):
        quality = (row.output_error, row.retained_mass, row.target_recall)
        assert row.judges is judges
        assert all((value is None) is not judges for value in quality)
        if judges and row.arm == "dense":
            assert quality == pytest.approx((0.0, 1.0, 1.0), abs=1e-5)


def test_another_verdict_of_validity_or_seed_is_another_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path)
    keys = {plan.key(unit) for unit in plan.units}
    assert len(keys) == 2
    monkeypatch.setattr(validity, "known", lambda: (comparison(0.7),))
    assert plan.key(plan.units[0]) not in keys
    about = plan.experiment.experiment
    other = replace(
        plan, experiment=plan.experiment.model_copy(update={"experiment": about.model_copy(update={"seed": 1})})
    )
    assert other.key(plan.units[0]) not in keys


def test_sliding_state_stands_apart(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "north-mini-code-1.0", "512", 1)
    rows = long_rows(plan, plan.units[0], lambda step: None)
    layout = from_config("north-mini-code-1.0")
    layer = layout.layers[plan.units[0].layer]
    (dense,) = (row for row in rows if row.arm == "dense")
    assert dense.sliding_bytes == bytes_at(layout, 512).sliding > 0
    assert dense.retained_bytes == 512 * layer.kv.elements * layout.element_bytes
    assert {row.kind for row in rows} == {"full"}


def test_the_command_prints_tables_and_shows_them_again(tmp_path: Path, here: list[LongUnit]) -> None:
    plan_of(tmp_path, layers=1)
    folder = tmp_path / "run"
    ran = CliRunner().invoke(cli, ["run", str(tmp_path / "far.toml"), "--out", str(folder)])
    assert ran.exit_code == 0, ran.output
    for text in ("512", "1 of 30 full layers", "recency keep=0.5", "not replayed: pyramidkv keep=0.5"):
        assert text in ran.output
    shown = CliRunner().invoke(cli, ["show", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert shown.output in ran.output
    data = CliRunner().invoke(cli, ["show", str(folder), "--json"])
    assert '"refused"' in data.output
    assert asdict(read_long(folder)[0][0])["row"] in data.output


@pytest.mark.parametrize("option", [("--gate", "nope.toml"), ("--contexts", "2")])
def test_options_about_workloads_are_refused_where_there_are_none(
    tmp_path: Path, here: list[LongUnit], option: tuple[str, str]
) -> None:
    plan_of(tmp_path)
    with pytest.raises(
        ExperimentError, match=rf"holds \[\[long\]\] only, and {option[0]} would do nothing: .*no verdict"
    ):
        invoke("run", tmp_path / "far.toml", "--out", tmp_path / "run", *option)
    assert not here
    assert not (tmp_path / "run").exists()


def test_beside_workloads_the_gate_is_looked_at_before_long_rows_and_is_said_to_judge_those_alone(
    tmp_path: Path, here: list[LongUnit]
) -> None:
    file = write_experiment(tmp_path, save_tiny_model(tmp_path / "model"))
    file.write_text(file.read_text() + '[[long]]\nrow = "smollm2-135m"\nlengths = ["512"]\n')
    arguments = ["run", str(file), "--out", str(tmp_path / "run"), "--gate", str(tmp_path / "nope.toml")]
    ran = CliRunner().invoke(cli, [*arguments, "--contexts", "1"])
    assert isinstance(ran.exception, KvassayError)
    assert "nope.toml" in str(ran.exception)
    assert "--gate and --contexts: of the workloads only; long rows are run whole and have no verdict" in ran.stderr
    assert not here


def test_a_folder_of_long_rows_alone_is_listed_and_what_it_lacks_is_refused_in_one_line(
    tmp_path: Path, here: list[LongUnit]
) -> None:
    run = tmp_path / "runs" / "far"
    run_long(plan_of(tmp_path), run, Silent())
    os.utime(run / RESOLVED, (0, 0))
    line = RunLine(run, "long rows, finished", "smollm2-135m", 3, "1970-01-01T00:00:00+00:00")
    assert list_runs(tmp_path / "runs") == list_runs(run) == [line]
    picture = tmp_path / "l.svg"
    for words in (("--picture", picture), ("--html",), ("--export", "lm-eval", tmp_path / "e"), ("--html", "--json")):
        with pytest.raises(ExperimentError, match="holds long rows only, which have no page, picture or export"):
            invoke("show", run, *words)
    assert not picture.exists()
    for verb in (("gate", "judge", run), ("compare", run, run)):
        with pytest.raises(ExperimentError, match="holds long rows only, which have no cells, samples or verdict"):
            invoke(*verb)
    for policy in ((), ("--policy", "knorm")):
        with pytest.raises(ExperimentError, match="holds long rows only, which have no recorded contexts to screen"):
            invoke("fidelity", run, *policy)

    (run / LONG).unlink()
    assert list_runs(run) == [replace(line, state="long rows, layers done: 2")]
    with pytest.raises(ExperimentError, match="holds long rows only, and has not finished; run the same command again"):
        invoke("show", run)


def invoke(*arguments: object) -> None:
    CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.slow
def test_a_unit_in_a_process_of_its_own_gives_the_same_rows_and_its_own_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(tmp_path, layers=1)
    (first, *rest) = run_long(plan, tmp_path / "apart", Silent())
    mine = long_rows(plan, plan.units[0], lambda step: None)
    timeless: dict[str, Any] = dict.fromkeys(
        ("decide_seconds", "summarize_seconds", "select_seconds", "peak_rss_bytes"), 0
    )
    assert [replace(row, **timeless) for row in (first, *rest)] == [replace(row, **timeless) for row in mine]
    assert 1 << 27 < first.peak_rss_bytes < 1 << 31
