"""What policies report: averaged per arm, beside the twin, in the terminal and in both forms of the report."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from kvassay.experiment.folder import SAMPLES
from kvassay.experiment.results import Results
from kvassay.experiment.rows import write_samples
from kvassay.report.facts import FactsTable, fact_grids
from kvassay.report.html import render
from kvassay.report.page import page
from tests.runs import make_run, rows

FP8, KIVI = "fp8", "kivi"


def with_facts(folder: Path) -> Results:
    """The made-up run, in which fp8 routes a quarter and a half of its tokens by turns and kivi keeps 12 tokens."""
    results = make_run(folder)
    labels = {"model": results.sets[0].model, "trace_set": results.sets[0].label}
    found = rows()
    for number, row in enumerate(found):
        if row.arm == FP8:
            facts = {"routed_share": 0.25 if row.branch else 0.5, "mine": 1.0}
            found[number] = type(row)(**{**vars(row), "facts": json.dumps(facts)})
        if row.arm == KIVI:
            found[number] = type(row)(**{**vars(row), "facts": json.dumps({"keep_tokens": 12.0})})
    write_samples([(labels, found)], folder / SAMPLES)
    return Results.open(folder)


def test_means_by_arm_and_dashes_where_nothing_is_said(tmp_path: Path) -> None:
    (grid,) = fact_grids(with_facts(tmp_path))
    assert [head.name for head in grid.heads] == ["arm", "routed_share", "mine", "keep_tokens", "top-1", "KL"]
    assert [line.cells[:4] for line in grid.lines] == [(FP8, "0.3750", "1.0000", "-"), (KIVI, "-", "-", "12.0000")]
    assert "evicted tokens that find a kept one" in grid.heads[1].card and grid.heads[2].card == ""


def test_they_are_shown_everywhere_and_nowhere_without_any(tmp_path: Path) -> None:
    results = with_facts(tmp_path / "with")
    stream = StringIO()
    Console(file=stream, width=140).print(FactsTable(results))
    assert "routed_share" in stream.getvalue() and "0.3750" in stream.getvalue()
    assert "0.3750" in render(results, page(results))
    bare = make_run(tmp_path / "bare")
    stream = StringIO()
    Console(file=stream, width=140).print(FactsTable(bare))
    assert stream.getvalue().strip() == "" and page(bare)["facts"] == []


def test_a_twin_stands_beside_its_method(tmp_path: Path) -> None:
    from kvassay.report.facts import _method

    arms = ["selkv(alpha=0) keep=0.25", "kivi", "selkv~merge-off(alpha=0) keep=0.25"]
    assert [_method(arm) for arm in arms] == [arms[0], arms[1], arms[0]]
