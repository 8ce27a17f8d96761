"""Speculative acceptance in a small table per trace set: what each arm drafts, and what it accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvassay.experiment.results import Results
from kvassay.measure.acceptance import AcceptanceResult, Counters, Mode, pooled
from kvassay.measure.acceptance_cards import ACCEPTANCE_CARDS
from kvassay.report import words

LENGTHS = (1, 2, 4)
"""Draft tokens per round for which the length accepted is shown, beside the run's own."""
MODES = {
    "teacher-forced": "a draft from each recorded position, the same positions for all arms; only these compare arms",
    "free-running": "speculative decoding from the question on; what is accepted stays, so arms differ in positions",
}


@dataclass(frozen=True)
class Column:
    """One column: two header lines, and what it shows of an arm's pooled rows by (mode, k)."""

    head: str
    under: str
    show: Callable[[Mapping[tuple[Mode, int], Counters]], float | None]
    digits: int = 2


@dataclass(frozen=True)
class AcceptanceTable:
    """All trace sets of a run; nothing if acceptance was not measured."""

    results: Results

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render."""
        if not self.results.speculation:
            return
        yield Text()
        yield Text("Speculative acceptance (measured, greedy verification)", style="bold")
        yield _cards()
        for title, rows in sets_of(self.results):
            yield Text()
            yield Text(title, style="bold")
            yield _table(rows)


def sets_of(results: Results) -> Iterator[tuple[str, list[AcceptanceResult]]]:
    """Rows of each trace set."""
    sets = {unit["trace"]: (unit["model"], unit["trace_set"]) for unit in results.manifest["units"]}
    for model, label in dict.fromkeys(sets.values()):
        yield f"{model}  {label}", [row for row in results.speculation if sets.get(row.trace) == (model, label)]


def _cards() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim")
    for mode, text in MODES.items():
        table.add_row(mode, text)
    for card in ACCEPTANCE_CARDS.values():
        table.add_row(card.title, f"{card.formula} [{card.unit}]; {card.better} is better")
    table.add_row("drafter", "compressed: the arm's cache drafts and dense verifies; any other: the arm verifies")
    return table


def _table(rows: Sequence[AcceptanceResult]) -> Table:
    columns = columns_of(rows)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("arm", "drafter"):
        table.add_column(f"\n{name}", overflow="fold")
    for column in columns:
        table.add_column(f"{column.head}\n{column.under}", justify="right", no_wrap=True)
    for line in lines_of(rows):
        table.add_row(*line)
    return table


def lines_of(rows: Sequence[AcceptanceResult]) -> Iterator[list[str]]:
    """Arm, drafter and the columns' values, one line per arm and drafter of a trace set."""
    columns = columns_of(rows)
    for drafter, arm in dict.fromkeys((row.drafter, row.arm) for row in rows):
        mine = [row for row in rows if (row.drafter, row.arm) == (drafter, arm)]
        found = {
            (mode, k): pooled([row for row in mine if (row.mode, row.k) == (mode, k)])
            for mode, k in dict.fromkeys((row.mode, row.k) for row in mine)
        }
        yield [arm, drafter, *(words.number(column.show(found), column.digits) for column in columns)]


def columns_of(rows: Sequence[AcceptanceResult]) -> tuple[Column, ...]:
    """The columns after arm and drafter: how many draft lengths there are decides."""
    most = max(row.k for row in rows)

    def forced(get: Callable[[Counters], float | None], k: int = most) -> Callable[..., float | None]:
        return lambda found: get(found["teacher_forced", k])

    def free(get: Callable[[Counters], float | None]) -> Callable[..., float | None]:
        return lambda found: get(found["free_running", most])

    lengths = [k for k in dict.fromkeys((*LENGTHS, most)) if k <= most]
    heads = ["teacher-forced"] + [""] * (len(lengths) + 2)
    columns = [
        ("first token", forced(lambda c: c.greedy_acceptance)),
        ("expected", forced(lambda c: c.expected_acceptance)),
        ("rate", forced(lambda c: c.acceptance_rate)),
        *((f"accepted k={k}", forced(lambda c: c.accepted_length, k)) for k in lengths),
    ]
    return (
        *(Column(head, under, show) for head, (under, show) in zip(heads, columns, strict=True)),
        Column("free-running", "rate", free(lambda c: c.acceptance_rate)),
        Column("", "accepted", free(lambda c: c.accepted_length)),
        Column("", "emitted", free(lambda c: c.emitted_length)),
    )
