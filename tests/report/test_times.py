"""Measured decode times in the table: only where there are any, as fractions of dense."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from kvassay.experiment.folder import LATENCY
from kvassay.experiment.records import write_records
from kvassay.experiment.results import Results
from kvassay.measure.latency import LatencyResult
from kvassay.report.table import ReportTable
from tests.runs import make_run


def timed(arm: str, attention: float, policy: float) -> LatencyResult:
    return LatencyResult(
        model="tiny-model",
        trace_set="kv_short 2k",
        arm=arm,
        context_tokens=2048,
        rounds=7,
        attention_seconds=attention,
        attention_low=0.9 * attention,
        attention_high=1.2 * attention,
        policy_seconds=policy,
        dense_seconds=0.02,
        read_bytes=1e6,
        flops=1e6,
        gigabytes_per_second=1.0,
        bandwidth_fraction=0.5,
        matrix_fraction=0.5,
        hardware="Some CPU, 2 threads",
    )


def shown(results: Results) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160, highlight=False).print(ReportTable(results, explained=True))
    return stream.getvalue()


def test_times_are_fractions_of_dense_with_and_without_the_policys_own_work(tmp_path: Path) -> None:
    without = shown(make_run(tmp_path))
    rows = [timed("dense", 0.02, 0.0), timed("kivi", 0.01, 0.005)]
    write_records(rows, LatencyResult, tmp_path / LATENCY)
    page = shown(Results.open(tmp_path))
    lines = {line.split()[0]: line.split()[-2:] for line in page.splitlines() if line.split()}
    assert lines["dense"] == ["100±20%", "~100%"] and lines["kivi"] == ["50±10%", "~75%"]
    assert lines["fp8"] == ["-", "-"]  # was not timed
    assert "time +policy" in page and "says nothing of a GPU" in page
    assert "time +policy" not in without and "says nothing of a GPU" not in without
