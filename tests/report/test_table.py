from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvassay.experiment.folder import CELLS, SAMPLES
from kvassay.experiment.listing import list_runs
from kvassay.experiment.results import Results
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.measure.aggregate import aggregate
from kvassay.measure.checks import Finding
from kvassay.measure.resample import Estimate
from kvassay.report import tables, words
from kvassay.report.html import render
from kvassay.report.points import axes, points
from kvassay.report.table import COLUMNS, ReportTable, console_for, runs_table
from tests.rows import SILENT, row
from tests.runs import make_run

EXPECTED = """\
tiny-model  kv_short 2k: 2 contexts of 2048 tokens, 4 questions; question not visible while compressing (query_aware =
false)
Exact attention over what is retained
                                top-1   NLL    KL task flips     held              freed             read
arm                         mean ±95%  nats  nats 0..1   -/+    bytes whole scope shared per-head  /token /dense
dense                            1.00 0.500 0.000 1.00   0/0 0.98 MiB  100%  100%  0/128        0 900 KiB   100%
dense'                           1.00 0.501 0.000 1.00   0/0 0.98 MiB  100%  100%  0/128        0 900 KiB   100%
hindsight† keep=0.25             1.00 0.500 0.010 1.00   0/0  250 KiB   25%   12%  0/128        0 225 KiB    25%
snapkv(window=16) keep=0.25      0.62 1.250 0.750 0.75   1/0  250 KiB   25%   12%  3/128       80 225 KiB    25%
Transforming: keys, values or logits are approximated
                               top-1   NLL    KL task flips     held              freed             read
arm                        mean ±95%  nats  nats 0..1   -/+    bytes whole scope shared per-head  /token /dense
fp8                             1.00 0.500 0.020 1.00   0/0  530 KiB   53%   26%  0/128        0 477 KiB    53%
kivi                            0.75 0.900 0.300 1.00   0/0  200 KiB   20%   10%  0/128        0 180 KiB    20%
freed blocks are net of those that encoded segments fill again

† reference: a yardstick that no engine could run, not a candidate
dense' is dense in another batch split: its distance from dense is the noise of the arithmetic
top-1: answer tokens ranked first / answer tokens; ± 95% interval over contexts, from five on
flips: questions lost/won against dense; held: bytes after the answer; read: bytes to decode one token
freed: blocks / dense's, with vLLM's shared block table and with a table per head
every column's meaning, and what policies report of themselves: kvassay show RUN --all
"""


def log(renderable: object, width: int | None = None) -> str:
    stream = io.StringIO()
    console = console_for(stream) if width is None else Console(file=stream, width=width)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def test_the_table_in_a_log_is_exactly_this(tmp_path: Path) -> None:
    text = log(ReportTable(make_run(tmp_path)))
    assert text.endswith(EXPECTED)
    assert "\x1b" not in text


def test_the_numbers_come_first_and_every_column_is_explained_below_on_demand(tmp_path: Path) -> None:
    head, _, below = log(ReportTable(make_run(tmp_path), explained=True)).partition("tiny-model")
    assert len(head.splitlines()) <= 6
    assert "first 4 and last 32 tokens" in head and "blocks of 16 tokens" in head
    table, _, legend = " ".join(below.split()).partition("† reference: a yardstick that no engine could run")
    assert "snapkv(window=16) keep=0.25" in table
    short = log(ReportTable(make_run(tmp_path)))
    for column in COLUMNS:
        assert column.card in legend and column.card not in " ".join(short.split())


def test_query_aware_is_shouted(tmp_path: Path) -> None:
    text = " ".join(log(ReportTable(make_run(tmp_path, query_aware=True))).split())
    assert "question VISIBLE while compressing (query_aware = true)" in text


def test_a_narrow_console_splits_the_table_and_loses_no_column(tmp_path: Path) -> None:
    text = log(ReportTable(make_run(tmp_path)), width=100)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "     0.62 1.250 0.750 0.75   1/0\n" in text
    assert "250 KiB   25%   12%  3/128       80 225 KiB    25%\n" in text


def test_weak_dense_and_missing_questions_are_said(tmp_path: Path) -> None:
    found = make_run(tmp_path).sets[0]
    assert words.warnings(found) == []
    floor = {"min_top1": 0.5, "max_nll": 0.4, "passed": False}
    assert words.warnings(replace(found, floor=floor, missing=("fp8: lacks 1",))) == [
        "left out of the averages: fp8: lacks 1",
        "below the dense floor: dense itself reaches top-1 1.000 and NLL 0.500 (floor: at least 0.5, at most 0.4); "
        "no arm can be judged here",
    ]


