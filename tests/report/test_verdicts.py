"""The verdict table on a hand-made judgement."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvassay.experiment.folder import CELLS
from kvassay.measure.verdict import VERDICTS, Judgement, Verdict, dump_judgement
from kvassay.report.verdicts import verdict_table

GOOD = Verdict("", "", "good keep=0.25", "promote", "modelled latency, not calibrated", "tiny; copy", False)
BAD = Verdict("", "", "bad[bold] keep=0.5", "reject", "[red]lost[/red] it all", "tiny; copy", False, approximate=True)
PART = replace(GOOD, trace_set="copy 2k", workload="copy", reason="only here")
JUDGEMENT = Judgement(
    gate="mine",
    gate_sha256="abcdef0123456789",
    declared="2026-01-01T00:00:00+00:00",
    judged="2026-01-02T00:00:00+00:00",
    exploratory=False,
    warning="",
    cells_sha256=hashlib.sha256(b"cells").hexdigest(),
    verdicts=(GOOD, BAD, PART),
    excluded={"dense": "dense"},
    notes=("3 arms",),
)


def shown(folder: Path, judgement: Judgement) -> list[str]:
    (folder / CELLS).write_bytes(b"cells")
    (folder / VERDICTS).write_text(dump_judgement(judgement), encoding="utf-8")
    stream = io.StringIO()
    Console(file=stream, width=200).print(verdict_table(folder))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_one_line_per_arm_nothing_taken_for_markup(tmp_path: Path) -> None:
    lines = shown(tmp_path, JUDGEMENT)
    assert lines[0] == "Gate mine (declared 2026-01-01T00:00:00+00:00, sha256 abcdef012345)"
    assert [" ".join(line.split()) for line in lines[2:4]] == [
        "good keep=0.25 promote modelled latency, not calibrated tiny; copy",
        "bad[bold] keep=0.5 (approximates) reject [red]lost[/red] it all tiny; copy",
    ]
    assert lines[4].startswith("promote: passes every threshold") and lines[5].startswith("reject: fails a threshold")
    assert lines[6:] == ["no verdict: dense", "note: 3 arms"]


def test_an_exploratory_judgement_says_so_first_and_in_every_line(tmp_path: Path) -> None:
    verdicts = tuple(replace(verdict, exploratory=True) for verdict in JUDGEMENT.verdicts)
    lines = shown(
        tmp_path, replace(JUDGEMENT, exploratory=True, warning="EXPLORATORY: why", verdicts=verdicts, declared=None)
    )
    assert lines[:2] == ["! EXPLORATORY: why", "Gate mine (never declared, sha256 abcdef012345)"]
    assert all("(exploratory)" in line for line in lines[3:5])


def test_other_cells_than_the_judged_ones_are_said(tmp_path: Path) -> None:
    assert "earlier cells" not in shown(tmp_path, JUDGEMENT)[0]
    assert shown(tmp_path, replace(JUDGEMENT, cells_sha256="0" * 64))[0].startswith(
        "! these verdicts are about earlier"
    )


def test_a_run_that_was_never_judged_has_no_table(tmp_path: Path) -> None:
    assert verdict_table(tmp_path) is None
