"""Long rows as a table: per row and length the arms' means over the layers replayed, and what they do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvassay.experiment.long import plan_long, read_long, run_long
from kvassay.experiment.progress import listening
from kvassay.experiment.schema import Experiment
from kvassay.experiment.tokens import show_tokens
from kvassay.measure.long import LongRow

MIB, GIB = 2**20, 2**30
NOTES = (
    "held: K, V, codes, metadata, side data of one layer whose state grows, and the part of dense's",
    "freed: part of that layer's blocks that a table of its own, or one per KV head, gives back; vLLM's shared table "
    "gives at most the former",
    "read: KV bytes of one query, scan included, and the part of dense's; context: the policy's own wall seconds on "
    "the context, query: on one query, on this CPU",
)
UNJUDGED = (
    "synthetic rows of this shape were not found to order policies as recorded ones do: bytes, traffic and time only"
)


def run_long_and_report(experiment: Experiment, source: str, base: Path, folder: Path, console: Console) -> None:
    """Compute what is left of an experiment's long rows in a run folder and print their tables."""
    plan = plan_long(experiment, source, base)
    says = Console(stderr=True, highlight=False)
    says.print(f"{len(plan.arms)} arms x {len(plan.units)} layers of long rows into {folder}", markup=False)
    with listening(says, len(plan.units)) as listener:
        run_long(plan, folder, listener)
    console.print(long_tables(*read_long(folder)))


def long_tables(rows: Sequence[LongRow], refused: Mapping[str, str]) -> Group:
    """One table per row and length; `refused` are arms that were left out, with reasons."""
    keys = dict.fromkeys((row.row, row.tokens) for row in rows)
    tables = [_table([row for row in rows if (row.row, row.tokens) == key]) for key in keys]
    notes = [*NOTES] if rows else []
    if any(not row.judges for row in rows):
        notes.append(UNJUDGED)
    notes += [f"not replayed: {arm}: {why}" for arm, why in refused.items()]
    return Group(*tables, *(Text(note) for note in notes))


def _table(rows: Sequence[LongRow]) -> Table:
    first, judged = rows[0], all(row.judges for row in rows)
    peak = max(row.peak_rss_bytes for row in rows) / GIB
    table = Table(title_justify="left", caption_justify="left")
    table.title = (
        f"{first.row}, {show_tokens(first.tokens)}, {first.source} ({first.statistics}), "
        f"{first.layers_replayed} of {first.layers_like_it} {first.kind} layers"
    )
    table.caption = (
        f"peak {peak:.2f} GiB resident; beside: sliding layers, whole model, {_mib(first.sliding_bytes)} MiB"
    )
    table.add_column("arm", overflow="fold")
    for head in ("held MiB", "of dense", "freed", "per head", "read MiB", "of dense", "context s", "query ms"):
        table.add_column(head, justify="right")
    for head in ("error", "mass", "recall") if judged else ():
        table.add_column(head, justify="right")
    for arm in dict.fromkeys(row.arm for row in rows):
        table.add_row(*_cells([row for row in rows if row.arm == arm], judged))
    return table


def _cells(rows: Sequence[LongRow], judged: bool) -> list[str | Text]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    cells: list[str | Text] = [
        Text(rows[0].arm),
        _mib(mean([row.retained_bytes for row in rows])),
        f"{mean([row.retained_fraction for row in rows]):.3f}",
        f"{mean([row.blocks_freed_layer / row.blocks_total for row in rows]):.3f}",
        f"{mean([row.blocks_freed_head / row.blocks_total for row in rows]):.3f}",
        _mib(mean([row.read_bytes for row in rows])),
        f"{mean([row.read_fraction for row in rows]):.3f}",
        f"{mean([row.decide_seconds + row.summarize_seconds for row in rows]):.2f}",
        f"{1000 * mean([row.select_seconds for row in rows]):.1f}",
    ]
    if not judged:
        return cells
    for name in ("output_error", "retained_mass", "target_recall"):
        found = [value for value in (getattr(row, name) for row in rows) if value is not None]
        cells.append(f"{mean(found):.3f}" if found else "-")
    return cells


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"
