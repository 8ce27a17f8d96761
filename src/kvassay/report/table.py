"""The table a run ends with: quality, bytes, blocks and traffic of every arm; what each column means stands below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.listing import RunLine
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.aggregate import DENSE, Cell
from kvassay.measure.latency import LatencyResult
from kvassay.report import words

LOG_WIDTH = 120
"""Columns in a log, which has no width of its own."""
IN_SHORT = (
    "top-1: answer tokens ranked first / answer tokens; ± 95% interval over contexts, from five on",
    "flips: questions lost/won against dense; held: bytes after the answer; read: bytes to decode one token",
    "freed: blocks / dense's, with vLLM's shared block table and with a table per head",
)
TIMES_IN_SHORT = "time: of dense's attention, on this CPU; ± to the farther quartile of the rounds; ~ timed in one pass"
ON_DEMAND = "every column's meaning, and what policies report of themselves: kvassay show RUN --all"
ARM_WIDTH = 26
"""Longer arm names are folded where the table would not fit."""


@dataclass(frozen=True)
class Column:
    """One column: two header lines, what it shows, and its card in words."""

    head: str
    under: str
    show: Callable[[Cell], str]
    card: str


COLUMNS = (
    Column(
        "top-1",
        "mean ±95%",
        lambda cell: words.spread(cell.quality["top1"]),
        "scored answer tokens the arm ranks first / scored answer tokens, teacher-forced; higher is better; "
        "± is the larger half of the 95% bootstrap interval, clustered by context",
    ),
    Column(
        "NLL",
        "nats",
        lambda cell: words.number(cell.quality["nll"].mean),
        "-log p per scored answer token, teacher-forced; lower is better",
    ),
    Column(
        "KL",
        "nats",
        lambda cell: words.number(cell.quality["kl"].mean),
        "KL(dense || arm) per scored answer token; lower is better, dense is 0",
    ),
    Column(
        "task",
        "0..1",
        lambda cell: words.average(cell, "task", 2),
        "the workload's score of the arm's own greedy text, free-running; higher is better",
    ),
    Column(
        "flips",
        "-/+",
        words.flipped,
        "questions lost/won: whose task dense solves and the arm does not, and the other way round",
    ),
    Column(
        "held",
        "bytes",
        lambda cell: words.size(cell.amounts["retained_bytes"]),
        "cache bytes of the whole model after the answer, metadata, padding and policy state included; lower is better",
    ),
    Column(
        "",
        "whole",
        lambda cell: words.percent(cell.amounts["retained_fraction"]),
        "held / dense's at the same moment, whole model",
    ),
    Column(
        "",
        "scope",
        lambda cell: words.percent(cell.amounts["retained_fraction_scope"]),
        "the same over the layers the policy may act on (window-bounded layers left out)",
    ),
    Column(
        "freed",
        "shared",
        lambda cell: words.freed(cell, words.WHOLE),
        "blocks really freed / dense's blocks under vLLM's shared block tables: a block goes only if every head of "
        "every layer of its group drops it; of the context, or after the answer if the arm goes on while decoding; "
        "higher is better",
    ),
    Column(
        "",
        "per-head",
        lambda cell: words.blocks(cell.blocks_freed.get(words.PER_HEAD)),
        "the same if every layer and KV head had a block table of its own, as papers count (in shared blocks)",
    ),
    Column(
        "read",
        "/token",
        lambda cell: words.size(cell.amounts["read_bytes"]),
        "KV bytes read to decode one answer token: K, V, side data, metadata, scoring scan; lower is better",
    ),
    Column(
        "", "/dense", lambda cell: words.percent(cell.amounts["read_fraction"]), "read / dense's for the same token"
    ),
)
QUALITY_COLUMNS = 5
"""How many of them are about quality; the rest is about cost."""


def time_columns(times: Mapping[str, LatencyResult]) -> tuple[Column, ...]:
    """Columns for measured decode times, by arm; none if nothing was timed."""
    if not times:
        return ()

    def shown(value: Callable[[LatencyResult], str]) -> Callable[[Cell], str]:
        return lambda cell: value(times[cell.arm]) if cell.arm in times else "-"

    rounds = ", ".join(sorted({str(row.rounds) for row in times.values()}))
    return (
        Column(
            "time",
            "attn ±q",
            shown(lambda row: f"{100 * row.fraction:.0f}±{100 * _farther_quartile(row):.0f}%"),
            "attention of one decoded token, all layers, measured on this CPU with the same in-place kernel for every "
            f"arm / dense's in the same rounds; median of {rounds} rounds, ± the farther quartile; lower is better; "
            "says nothing of a GPU",
        ),
        Column(
            "",
            "+policy",
            shown(lambda row: f"~{words.percent(row.total_fraction)}"),
            "the same with the policy's own work per token (scan, summaries, deciding, encoding) as implemented here; "
            "that was timed in one pass (~): no spread is known",
        ),
    )


def _farther_quartile(row: LatencyResult) -> float:
    """Distance of the median to the farther quartile, as a part of dense's time."""
    above, below = row.attention_high - row.attention_seconds, row.attention_seconds - row.attention_low
    return max(above, below) / row.dense_seconds


