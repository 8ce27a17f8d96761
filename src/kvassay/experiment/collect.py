"""Putting finished units together: all rows, one cell per trace set and arm, modelled costs, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvassay.experiment.asked import short_model
from kvassay.experiment.checking import check_set
from kvassay.experiment.columns import schema_json
from kvassay.experiment.costs import model_costs
from kvassay.experiment.findings import dump_findings
from kvassay.experiment.folder import CELLS, CHECKS, COST, SAMPLES, SCHEMA, RunFolder
from kvassay.experiment.plan import Plan, TraceSet
from kvassay.experiment.records import write_records
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.measure.aggregate import DENSE, Cell, aggregate
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.result import BranchResult
from kvassay.workload.floor import floor_of


def collect(
    folder: RunFolder,
    plan: Plan,
    units: Sequence[tuple[TraceSet, Sequence[BranchResult]]],
    latency: Sequence[LatencyResult],
    manifest: dict[str, Any],
) -> None:
    """Write the rows, the cells, what the checks found, the modelled costs and `schema.json`; the manifest gets the
    trace sets."""
    samples, cells, sets, findings = [], [], [], {}
    manifest["trace_sets"] = []
    for trace_set in plan.trace_sets:
        rows = [row for owner, found in units if owner == trace_set for row in found]
        labels = {"model": short_model(trace_set.model), "trace_set": trace_set.label}
        found = aggregate(rows, plan.experiment.experiment.seed)
        about = trace_set.workload.model_dump(mode="json") | {"query_aware": found.cells[0].query_aware}
        samples.append((labels, rows))
        cells.append((labels, found.cells))
        sets.append((trace_set, found.cells))
        checked = check_set(folder, plan, trace_set, rows, found.cells, manifest["models"])
        findings[labels["model"], labels["trace_set"]] = checked
        manifest["trace_sets"].append(
            {
                **labels,
                **about,
                "floor": _floor(trace_set.workload.name, found.cells),
                "missing": list(found.missing),
                "not_applicable": _idle(manifest["units"], labels),
            }
        )
    folder.write(folder.path / SAMPLES, lambda path: write_samples(samples, path))
    folder.write(folder.path / CELLS, lambda path: write_cells(cells, path))
    folder.write_text(folder.path / CHECKS, dump_findings(findings))
    costs = model_costs(plan, sets, latency, manifest["machine"])
    folder.write_text(folder.path / SCHEMA, schema_json())
    folder.write(folder.path / COST, lambda path: write_records(costs, CostResult, path))


def _idle(units: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> dict[str, str]:
    """Arms that had nothing to do on some context of a trace set, and why (of the first such context)."""
    mine = [unit for unit in units if all(unit[name] == value for name, value in labels.items())]
    return {arm: reason for unit in reversed(mine) for arm, reason in unit["not_applicable"].items()}


def _floor(workload: str, cells: Sequence[Cell]) -> dict[str, Any] | None:
    """The workload's dense floor and whether dense is above it; None if dense did not run."""
    dense = next((cell for cell in cells if cell.arm == DENSE), None)
    if dense is None:
        return None
    floor = floor_of(workload)
    passed = dense.quality["top1"].mean >= floor.min_top1 and dense.quality["nll"].mean <= floor.max_nll
    return {"min_top1": floor.min_top1, "max_nll": floor.max_nll, "passed": passed}
