"""What a study publishes follows from its gate and its cells, and its pages say what is published."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pytest

from kvassay.experiment.long import read_long
from kvassay.experiment.results import Results, SetResult
from kvassay.experiment.schema import load_experiment
from kvassay.gate.chain import LOG, read_log
from kvassay.gate.schema import load_gate
from kvassay.gate.session import make_judgement
from kvassay.gate.standing import standing
from kvassay.measure.verdict import load_judgement
from kvassay.report.verdicts import stale
from kvassay.report.worst import worst_cases
from kvassay.trace.fingerprint import load_recipe
from tests.pages import ROOT

STUDIES = sorted((ROOT / "studies").glob("[0-9]*"))
RESULTS = sorted(path.parent for study in STUDIES for path in study.glob("results/*/manifest.json"))
by_name = pytest.mark.parametrize("run", RESULTS, ids=lambda path: f"{path.parents[1].name}-{path.name}")


def study_of(run: Path) -> Path:
    return run.parents[1]


def test_there_is_something_to_check() -> None:
    assert RESULTS


@by_name
def test_verdicts_are_about_these_cells_by_the_gate_declared_before(run: Path) -> None:
    judgement, study = load_judgement(run), study_of(run)
    assert judgement is not None and not judgement.exploratory and not stale(judgement, run)
    assert judgement.gate_sha256 == hashlib.sha256((study / "gate.toml").read_bytes()).hexdigest()
    assert (run / "gate.toml").read_bytes() == (study / "gate.toml").read_bytes()
    last = read_log(study / LOG)[-1]
    assert (last.sha256, last.time) == (judgement.gate_sha256, judgement.declared)
    assert last.time < Results.open(run).manifest["started"]


@by_name
def test_judged_again_the_verdicts_are_the_same(run: Path) -> None:
    results, published = Results.open(run), load_judgement(run)
    assert published is not None
    again = make_judgement(results, standing(run / "gate.toml", run, results.manifest), exploratory=False)
    assert [(v.arm, v.outcome, v.reason) for v in again.overall] == [
        (v.arm, v.outcome, v.reason) for v in published.overall
    ]


@by_name
def test_the_run_is_the_studys_own_experiment(run: Path) -> None:
    wanted, found = load_experiment(study_of(run) / f"{run.name}.toml"), load_experiment(run / "resolved.toml")
    assert (found.arms, found.protection, found.protocol) == (wanted.arms, wanted.protection, wanted.protocol)
    assert found.experiment == wanted.experiment
    names = [(w.name, w.length, w.questions, w.params) for w in wanted.workload]
    assert [(w.name, w.length, w.questions, w.params) for w in found.workload] == names


def rows_under(page: Path, head: str) -> list[tuple[str, ...]]:
    """Cells of the rows of every table of a page whose heading begins so."""
    lines = page.read_text(encoding="utf-8").splitlines()
    tables = [lines[at + 2 :] for at, line in enumerate(lines) if line.startswith(head)]
    rows = [row for table in tables for row in itertools.takewhile(lambda line: line.startswith("|"), table)]
    return [tuple(cell.strip().strip("`*") for cell in row.strip("|").split(" | ")) for row in rows]


@pytest.mark.parametrize("page", [ROOT / "README.md", *(study / "README.md" for study in STUDIES)], ids=str)
def test_every_verdict_on_a_page_is_a_published_one(page: Path) -> None:
    tables = [worst_cases(judged) for run in RESULTS if (judged := load_judgement(run)) is not None]
    published = {line.cells for table in tables if table is not None for line in table.lines}
    rows = rows_under(page, "| arm | verdict |")
    assert rows and set(rows) <= published


SHOWN = {"read": "read_bytes_growing", "held": "retained_bytes_scope"}
"""What a page's table of means gives beside top-1, by its heading, in per cent of dense's."""


def promoting_sets(results: Results) -> list[SetResult]:
    """Trace sets whose workload may promote."""
    promoting = load_gate(results.path / "gate.toml").roles.promote
    return [one for one in results.sets if one.workload in promoting]


def mean_row(results: Results, arm: str, amount: str) -> tuple[str, ...]:
    """Per model, over the workloads that promote: mean top-1, and an amount in per cent of dense's in those layers."""
    found: list[str] = []
    for model in dict.fromkeys(one.model for one in results.sets):
        sets = [one for one in promoting_sets(results) if one.model == model]
        mine, dense = ([cell for one in sets if (cell := one.cell(name))] for name in (arm, "dense"))
        outside = [cell.amounts["retained_bytes"] - cell.amounts["retained_bytes_scope"] for cell in mine]
        there, everything = (sum(cell.amounts[amount] for cell in cells) for cells in (mine, dense))
        if amount == "retained_bytes_scope":  # outside its scope an arm holds what dense holds
            everything = sum(cell.amounts["retained_bytes"] for cell in dense) - sum(outside)
        found += [f"{mean(cell.quality['top1'].mean for cell in mine):.2f}", f"{100 * there / everything:.0f} %"]
    return tuple(found)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