def test_state_beside_keys_and_values_is_said(tmp_path: Path) -> None:
    found = make_run(tmp_path).sets[0]
    state = {"index_bytes": 2048.0, "index_read_bytes": 1024.0, "pooled_bytes": 512.0}
    cells = tuple(replace(cell, amounts={**cell.amounts, **state}) for cell in found.cells)
    assert words.warnings(replace(found, cells=cells)) == [
        "of 0.98 MiB that dense holds, 2.00 KiB are index keys",
        "of 0.98 MiB that dense holds, 512 B are compressed entries",
        "of 900 KiB that it reads per token, 1.00 KiB are index keys",
    ]
    results = make_run(tmp_path / "again")
    for kept, shown in ((found.cells, 0), (cells, 3)):
        some = replace(found, cells=kept)
        grid = tables.set_grids(some, words.parts(some, results.arms)[0], results)[1]
        heads = [head.name for head in grid.heads if head.name.startswith(("index", "compressed"))]
        assert heads == ["index keys held", "index keys read", "compressed entries held"][:shown]
        assert list(grid.lines[0].cells[-3:]) == ["2.00 KiB", "1.00 KiB", "512 B"] or not shown


def test_findings_are_said_by_name_and_many_of_one_name_are_counted(tmp_path: Path) -> None:
    found = make_run(tmp_path).sets[0]
    many = [Finding("budget_base", "suspect", f"arm{n}", "holds 512") for n in range(6)]
    said = words.warnings(replace(found, findings=(Finding("bos", "invalid", None, "3 times 2"), *many)))
    assert said == [
        "invalid, bos: 3 times 2",
        *(f"suspect, budget_base: arm{n}: holds 512" for n in range(4)),
        "suspect, budget_base: and 2 more (see checks.json)",
    ]


def test_what_only_explains_a_table_stands_below_it(tmp_path: Path) -> None:
    results = make_run(tmp_path)
    findings = (Finding("bos", "suspect", None, "3 times 2"), Finding("no_effect", "note", None, "alike"))
    found = replace(results.sets[0], findings=findings, not_applicable={"kara keep=0.5": "nothing to do"})
    text = log(ReportTable(replace(results, sets=(found,))))
    before, _, after = text.partition("arm  ")
    assert "! suspect, bos: 3 times 2" in before and "alike" not in before
    assert "not applicable, kara keep=0.5: nothing to do\nnote, no_effect: alike\n" in after
    assert set(words.limits(found)) <= {*words.warnings(found), *words.remarks(found)}


def test_an_interval_is_shown_as_its_larger_half() -> None:
    assert words.spread(Estimate(0.625, 0.5, 0.7, 40, 10)) == "0.62 ±0.12"
    assert words.spread(Estimate(0.625, None, None, 4, 2)) == "0.62"


def test_numbers_are_worded_once() -> None:
    assert [words.size(x) for x in (0, 999, 1000, 1024 * 999, 94.5 * 2**20, 1.5 * 2**30)] == [
        "0 B", "999 B", "0.98 KiB", "999 KiB", "94.5 MiB", "1.50 GiB",
    ]  # fmt: skip
    assert [words.percent(x) for x in (0.0, 0.051, 0.0995, 0.25, 1.0)] == ["0.0%", "5.1%", "10%", "25%", "100%"]
    assert [words.blocks(x) for x in (0.0, 12.0, 12.25, None)] == ["0", "12", "12.2", "-"]


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", finished=False)
    (tmp_path / "b" / "units").mkdir()
    (tmp_path / "b" / "units" / "0123.parquet").touch()
    (tmp_path / "b" / "units" / ".tmp-4567.parquet").touch()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text("{", encoding="utf-8")
    (tmp_path / "not-a-run").mkdir()
    lines = list_runs(tmp_path)
    assert [(line.path.name, line.state[:12]) for line in lines] == [
        ("b", "1 of 2 units"), ("a", "finished"), ("c", "damaged: " + str(tmp_path)[:3]),
    ]  # fmt: skip
    assert "tiny-model" in log(runs_table(lines))
    assert log(runs_table([])) == "no run folders here\n"


def test_what_was_never_generated_is_a_dash(tmp_path: Path) -> None:
    make_run(tmp_path)
    labels, said = {"model": "tiny-model", "trace_set": "kv_short 2k"}, [row("dense", **SILENT), row("fp8", **SILENT)]
    cells = aggregate(said).cells
    write_cells([(labels, cells)], tmp_path / CELLS)
    write_samples([(labels, said)], tmp_path / SAMPLES)
    results = Results.open(tmp_path)
    line = next(line for line in log(ReportTable(results)).splitlines() if line.startswith("fp8"))
    assert line.split()[1:6] == ["1.00", "0.500", "0.000", "-", "-"]
    assert tables._quality_cells(cells[1])[3:6] == ["-", "-", "-"]
    assert tables._quality_cells(cells[1])[-2:] == ["-", "-"]
    shown = points(results, axes(results))
    assert shown and all(point["metric"] != "task" for point in shown)
    assert "0/0" not in render(results), "no flips are counted, in the charts' page neither"
