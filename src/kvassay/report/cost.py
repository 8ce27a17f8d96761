"""The modelled cost of decoding: one table per hardware, parts apart, every number marked as modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvassay.layout.model import Layout
from kvassay.measure.cost import KINDS, Calibration, StepCost, Weights, step_cost
from kvassay.measure.hardware.files import Hardware
from kvassay.report import words

NOTES = (
    "modelled, not measured: each component takes the larger of bytes / achievable bandwidth and operations / "
    "achievable matrix rate; no launches, no communication, no sampling",
    "step: one decode step, in which each request of the batch gets one token; lower is better",
    "memory: share of the step that waits for memory; the rest waits for arithmetic",
)


def cost_report(
    layout: Layout,
    name: str,
    contexts: Sequence[int],
    machines: Sequence[Hardware],
    *,
    batch: int = 1,
    weights: Weights | None = None,
    calibrations: dict[str, Calibration] | None = None,
) -> dict[str, Any]:
    """Dense decode steps of a model at every context on every hardware, as plain data; times in seconds.

    calibrations: by hardware name; its scale multiplies the times and its errors are given beside
    """
    return {
        "model": name,
        "how": "modelled",
        "kv_dtype": layout.kv_dtype,
        "native_context": layout.native_context,
        "batch": batch,
        "weights": None if weights is None else asdict(weights) | {"bytes": weights.bytes},
        "hardware": [
            {
                "name": machine.name,
                "title": machine.title,
                "achievable": machine.achievable.model_dump(),
                "sources": list(machine.sources),
                **_calibration(found := (calibrations or {}).get(machine.name)),
                "contexts": [
                    _row(layout, context, step_cost(layout, context, machine, batch=batch, weights=weights), found)
                    for context in contexts
                ],
            }
            for machine in machines
        ],
    }


def _calibration(found: Calibration | None) -> dict[str, Any]:
    if found is None:
        return {"calibration_error": None, "calibration_scale": None, "calibration_errors": {}}
    return {
        "calibration_error": found.error,
        "calibration_scale": found.scale,
        "calibration_errors": dict(found.errors),
    }


def _row(layout: Layout, context: int, cost: StepCost, calibration: Calibration | None) -> dict[str, Any]:
    scale = calibration.scale if calibration else 1.0
    return {
        "context": context,
        "beyond_native_context": context > layout.native_context,
        "seconds_per_token": cost.seconds * scale,
        "seconds_by_part": {kind: seconds * scale for kind, seconds in cost.parts.items()},
        "memory_bound": cost.memory_bound,
        "held_bytes": cost.held_bytes,
        "fits": cost.fits,
    }


def cost_tables(report: dict[str, Any]) -> Group:
    """The tables of a report, and what their columns mean."""
    weights = report["weights"]
    read = "weights not counted (--parameters)"
    if weights:
        read = f"{weights['parameters']:g} parameters of {weights['dtype']} read per step ({weights['source']})"
    head = Text(f"{report['model']}: {report['kv_dtype']} cache, batch {report['batch']}, {read}")
    lines = [Text(note, style="dim") for note in NOTES]
    return Group(head, *(part for machine in report["hardware"] for part in _machine(machine)), *lines)


def _machine(machine: dict[str, Any]) -> tuple[Text, Table, Text]:
    rows = machine["contexts"]
    kinds = [kind for kind in KINDS if any(kind in row["seconds_by_part"] for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("context", "step, modelled", *kinds, "memory", "held"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['context']:,}{'*' if row['beyond_native_context'] else ''}",
            duration(row["seconds_per_token"]),
            *(duration(row["seconds_by_part"].get(kind, 0.0)) for kind in kinds),
            words.percent(row["memory_bound"]),
            words.size(row["held_bytes"]) + ("" if row["fits"] else " does not fit"),
        )
    share = machine["achievable"]
    said = f"{words.percent(share['bandwidth'])} of the bandwidth, {words.percent(share['matrix'])} of the matrix rate"
    lines = [f"achievable: {said} ({share['source']})", _said(machine)]
    if any(row["beyond_native_context"] for row in rows):
        lines.append("* beyond the model's native context: a question of cost only")
    return Text(f"\n{machine['name']}: {machine['title']}", style="bold"), table, Text("\n".join(lines), style="dim")


def _said(machine: dict[str, Any]) -> str:
    if machine["calibration_error"] is None:
        return "not calibrated: no measured times of this hardware were given"
    errors = machine["calibration_errors"]
    each = "; ".join(f"{shape} {words.percent(error)}" for shape, error in errors.items())
    return (
        f"calibrated: times scaled by {machine['calibration_scale']:.3g}; on {len(errors)} measured shapes, each "
        f"predicted from the others, the error is {words.percent(machine['calibration_error'])} in the median, "
        f"{words.percent(max(errors.values()))} at most\nerror by shape: {each}"
    )


def duration(seconds: float) -> str:
    """Seconds for people, three digits: `1.23 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            value = seconds * factor
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError("unreachable")
