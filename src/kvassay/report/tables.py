"""Tables as plain data, which the page and its Markdown twin show alike: heads with their cards, cells as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.acceptance_cards import ACCEPTANCE_CARDS
from kvassay.measure.aggregate import Cell
from kvassay.measure.metrics import CARDS, RECLAIM_TEXT, STATES
from kvassay.measure.result import RECLAIM_MODES
from kvassay.report import acceptance, content, words
from kvassay.report.cost import duration
from kvassay.report.points import role


@dataclass(frozen=True)
class Head:
    """A column: its name, and what it counts, over what, in which unit and which way is better."""

    name: str
    card: str = ""


@dataclass(frozen=True)
class Line:
    """A row; `kind` is the arm's role where the row is an arm's."""

    cells: tuple[str, ...]
    kind: str = ""


@dataclass(frozen=True)
class Grid:
    """One table."""

    title: str
    heads: tuple[Head, ...]
    lines: tuple[Line, ...]
    prose: bool = False
    """Cells are text to be read, not numbers to be compared."""


def plain(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Grid:
    """A table of text."""
    return Grid(title, tuple(Head(name) for name in heads), tuple(Line(tuple(line)) for line in lines), prose=True)


def set_grids(found: SetResult, part: words.Part, results: Results) -> list[Grid]:
    """All tables of one part of a trace set: quality, bytes and traffic, blocks, and time where there is any."""
    arms = results.arms
    grids = [_quality(part, arms), _amounts(part, arms), _blocks(part, arms)]
    return grids + _times(found, part, results)


def _grid(
    title: str, heads: Sequence[Head], part: words.Part, arms: Mapping[str, ArmInfo], lines: list[list[str]]
) -> Grid:
    rows = tuple(
        Line((words.arm_name(cell, arms), *cells), role(arms[cell.arm]))
        for cell, cells in zip(part.cells, lines, strict=True)
    )
    return Grid(title, (Head("arm"), *heads), rows)


def _quality(part: words.Part, arms: Mapping[str, ArmInfo]) -> Grid:
    heads = [
        _head("top1", "top-1, mean [95%]"),
        Head("top-1 − dense, paired [95%]", "arm minus dense on the same questions; higher is better; measured"),
        Head("noise", "what that difference must exceed to mean anything; lower is surer; measured"),
        _head("task", "task, mean [95%]"),
        Head("task flips lost/won", "questions / questions, against dense; measured"),
        Head("McNemar p", "exact two-sided p of the flips; counts questions, not contexts"),
        _head("nll", "NLL, nats, mean [95%]"),
        Head("NLL, worst tenth", "nats per token; mean of the worst tenth of the questions; lower is better; measured"),
        _head("kl", "KL, nats, mean [95%]"),
        _head("agree", "agreement, mean [95%]"),
        _head("generated_tokens", "generated tokens"),
        Head("diverged", "questions whose generated tokens differ from dense's / questions; measured"),
    ]
    return _grid("Quality", heads, part, arms, [_quality_cells(cell) for cell in part.cells])


def _quality_cells(cell: Cell) -> list[str]:
    flipped = cell.flips.get("task")
    return [
        words.interval(cell.quality["top1"]),
        words.interval(cell.difference.get("top1")),
        words.number(cell.noise.get("top1")),
        words.interval(cell.quality.get("task")),
        words.flipped(cell),
        "-" if flipped is None or flipped.p_value is None else f"{flipped.p_value:.3g}",
        words.interval(cell.quality["nll"]),
        words.number(cell.worst["nll"]),
        words.interval(cell.quality["kl"]),
        words.interval(cell.quality["agree"]),
        words.average(cell, "generated_tokens", 1),
        "-" if cell.diverged is None else f"{cell.diverged}/{cell.samples}",
    ]


def _amounts(part: words.Part, arms: Mapping[str, ArmInfo]) -> Grid:
    heads = [
        _head("retained_bytes", "held, bytes"),
        _head("retained_fraction", "held / dense, whole model"),
        _head("retained_fraction_scope", "held / dense, in scope"),
        Head("held outside the scope", "bytes of the layers the policy may not act on (window-bounded ones, say)"),
        _head("peak_bytes", "peak bytes"),
        _head("selected_tokens", "selected tokens"),
        _head("read_bytes", "read per token"),
        _head("read_fraction", "read / dense"),
        _head("read_bytes_growing", "of it in growing layers"),
        _head("policy_bytes", "touched once by the policy"),
        _head("policy_seconds", "policy, wall s"),
    ]
    states = [name for name in STATES if any(cell.amounts[name] for cell in part.cells)]
    heads += [_head(name, CARDS[name].title) for name in states]
    return _grid("Bytes and traffic", heads, part, arms, [_amount_cells(cell, states) for cell in part.cells])


def _amount_cells(cell: Cell, states: Sequence[str]) -> list[str]:
    amounts = cell.amounts
    return [
        words.size(amounts["retained_bytes"]),
        words.percent(amounts["retained_fraction"]),
        words.percent(amounts["retained_fraction_scope"]),
        words.size(amounts["retained_bytes"] - amounts["retained_bytes_scope"]),
        words.size(cell.peak_bytes),
        words.number(amounts["selected_tokens"], 0),
        words.size(amounts["read_bytes"]),
        words.percent(amounts["read_fraction"]),
        words.size(amounts["read_bytes_growing"]),
        words.size(amounts["policy_bytes"]),
        words.number(amounts["policy_seconds"], 2),
        *(words.size(amounts[name]) for name in states),
    ]


def _blocks(part: words.Part, arms: Mapping[str, ArmInfo]) -> Grid:
    heads = [_head("blocks_total", "dense's blocks when the arm's are counted")]
    heads += [
        Head(mode.replace("_", " "), f"blocks freed; higher is better; measured. {RECLAIM_TEXT[mode]}")
        for mode in RECLAIM_MODES
    ]
    lines = [
        [words.blocks(count) for count in (cell.amounts["blocks_total"], *map(cell.blocks_freed.get, RECLAIM_MODES))]
        for cell in part.cells
    ]
    return _grid("Blocks really freed, by way of reclaiming", heads, part, arms, lines)


TIME_HEADS = (
    Head("attention, measured [quartiles]", "one decoded token, all layers, on this CPU, batch 1; lower is better"),
    Head("attention / dense", "of dense's in the same rounds; lower is better; measured"),
    Head(
        "policy's own work",
        "per decoded token: scan, summaries, deciding, encoding; lower is better; measured in one pass, without spread",
    ),
    Head("of read bandwidth", "of what this machine was measured to read; higher is better; measured"),
)


def _times(found: SetResult, part: words.Part, results: Results) -> list[Grid]:
    """Measured times, and modelled ones by hardware; nothing if there are none of this trace set."""
    here = (found.model, found.label)
    timed = {row.arm: row for row in results.latency if (row.model, row.trace_set) == here}
    cost = {(row.arm, row.hardware): row for row in results.cost if (row.model, row.trace_set) == here}
    machines = list(dict.fromkeys(hardware for _, hardware in cost))
    if not timed and not cost:
        return []
    roofline = "roofline of one decode step / dense's; lower is better; modelled"
    heads = [*TIME_HEADS, *(Head(f"{name}, modelled / dense", roofline) for name in machines)]
    lines = []
    for cell in part.cells:
        row = timed.get(cell.arm)
        measured = ["-"] * 4
        if row is not None:
            ends = f"[{duration(row.attention_low)}, {duration(row.attention_high)}]"
            measured = [
                f"{duration(row.attention_seconds)} {ends}",
                words.percent(row.fraction),
                duration(row.policy_seconds),
                words.percent(row.bandwidth_fraction),
            ]
        modelled = [cost.get((cell.arm, name)) for name in machines]
        lines.append(measured + ["-" if one is None else words.percent(one.fraction) for one in modelled])
    return [_grid("Time", heads, part, results.arms, lines)]


def speculation_grids(results: Results) -> Iterator[Grid]:
    """Speculative acceptance, a table per trace set; none if it was not measured."""
    for title, rows in acceptance.sets_of(results):
        if not rows:
            continue
        heads, above = [], ""
        for column in acceptance.columns_of(rows):
            above = column.head or above
            heads.append(Head(f"{above}: {column.under}", _acceptance_card(column.under)))
        lines = [Line(tuple(line)) for line in acceptance.lines_of(rows)]
        yield Grid(title, (Head("arm"), Head("drafter"), *heads), tuple(lines))


def _acceptance_card(under: str) -> str:
    cards = [card for card in ACCEPTANCE_CARDS.values() if under.startswith(card.title)]
    return cards[0].sentence if cards else ""


def states_grid(results: Results) -> Grid | None:
    """Bytes of the dense cache by kind of state; None without traces."""
    lines = content.states(results)
    heads = (
        Head("model"),
        Head("context tokens"),
        Head("dtype"),
        *(Head(kind, STATE_TEXT[kind]) for kind in content.STATES),
    )
    return Grid("", heads, tuple(Line(tuple(line)) for line in lines)) if lines else None


STATE_TEXT = {
    "full": "bytes of K and V of layers that keep every token",
    "sliding": "bytes of window-bounded state",
    "latent": "bytes of latents (MLA)",
    "index": "bytes of the keys of selection indices",
    "pooled": "bytes of compressed entries, one per several tokens",
}


def _head(metric: str, name: str) -> Head:
    return Head(name, CARDS[metric].sentence)
