"""What the charts draw, as flat rows: arms by quality metric and by what they free, read and take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.aggregate import DENSE, Cell
from kvassay.measure.cost import CostResult
from kvassay.measure.front import front
from kvassay.measure.latency import LatencyResult
from kvassay.measure.metrics import CARDS, QUALITY, RECLAIM_TEXT
from kvassay.measure.result import RECLAIM_MODES
from kvassay.report import words

Row = dict[str, Any]
Front = Literal["space", "traffic", "time"]
METRICS = tuple(name for name in QUALITY if CARDS[name].better != "none")
"""Quality metrics a chart can show."""
MARKED = (DENSE, "fp8", "paged-eviction", "random", "recency")
"""Policies named in every chart: what a user has today, and what costs nothing."""
NO_INTERVAL = "none: too few contexts"
DIGITS = 6
"""Significant digits of a number in a chart's data."""


@dataclass(frozen=True)
class Axis:
    """One way to say what an arm costs: a number of a cell, what it counts and which way is better."""

    key: str
    """Its column in the rows."""
    front: Front
    name: str
    """In a menu."""
    title: str
    """With unit, denominator, direction, and whether it was measured."""
    higher: bool
    value: Callable[[SetResult, Cell], float | None]


def axes(results: Results) -> tuple[Axis, ...]:
    """Every axis the run has numbers for; the first of a front is shown first."""
    return (
        *(_freed(mode) for mode in RECLAIM_MODES),
        HELD,
        READ,
        *_measured(results.latency),
        *_modelled(results.cost),
    )


def _freed(mode: str) -> Axis:
    def value(found: SetResult, cell: Cell) -> float | None:
        total, freed = cell.amounts["blocks_total"], cell.blocks_freed.get(mode)
        return None if freed is None or not total else freed / total

    name = mode.replace("_", " ")
    title = f"blocks really freed / dense's blocks, {name} (higher is better; measured)"
    return Axis(mode, "space", f"blocks freed: {RECLAIM_TEXT[mode].partition(':')[0]}", title, True, value)


HELD = Axis(
    "held", "space", "bytes held", "bytes held / dense's, whole model (lower is better; measured)", False,
    lambda found, cell: cell.amounts["retained_fraction"],
)  # fmt: skip
READ = Axis(
    "read", "traffic", "KV bytes read",
    "KV bytes read per decoded token / dense's, scan included (lower is better; measured)", False,
    lambda found, cell: cell.amounts["read_fraction"],
)  # fmt: skip


def _measured(latency: Sequence[LatencyResult]) -> tuple[Axis, ...]:
    if not latency:
        return ()
    rows = {(row.model, row.trace_set, row.arm): row for row in latency}

    def value(pick: Callable[[LatencyResult], float]) -> Callable[[SetResult, Cell], float | None]:
        def of(found: SetResult, cell: Cell) -> float | None:
            row = rows.get((found.model, found.label, cell.arm))
            return None if row is None else pick(row)

        return of

    where = ", ".join(dict.fromkeys(row.hardware for row in latency))
    tail = f"(lower is better; measured on {where}, batch 1)"
    head = "attention of one decoded token, all layers"
    return (
        Axis("attention", "time", "measured: attention", f"{head} / dense's {tail}", False, value(_fraction)),
        Axis(
            "attention_policy", "time", "measured: attention and the policy's own work",
            f"{head}, and the policy's own work / dense's attention {tail}", False, value(_total),
        ),
    )  # fmt: skip


def _fraction(row: LatencyResult) -> float:
    return row.fraction


def _total(row: LatencyResult) -> float:
    return row.total_fraction


def _modelled(cost: Sequence[CostResult]) -> tuple[Axis, ...]:
    return tuple(_modelled_on(name, [row for row in cost if row.hardware == name]) for name in _hardware(cost))


def _hardware(cost: Sequence[CostResult]) -> list[str]:
    return list(dict.fromkeys(row.hardware for row in cost))


def _modelled_on(hardware: str, cost: Sequence[CostResult]) -> Axis:
    rows = {(row.model, row.trace_set, row.arm): row.fraction for row in cost}
    errors = [row.calibration_error for row in cost if row.calibration_error is not None]
    sure = f"calibration error {words.percent(statistics.median(errors))}" if errors else "not calibrated"
    batches = ", ".join(str(batch) for batch in dict.fromkeys(row.batch for row in cost))
    return Axis(
        f"modelled_{hardware}", "time", f"modelled: {hardware}",
        f"attention of one decode step / dense's (lower is better; modelled for {hardware}, batch {batches}, {sure})",
        False, lambda found, cell: rows.get((found.model, found.label, cell.arm)),
    )  # fmt: skip


def quality_title(metric: str) -> str:
    """A quality metric with unit and direction."""
    card = CARDS[metric]
    return f"{card.title} ({card.unit}; {card.better} is better; {card.how})"


def policy_of(info: ArmInfo) -> str:
    """The arm's label without its budget; with `own-prefill`, which is another way to run the policy."""
    return info.label.replace(f" {info.budget}", "", 1) if info.budget else info.label


