"""Two runs side by side: what changed, what only one has, and which differences are more than chance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvassay.experiment.compare import Amount, Comparison, Contrast, PairedCell
from kvassay.measure.aggregate import DENSE
from kvassay.measure.metrics import CARDS
from kvassay.report import words

HASH_SHOWN = 12
SIZED = ("bytes", "bytes per token")
"""Units shown in KiB, MiB."""
MARKS = {True: "*", False: "", None: " "}


@dataclass(frozen=True)
class ComparisonTables:
    """All of a comparison; an identical cell takes one line."""

    found: Comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render."""
        found = self.found
        yield Text("Run B against run A; differences are B minus A", style="bold")
        yield Text(f"A  {found.a}\nB  {found.b}")
        for note in found.notes:
            yield Text(f"! {note}", style="yellow")
        yield from _changes("What differs in code, versions, machine and settings", found.changes, "nothing")
        if found.verdicts:
            yield from _changes("Verdicts that changed", found.verdicts, "none")
        if found.only:
            yield Text("\nOnly in one run", style="bold")
            yield from (Text(f"{one.run}  {one.kind} {one.name}") for one in found.only)
        yield from _cells(found)


def _changes(title: str, rows: Sequence[Any], empty: str) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    if not rows:
        yield Text(empty)
        return
    table = Table("", "A", "B", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(Text(row.what), Text(_plain(row.before)), Text(_plain(row.after)))
    yield table


def _plain(value: Any) -> str:
    """A setting on one line, a hash cut short."""
    text = "-" if value is None else str(value)
    return text[:HASH_SHOWN] if len(text) >= 32 and all(letter in "0123456789abcdef" for letter in text) else text


def _cells(found: Comparison) -> Iterator[RenderableType]:
    for model, label in dict.fromkeys((cell.model, cell.trace_set) for cell in found.cells):
        mine = [cell for cell in found.cells if (cell.model, cell.trace_set) == (model, label)]
        paired = [cell for cell in mine if cell.questions]
        yield Text.assemble("\n", (model, "bold"), "  ", label, "  ", _scope(mine))
        alike = [cell.arm for cell in paired if cell.identical]
        if alike:
            yield Text(f"identical to the last bit, wall times aside: {', '.join(alike)}")
        differing = [cell for cell in paired if not cell.identical]
        if differing:
            yield _quality(differing)
            yield _amounts(differing)
        if any(cell.times for cell in paired):
            yield _times([cell for cell in paired if cell.times])
            yield from _moved(paired)
    yield Text()
    yield Text(_legend(found), style="dim")


def _scope(cells: Sequence[PairedCell]) -> str:
    """Questions in common, and those left out."""
    counts = sorted({(cell.questions, cell.contexts) for cell in cells})
    shared = " or ".join(f"{questions} questions on {contexts} contexts" for questions, contexts in counts)
    only = (max(cell.unpaired[0] for cell in cells), max(cell.unpaired[1] for cell in cells))
    left = f"; only in A: {only[0]}, only in B: {only[1]} (left out)" if any(only) else ""
    return f"{shared} in both{left}"


def _quality(cells: Sequence[PairedCell]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("arm", "metric", "A", "B", "B - A [95%]", "p", "Holm p", "", "flips -/+"):
        table.add_column(head, justify="left" if head in ("arm", "metric") else "right", overflow="fold")
    for cell in cells:
        for at, contrast in enumerate(cell.contrasts):
            style = "bold" if contrast.significant else ""
            table.add_row(Text(cell.arm if at == 0 else ""), *_contrast(cell, contrast), style=style)
    return table


def _contrast(cell: PairedCell, one: Contrast) -> tuple[str, ...]:
    flipped = cell.flips.get(one.metric)
    return (
        CARDS[one.metric].title,
        words.number(one.before),
        words.number(one.after),
        words.interval(one.difference),
        _chance(one.p_value),
        _chance(one.adjusted),
        MARKS[one.significant],
        "-" if flipped is None else f"{flipped.right_to_wrong}/{flipped.wrong_to_right}",
    )


def _chance(p: float | None) -> str:
    return "<0.001" if p is not None and p < 0.001 else words.number(p)


def _amounts(cells: Sequence[PairedCell]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("arm", "amount", "A", "B", "B / A"):
        table.add_column(head, justify="left" if head in ("arm", "amount") else "right", overflow="fold")
    for cell in cells:
        changed = [amount for amount in cell.amounts if amount.before != amount.after]
        for at, amount in enumerate(changed):
            table.add_row(Text(cell.arm if at == 0 else ""), *_amount(amount))
    return table if table.row_count else Text("bytes, traffic and freed blocks: the same")


def _amount(amount: Amount) -> tuple[str, ...]:
    show = words.size if amount.unit in SIZED else words.number
    named = amount.name.replace("_", " ") + ("" if amount.unit in SIZED else f" ({amount.unit})")
    return named, show(amount.before), show(amount.after), _ratio(amount)


def _ratio(amount: Amount) -> str:
    if amount.before == 0 or not math.isfinite(amount.after / amount.before):
        return "-"
    return f"{amount.after / amount.before:.3f}"


def _times(cells: Sequence[PairedCell]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("arm", "attention A", "B", "B / A", "quartiles", "of dense A", "B", "policy A", "B"):
        table.add_column(head, justify="left" if head == "arm" else "right", overflow="fold")
    for cell in cells:
        times = {amount.name: amount for amount in cell.times}
        attention, fraction, policy = times["attention_seconds"], times["fraction"], times["policy_seconds"]
        table.add_row(
            Text(cell.arm),
            _milliseconds(attention.before),
            _milliseconds(attention.after),
            _ratio(attention),
            "apart" if cell.times_apart else "overlap",
            words.percent(fraction.before),
            words.percent(fraction.after),
            _milliseconds(policy.before),
            _milliseconds(policy.after),
        )
    return table


def _moved(cells: Sequence[PairedCell]) -> Iterator[Text]:
    """A warning where dense itself took another time: then the machine or its load has changed, not the arm."""
    dense = next((cell for cell in cells if cell.arm == DENSE and cell.times), None)
    if dense is not None and dense.times_apart:
        line = f"! dense itself took {_ratio(dense.times[0])} of A's time in B: compare the shares of dense alone"
        yield Text(line, style="yellow")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _legend(found: Comparison) -> str:
    return (
        f"* significant: Holm's p below {found.alpha:g} over all {found.comparisons} tests of this comparison; p is "
        "two-sided, on differences paired by question and clustered by context; the interval is not corrected. "
        "No significance is no evidence that nothing changed. flips: A's right answers lost / gained in B. "
        "Bytes, traffic and blocks are counted, not sampled. Times are medians on each run's own machine: compare "
        "them only if the machines are the same and were idle."
    )
