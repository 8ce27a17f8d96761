"""Putting finished units together: all rows, one cell per trace set and arm, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvassay.experiment.folder import CELLS, SAMPLES, RunFolder
from kvassay.experiment.plan import Plan, TraceSet, short_model
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.measure.aggregate import DENSE, Cell, aggregate
from kvassay.measure.result import BranchResult
from kvassay.workload.floor import floor_of


def collect(
    folder: RunFolder,
    plan: Plan,
    units: Sequence[tuple[TraceSet, Sequence[BranchResult]]],
    manifest: dict[str, Any],
) -> None:
    """Write `samples.parquet` and `cells.parquet`, and describe the trace sets in the manifest."""
    samples, cells = [], []
    manifest["trace_sets"] = []
    for trace_set in plan.trace_sets:
        rows = [row for owner, found in units if owner == trace_set for row in found]
        labels = {"model": short_model(trace_set.model), "trace_set": trace_set.label}
        found = aggregate(rows, plan.experiment.experiment.seed)
        about = trace_set.workload.model_dump(mode="json") | {"query_aware": found.cells[0].query_aware}
        samples.append((labels, rows))
        cells.append((labels, found.cells))
        manifest["trace_sets"].append(
            {**labels, **about, "floor": _floor(trace_set.workload.name, found.cells), "missing": list(found.missing)}
        )
    folder.write(folder.path / SAMPLES, lambda path: write_samples(samples, path))
    folder.write(folder.path / CELLS, lambda path: write_cells(cells, path))


def _floor(workload: str, cells: Sequence[Cell]) -> dict[str, Any] | None:
    """The workload's dense floor and whether dense is above it; None if dense did not run."""
    dense = next((cell for cell in cells if cell.arm == DENSE), None)
    if dense is None:
        return None
    floor = floor_of(workload)
    passed = dense.quality["top1"].mean >= floor.min_top1 and dense.quality["nll"].mean <= floor.max_nll
    return {"min_top1": floor.min_top1, "max_nll": floor.max_nll, "passed": passed}