def console_for(stream: TextIO | None = None) -> Console:
    """A console that is wide enough in a log and as wide as the window in a terminal."""
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=LOG_WIDTH)
    return console


@dataclass(frozen=True)
class ReportTable:
    """All tables of a run, and what marks and columns mean below; a table too wide for the console is split in two."""

    results: Results
    explained: bool = False
    """Give every column's meaning, not only where it is found."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the console's width."""
        manifest, arms = self.results.manifest, self.results.arms
        yield Text(f"{manifest['name']}: {len(arms)} arms", style="bold")
        yield Text(words.common(self.results))
        yield Text(f"Measured on {words.machine_line(manifest)}")
        for model, sets in words.models(self.results):
            for found in sets:
                yield Text()
                yield Text.assemble((model, "bold"), "  ", words.caption(found))
                for line in words.warnings(found):
                    yield Text(f"! {line}", style="yellow")
                yield from _tables(found, arms, columns_of(self.results, found), options.max_width)
                for line in words.remarks(found):
                    yield Text(line, style="dim")
        yield Text()
        for line in words.legend(arms):
            yield Text(line, style="dim")
        if self.explained:
            yield _cards(columns_of(self.results))
        else:
            for line in (*IN_SHORT, *([TIMES_IN_SHORT] if self.results.latency else []), ON_DEMAND):
                yield Text(line, style="dim")


def columns_of(results: Results, found: SetResult | None = None) -> tuple[Column, ...]:
    """The columns of a run's tables, or of one of them; with times where there are any."""
    rows = [row for row in results.latency if found is None or (row.model, row.trace_set) == (found.model, found.label)]
    return (*COLUMNS, *time_columns({row.arm: row for row in rows}))


def _cards(columns: Sequence[Column]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim")
    head = ""
    for column in columns:
        head = column.head or head
        name = column.head or f"{head} {column.under}"
        table.add_row(name, column.card + (" [nats per token]" if column.under == "nats" else ""))
    return table


def _tables(
    found: SetResult, arms: Mapping[str, ArmInfo], columns: Sequence[Column], width: int
) -> Iterator[RenderableType]:
    divided = words.parts(found, arms)
    names = {cell.arm: words.arm_name(cell, arms) for part in divided for cell in part.cells}
    widest = min(max(len(name) for name in names.values()), ARM_WIDTH)
    widths = [
        max(len(column.under), len(column.head), *(len(column.show(cell)) for cell in found.cells))
        for column in columns
    ]
    fits = widest + sum(widths) + len(widths) + 1 <= width
    for part in divided:
        for first, last in ((0, len(columns)),) if fits else ((0, QUALITY_COLUMNS), (QUALITY_COLUMNS, len(columns))):
            table = Table(title=part.title, title_justify="left", title_style="italic", box=None, padding=(0, 1, 0, 0))
            table.add_column("arm", min_width=widest, overflow="fold")
            shown = columns[first:last]
            for column, least in zip(shown, widths[first:last], strict=True):
                table.add_column(f"{column.head}\n{column.under}", justify="right", min_width=least, no_wrap=True)
            for cell in part.cells:
                values = [column.show(cell) for column in shown]
                table.add_row(names[cell.arm], *values, style=_style(arms[cell.arm]))
            yield table
        if part.note:
            yield Text(part.note, style="dim")


def _style(info: ArmInfo) -> str:
    if info.label == DENSE:
        return "bold"
    if info.reference:
        return "dim"
    return "" if info.always_on else "cyan"


def runs_table(runs: Sequence[RunLine]) -> RenderableType:
    """Run folders, one line each."""
    if not runs:
        return Text("no run folders here")
    table = Table("run", "state", "models", "arms", "started (UTC)", box=None, padding=(0, 2, 0, 0))
    for line in runs:
        table.add_row(str(line.path), line.state, line.models, str(line.arms), line.started.removesuffix("+00:00"))
    return table
