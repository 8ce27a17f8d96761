"""Modelled decode time of a run's arms on the shipped hardware, calibrated where the run measured that very machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvassay.errors import ExperimentError
from kvassay.experiment.asked import short_model
from kvassay.experiment.folder import LATENCY
from kvassay.experiment.plan import Plan, TraceSet
from kvassay.experiment.records import read_records
from kvassay.experiment.results import read_manifest
from kvassay.layout.config import from_config
from kvassay.layout.model import Layout, dtype_bytes
from kvassay.measure.aggregate import DENSE, Cell
from kvassay.measure.cost import (
    Calibration,
    CostResult,
    Point,
    Traffic,
    Work,
    arm_work,
    attention_seconds,
    calibrate,
    decode_work,
)
from kvassay.measure.hardware.files import Hardware, load_hardware, shipped
from kvassay.measure.latency import LatencyResult
from kvassay.policy.card import Effect
from kvassay.replay.arms import Arm
from kvassay.replay.lane import scope_of

ENCODING = frozenset({Effect.QUANTIZE, Effect.LOW_RANK})
"""Effects after which what is read are codes."""
BATCH = 1


def model_costs(
    plan: Plan,
    sets: Sequence[tuple[TraceSet, Sequence[Cell]]],
    latency: Sequence[LatencyResult],
    machine: Mapping[str, Any],
) -> list[CostResult]:
    """One row per trace set, arm and shipped hardware; none for a trace set without a dense cell.

    machine: the manifest's, whose processor decides which hardware the measured times may calibrate
    """
    hardware = [load_hardware(name) for name in shipped()]
    found = {one.name: calibration for one in hardware if (calibration := _calibration(one, latency, machine))}
    arms = {arm.label: arm for arm in plan.arms}
    return [
        row
        for trace_set, cells in sets
        for one in hardware
        for row in _rows(trace_set, cells, arms, one, found.get(one.name))
    ]


def calibrations_of(folder: Path, hardware: Sequence[Hardware]) -> dict[str, Calibration]:
    """Calibrations by hardware name that a run's measured times give; `ExperimentError` if they give none."""
    manifest = read_manifest(folder)
    latency = read_records(folder / LATENCY, LatencyResult)
    found = {one.name: _calibration(one, latency, manifest["machine"]) for one in hardware}
    kept = {name: calibration for name, calibration in found.items() if calibration is not None}
    if not kept:
        machine = manifest["machine"]
        raise ExperimentError(
            f"{folder}: {len(latency)} measured decode times on {machine['cpu']}, {machine['cpu_count']} CPUs, "
            f"calibrate none of {', '.join(found)}: their [machine] must be that one, and two times are the least"
        )
    return kept


def _calibration(
    hardware: Hardware, latency: Sequence[LatencyResult], machine: Mapping[str, Any]
) -> Calibration | None:
    """Measured attention against the roofline of the same bytes and operations, if this is the machine."""
    dtype = hardware.cache_dtype
    if dtype is None or not hardware.is_machine(str(machine["cpu"]), int(machine["cpu_count"])):
        return None
    return calibrate(
        [
            Point(
                _shape(row.model, row.trace_set, row.arm),
                attention_seconds([Work(0, "full", row.read_bytes, row.flops)], hardware, dtype),
                row.attention_seconds,
            )
            for row in latency
        ]
    )


def _shape(model: str, trace_set: str, arm: str) -> str:
    return f"{model}, {trace_set}, {arm}"


def _rows(
    trace_set: TraceSet,
    cells: Sequence[Cell],
    arms: Mapping[str, Arm],
    hardware: Hardware,
    calibration: Calibration | None,
) -> Iterator[CostResult]:
    dense = next((cell for cell in cells if cell.arm == DENSE), None)
    if dense is None:
        return
    layout = from_config(trace_set.model)
    scale = calibration.scale if calibration else 1.0
    errors = calibration.errors if calibration else {}
    dtype = hardware.cache_dtype or layout.kv_dtype
    work = decode_work(layout, trace_set.workload.length, dtype)
    base = scale * attention_seconds(work, hardware, layout.kv_dtype, BATCH)
    widened = dtype_bytes(dtype) / layout.element_bytes
    model = short_model(trace_set.model)
    for cell in cells:
        arm = arms[cell.arm]
        mine = arm_work(work, scope_of(layout, arm.policy), _traffic(layout, arm, cell, arms[DENSE], dense), widened)
        yield CostResult(
            model=model,
            trace_set=trace_set.label,
            arm=cell.arm,
            hardware=hardware.name,
            batch=BATCH,
            context_tokens=trace_set.workload.length,
            seconds_per_token=scale * attention_seconds(mine, hardware, layout.kv_dtype, BATCH),
            dense_seconds_per_token=base,
            calibration_error=errors.get(_shape(model, trace_set.label, cell.arm)),
        )


def _traffic(layout: Layout, arm: Arm, cell: Cell, dense_arm: Arm, dense: Cell) -> Traffic:
    scope = scope_of(layout, arm.policy)
    same = scope == scope_of(layout, dense_arm.policy)
    return Traffic(
        read_bytes=cell.amounts["read_bytes"],
        dense_read_bytes=dense.amounts["read_bytes"],
        # Tokens per layer are a mean over the arm's own scope; dense's is over the full layers alone.
        selected=cell.amounts["selected_tokens"] if same else 1.0,
        dense_selected=dense.amounts["selected_tokens"] if same else 1.0,
        encoded=bool(arm.policy.card.effects & ENCODING),
    )
