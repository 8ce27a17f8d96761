"""The figures: quality against what is held and read, and the blocks that each way of reclaiming frees."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.results import SetResult
from kvassay.measure.aggregate import DENSE, Cell
from kvassay.measure.front import front
from kvassay.measure.result import RECLAIM_MODES

INK = "#0f1e2d"
"""Stands for the page's own text colour; in the HTML it becomes `currentColor`."""
PALETTE = (
    "#0077bb", "#ee7733", "#009988", "#cc3311", "#33bbee", "#ee3377", "#aa8800", "#7766cc",
    "#558822", "#996655", "#226688", "#bb5599", "#99bb00", "#445577", "#dd8899", "#55aa88",
)  # fmt: skip
MODE_MARKS = {
    "whole_block": ("s", "shared tables (vLLM today)"),
    "per_layer_tables": ("^", "table per layer"),
    "per_head_tables": ("o", "table per head"),
    "slot_reuse": ("D", "slot reuse"),
    "compaction": ("v", "compaction"),
}

Cost = Callable[[Cell], float]


def style() -> AbstractContextManager[None]:
    """Drawing settings: one ink that the page may replace, no background, text kept as text."""
    settings: dict[str, Any] = {
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "font.size": 9,
        "svg.fonttype": "none",
        "svg.hashsalt": "kvassay",
    }
    return matplotlib.rc_context(settings)


def draw_quality(axes: Axes, found: SetResult, arms: Mapping[str, ArmInfo], cost: Cost, label: str) -> None:
    """Top-1 with its interval over a cost: one line per policy through its budgets.

    The broad grey line is the front of the exact arms that an engine could run.
    """
    by_policy: dict[str, list[Cell]] = {}
    for cell in found.cells:
        if cell.arm != f"{DENSE}'":
            by_policy.setdefault(_policy(arms[cell.arm]), []).append(cell)
    colours = _colours(arms)
    for policy, cells in by_policy.items():
        _draw_policy(axes, policy, sorted(cells, key=cost), arms, cost, colours[policy])
    candidates = {
        cell.arm: (cost(cell), cell.quality["top1"].mean)
        for cell in found.cells
        if arms[cell.arm].exact and not arms[cell.arm].reference
    }
    best = sorted(candidates[name] for name in front(candidates))
    axes.plot(*zip(*best, strict=True), color=INK, alpha=0.15, linewidth=6, zorder=0, solid_capstyle="round")
    axes.set_xlabel(f"{label}, lower is better")
    axes.set_ylabel("top-1 of answer tokens, higher is better")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(left=0)
    axes.set_ylim(-0.03, 1.05)
    axes.grid(alpha=0.2)


def _draw_policy(
    axes: Axes, policy: str, cells: list[Cell], arms: Mapping[str, ArmInfo], cost: Cost, colour: str
) -> None:
    info = arms[cells[0].arm]
    estimates = [cell.quality["top1"] for cell in cells]
    means = [estimate.mean for estimate in estimates]
    below = [max(0.0, e.mean - e.low) if e.low is not None else 0.0 for e in estimates]
    above = [max(0.0, e.high - e.mean) if e.high is not None else 0.0 for e in estimates]
    costs = [cost(cell) for cell in cells]
    axes.errorbar(costs, means, yerr=[below, above], fmt="none", ecolor=colour, alpha=0.35, linewidth=1)
    axes.plot(
        costs,
        means,
        marker="*" if policy == DENSE else "o" if info.exact else "s",
        markersize=10 if policy == DENSE else 6,
        linestyle=":" if info.reference else "-",
        markerfacecolor="none" if info.reference else colour,
        color=INK if policy == DENSE else colour,
        label=policy + (" (reference)" if info.reference else "" if info.exact else " (transforming)"),
    )


def evicting(found: SetResult, arms: Mapping[str, ArmInfo]) -> list[Cell]:
    """The arms that evict: exact ones that free a block in any way of reclaiming."""
    return [cell for cell in found.cells if arms[cell.arm].exact and any(cell.blocks_freed.values())]


def draw_freed(axes: Axes, found: SetResult, arms: Mapping[str, ArmInfo]) -> None:
    """Blocks freed by each way of reclaiming, as a fraction of the dense context's, one row per evicting arm."""
    cells = evicting(found, arms)
    rows = range(len(cells))
    for mode in RECLAIM_MODES:
        mark, label = MODE_MARKS[mode]
        values = [_share(cell, mode) for cell in cells]
        today = mode == "whole_block"
        axes.plot(
            values,
            rows,
            mark,
            label=label,
            markersize=8 if today else 6,
            color=PALETTE[3] if today else PALETTE[RECLAIM_MODES.index(mode) + 5],
            markerfacecolor=PALETTE[3] if today else "none",
            linestyle="none",
            clip_on=False,
        )
    axes.set_yticks(rows, [cell.arm for cell in cells], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("blocks freed / blocks of the dense context, higher is better")
    axes.grid(alpha=0.2)


def quality_figure(found: SetResult, arms: Mapping[str, ArmInfo], cost: Cost, label: str) -> Figure:
    """One quality panel with its legend beside it."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    draw_quality(axes, found, arms, cost, label)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return figure


def freed_figure(found: SetResult, arms: Mapping[str, ArmInfo]) -> Figure:
    """The blocks panel; as tall as there are arms."""
    figure = Figure(figsize=(7.2, 1.6 + 0.22 * len(evicting(found, arms))), layout="constrained")
    axes = figure.subplots()
    draw_freed(axes, found, arms)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, fontsize=8)
    return figure


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an SVG element for an HTML page: no namespaces, ids of its own, the page's ink."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'^<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r'<svg \1\2width="100%"', text)
    return text.replace(INK, "currentColor").replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def retained(cell: Cell) -> float:
    """Bytes held, fraction of dense."""
    return cell.amounts["retained_fraction"]


def read(cell: Cell) -> float:
    """Bytes read per token, fraction of dense."""
    return cell.amounts["read_fraction"]


def _policy(info: ArmInfo) -> str:
    """The arm's label without its budget; with `own-prefill`, which is another way to run the policy."""
    return info.label.replace(f" {info.budget}", "", 1) if info.budget else info.label


def _colours(arms: Mapping[str, ArmInfo]) -> dict[str, str]:
    """A colour per policy, the same in every figure of a run."""
    dense = {DENSE: INK, f"{DENSE}'": INK}
    names = dict.fromkeys(_policy(info) for label, info in arms.items() if label not in dense)
    return {**dense, **{name: PALETTE[number % len(PALETTE)] for number, name in enumerate(names)}}


def _share(cell: Cell, mode: str) -> float:
    total = cell.amounts["blocks_total"]
    return cell.blocks_freed.get(mode, 0.0) / total if total else 0.0