def role(info: ArmInfo) -> str:
    """What an arm is in a comparison: one of `ROLES`."""
    if info.policy == DENSE:
        return "dense"
    return "reference" if info.reference else "always on" if info.always_on else "candidate"


ROLES = ("dense", "always on", "candidate", "reference")


def points(results: Results, shown: Sequence[Axis]) -> list[Row]:
    """One row per trace set, arm and metric: `y` with its interval, a column per axis, and on which fronts it is."""
    spreads = {(row.model, row.trace_set, row.arm): row for row in results.latency}
    return [
        {**about, **quality}
        for found in results.sets
        for metric, on in _fronts(found, results.arms, shown).items()
        for number, cell in enumerate(found.cells)
        if metric in cell.quality
        for about in [_about(found, cell, results.arms[cell.arm], shown)]
        for quality in [
            _quality(cell, metric)
            | {"front": [axis.key for axis in shown if cell.arm in on[axis.key]]}
            | _ends(spreads.get((found.model, found.label, cell.arm)))
            | ({"label": about["policy"]} if _named(found, results.arms, number) else {})
        ]
    ]


def _about(found: SetResult, cell: Cell, info: ArmInfo, shown: Sequence[Axis]) -> Row:
    costs = {axis.key: rounded(axis.value(found, cell)) for axis in shown}
    return {
        "model": found.model,
        "set": found.label,
        "arm": cell.arm,
        "policy": policy_of(info),
        "role": role(info),
        "exact": "exact" if info.exact else "transforming",
        "samples": f"{cell.samples} questions on {cell.contexts} contexts",
        **{key: value for key, value in costs.items() if value is not None},
    }


def _quality(cell: Cell, metric: str) -> Row:
    estimate = cell.quality[metric]
    noise = cell.noise.get(metric)
    row: Row = {
        "metric": metric,
        "y": rounded(estimate.mean),
        "interval": NO_INTERVAL,
        "against": words.interval(cell.difference.get(metric)),
        "noise": NO_INTERVAL if noise is None else words.number(noise),
    }
    if estimate.low is not None and estimate.high is not None:
        ends = f"{words.number(estimate.low)} to {words.number(estimate.high)}"
        row |= {"low": rounded(estimate.low), "high": rounded(estimate.high), "interval": ends}
    return row


def _ends(row: LatencyResult | None) -> Row:
    """Quartiles of the measured attention time, as fractions of dense's median."""
    if row is None:
        return {}
    ends = (row.attention_low / row.dense_seconds, row.attention_high / row.dense_seconds)
    return dict(zip(("attention_low", "attention_high"), map(rounded, ends), strict=True))


def _named(found: SetResult, arms: Mapping[str, ArmInfo], number: int) -> bool:
    """Whether a name is written beside the point: of a marked policy or a reference, at its first budget."""
    info = arms[found.cells[number].arm]
    if info.policy not in MARKED and not info.reference:
        return False
    return all(policy_of(arms[cell.arm]) != policy_of(info) for cell in found.cells[:number]) and not (
        info.policy == DENSE and info.label != DENSE
    )


def _fronts(
    found: SetResult, arms: Mapping[str, ArmInfo], shown: Sequence[Axis]
) -> dict[str, dict[str, frozenset[str]]]:
    """By metric and axis, the exact arms an engine could run that no other such arm beats on both."""
    runnable = [cell for cell in found.cells if arms[cell.arm].exact and not arms[cell.arm].reference]
    costs = {
        axis.key: {cell.arm: value * (-1 if axis.higher else 1) for cell in runnable
                   if (value := axis.value(found, cell)) is not None}
        for axis in shown
    }  # fmt: skip
    return {
        metric: {
            key: front({cell.arm: (cost[cell.arm], _sign(metric) * cell.quality[metric].mean)
                        for cell in runnable if cell.arm in cost and metric in cell.quality})
            for key, cost in costs.items()
        }
        for metric in METRICS
    }  # fmt: skip


def _sign(metric: str) -> int:
    return 1 if CARDS[metric].better == "higher" else -1


def freed_rows(results: Results) -> list[Row]:
    """One row per trace set, exact arm that frees something, and way of reclaiming."""
    return [
        {
            "model": found.model, "set": found.label, "arm": cell.arm, "mode": mode.replace("_", " "),
            "share": rounded(freed / cell.amounts["blocks_total"]),
            "count": f"{words.blocks(freed)} of {words.blocks(cell.amounts['blocks_total'])} blocks",
        }
        for found in results.sets
        for cell in found.cells
        if results.arms[cell.arm].exact and any(cell.blocks_freed.values()) and cell.amounts["blocks_total"]
        for mode, freed in cell.blocks_freed.items()
    ]  # fmt: skip


def rounded(value: float | None) -> float | None:
    """As many digits as a chart needs; None for what is no number."""
    if value is None or value != value:
        return None
    return float(f"{value:.{DIGITS}g}")