@pytest.mark.parametrize("head", list(SHOWN))
def test_means_on_a_page_are_those_of_the_published_cells(study: Path, head: str) -> None:
    rows = rows_under(study / "README.md", f"| arm | SmolLM2 | {head} |")
    runs = [Results.open(run) for run in RESULTS if study_of(run) == study]
    runs = [run for run in runs if promoting_sets(run)]
    published = {(arm, *mean_row(run, arm, SHOWN[head])) for run in runs for arm in run.arms if run.sets[0].cell(arm)}
    assert rows and set(rows) <= published


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_likelihoods_on_a_page_are_those_of_the_published_cells(study: Path) -> None:
    results = Results.open(study / "results" / "locks")
    lines = (study / "README.md").read_text(encoding="utf-8").splitlines()
    (head,) = [line for line in lines if line.startswith("| NLL less dense's |")]
    arms = [cell.strip(" `") for cell in head.strip("|").split("|")[1:]]
    wanted = []
    for one in promoting_sets(results):
        estimates = [cell.difference["nll"] for arm in arms if (cell := one.cell(arm))]
        shown = [f"{off.mean:+.3f} ({off.low:+.3f} to {off.high:+.3f})" for off in estimates]
        wanted.append((f"{one.model}, {one.workload}", *shown))
    assert rows_under(study / "README.md", head) == wanted


def generated_row(results: Results, arm: str) -> tuple[str, ...]:
    """Per model: top-1, NLL less dense's with its interval, and blocks that compaction frees of dense's."""
    found: list[str] = []
    for one in results.sets:
        cell = one.cell(arm)
        assert cell is not None
        off = cell.difference.get("nll")
        shown = "-" if off is None or off.low is None else f"{off.mean:+.2f} ({off.low:+.2f} to {off.high:+.2f})"
        freed = cell.blocks_freed["compaction"] / cell.amounts["blocks_total"]
        found += [f"{cell.quality['top1'].mean:.2f}", shown, f"{100 * freed:.0f} %"]
    return tuple(found)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_what_was_made_of_generated_text_is_what_the_cells_say(study: Path) -> None:
    results = Results.open(study / "results" / "reasoning")
    rows = rows_under(study / "README.md", "| arm | SmolLM2 top-1 |")
    assert {row[0] for row in rows} == set(results.arms)
    assert set(rows) == {(arm, *generated_row(results, arm)) for arm in results.arms}


def far_row(study: Path, arm: str, places: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Per model and length, in per cent of dense's: held, read, and blocks freed by a table of its own or per head."""
    rows, _ = read_long(study / "results" / "long")
    found: list[float] = []
    for place in places:
        (one,) = [row for row in rows if (row.row, row.tokens) == place and row.arm == arm]
        freed = (one.blocks_freed_layer / one.blocks_total, one.blocks_freed_head / one.blocks_total)
        found += [one.retained_fraction, one.read_fraction, *freed]
    return tuple(f"{100 * value:.0f} %" for value in found)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_long_rows_on_a_page_are_the_published_ones(study: Path) -> None:
    rows = rows_under(study / "README.md", "| arm | 1M: held |")
    places = [("granite-4.1-8b", 1 << 20), ("step-3.7-flash", 1 << 18)]
    assert {row[0] for row in rows} == {row.arm for row in read_long(study / "results" / "long")[0]}
    assert set(rows) == {(row[0], *far_row(study, row[0], places)) for row in rows}


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_long_rows_are_the_studys_own(study: Path) -> None:
    wanted, found = (
        load_experiment(at / name) for at, name in ((study, "long.toml"), (study / "results" / "long", "resolved.toml"))
    )
    assert (found.long, found.arms, found.protection) == (wanted.long, wanted.arms, wanted.protection)


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_answers_written_on_a_page_are_the_published_ones(study: Path) -> None:
    results = Results.open(study / "results" / "free")
    rows = rows_under(study / "README.md", "| arm | SmolLM2 kv_short |")
    assert {row[0] for row in rows} <= set(results.arms)
    for row in rows:
        cells = [one.cell(row[0]) for one in results.sets]
        assert row[1:] == tuple(f"{cell.quality['task'].mean:.2f}" for cell in cells if cell)


def served_row(file: Path, arm: str) -> tuple[str, ...]:
    """Requests in time, share of right answers, right ones in time per second, median seconds to the first token and
    milliseconds per later one, prefix hits."""
    (one,) = [row for row in json.loads(file.read_text(encoding="utf-8"))["results"] if row["arm"] == arm]
    right = ["-" if one[key] is None else f"{one[key]:.2f}" for key in ("correct", "goodput")]
    times = one["ttft"]["p50"], 1000 * one["tpot"]["p50"]
    return f"{one['in_time']:,}", *right, *(f"{value:.0f}" for value in times), f"{100 * one['hit_rate']:.1f} %"


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_what_was_served_is_what_the_page_says(study: Path) -> None:
    files = [study / "results" / "serving" / f"{mode}.json" for mode in ("whole_block", "compaction")]
    rows = rows_under(study / "README.md", "| arm | in time |")
    arms = [row["arm"] for row in json.loads(files[0].read_text(encoding="utf-8"))["results"]]
    assert [row[0] for row in rows] == arms
    assert rows == [(arm, *served_row(files[0], arm), served_row(files[1], arm)[0]) for arm in arms]


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.name)
def test_every_trace_set_has_a_recipe(study: Path) -> None:
    gate = load_gate(study / "gate.toml")
    wanted = {
        (model, one.name)
        for file in study.glob("*.toml")
        if file.name != "gate.toml"
        for experiment in [load_experiment(file)]
        for model in experiment.experiment.models
        for one in experiment.workload
    }
    headers = [load_recipe(file)[0] for file in sorted((study / "recipes").glob("*.json"))]
    assert {(header.model.name, header.recipe.name) for header in headers} == wanted
    assert {header.recipe.seed for header in headers} == {101}
    assert {name for _, name in wanted} == set(gate.workloads)
