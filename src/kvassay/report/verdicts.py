"""The verdicts of a run as a table, which every report shows first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvassay.experiment.folder import CELLS
from kvassay.measure.verdict import OUTCOME_TEXT, Judgement, load_judgement
from kvassay.report.worst import NOTE, worst_cases

STYLES = {"promote": "bold green", "hold": "yellow", "reject": "red", "suspect": "magenta", "invalid": "bold magenta"}


def verdict_table(run: Path) -> RenderableType | None:
    """The verdicts of a run folder, what they mean and what to hold against them; None if it was never judged.

    Raises `GateError` for a damaged file.
    """
    judgement = load_judgement(run)
    return None if judgement is None else Group(*_lines(judgement, run))


def stale(judgement: Judgement, run: Path) -> bool:
    """Whether the cells are others than those that were judged."""
    cells = run / CELLS
    return not cells.is_file() or hashlib.sha256(cells.read_bytes()).hexdigest() != judgement.cells_sha256


def cautions(judgement: Judgement, run: Path) -> list[str]:
    """What to hold against the verdicts, before anything else is said."""
    lines = [judgement.warning] if judgement.warning else []
    if stale(judgement, run):
        lines.append("these verdicts are about earlier cells; `kvassay gate RUN` judges the present ones")
    return lines


def gate_line(judgement: Judgement) -> str:
    """By which gate, and whether it was declared."""
    declared = f"declared {judgement.declared}" if judgement.declared else "never declared"
    return f"Gate {judgement.gate} ({declared}, sha256 {judgement.gate_sha256[:12]})"


def _lines(judgement: Judgement, run: Path) -> Iterator[RenderableType]:
    for line in cautions(judgement, run):
        yield Text(f"! {line}", style="bold yellow")
    yield Text(gate_line(judgement), style="bold")
    yield _table(judgement)
    yield from _worst(judgement)
    for outcome in judgement.count():
        yield Text(f"{outcome}: {OUTCOME_TEXT[outcome]}", style="dim")
    if judgement.excluded:
        yield Text(f"no verdict: {', '.join(judgement.excluded)}", style="dim")
    for note in judgement.notes:
        yield Text(f"note: {note}", style="dim")


def _worst(judgement: Judgement) -> Iterator[RenderableType]:
    """The worst case of each threshold."""
    found = worst_cases(judgement)
    if found is not None:
        yield Text(f"\n{found.title}: {NOTE}", style="bold")
        table = Table(*(head.name for head in found.heads), box=None, padding=(0, 2, 0, 0))
        for line in found.lines:
            table.add_row(*(Text(cell) for cell in line.cells))
        yield table


def _table(judgement: Judgement) -> Table:
    table = Table("arm", "verdict", "reason", "scope", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for verdict in judgement.overall:
        name = verdict.arm + (" (approximates)" if verdict.approximate else "")
        outcome = Text(verdict.outcome, STYLES[verdict.outcome])
        if verdict.exploratory:
            outcome.append(" (exploratory)", "yellow")
        table.add_row(Text(name), outcome, Text(verdict.reason), Text(verdict.scope, "dim"))  # never as markup
    return table
