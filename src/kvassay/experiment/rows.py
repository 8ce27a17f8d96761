"""Result rows as parquet: one schema for the questions of a unit, one for the cells of a run."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvassay.errors import ExperimentError
from kvassay.measure.aggregate import Cell
from kvassay.measure.metrics import AMOUNTS, QUALITY
from kvassay.measure.result import RECLAIM_MODES, BranchResult
from kvassay.measure.statistics import Estimate, Flips

FREED = "blocks_freed"
WALL = ("policy_seconds",)
"""Columns that two runs of the same unit cannot share: wall time."""
_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_FLIPPED = ("task", "top1")


def sample_schema() -> Any:
    """Columns of `BranchResult`, `blocks_freed` spread over one column per reclaim mode."""
    hints = typing.get_type_hints(BranchResult)
    columns = [(f.name, _arrow(hints[f.name])) for f in dataclasses.fields(BranchResult) if f.name != FREED]
    return pa.schema([*columns, *((f"{FREED}_{mode}", pa.float64()) for mode in RECLAIM_MODES)])


def _arrow(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return _ARROW[hint]


def to_row(result: BranchResult) -> dict[str, Any]:
    """One flat row."""
    row = dataclasses.asdict(result)
    freed = row.pop(FREED)
    return {**row, **{f"{FREED}_{mode}": freed.get(mode) for mode in RECLAIM_MODES}}


def from_row(row: Mapping[str, Any]) -> BranchResult:
    """The result that `to_row` flattened; columns it does not know are left out."""
    names = {f.name for f in dataclasses.fields(BranchResult)} - {FREED}
    freed = {mode: row[f"{FREED}_{mode}"] for mode in RECLAIM_MODES if row.get(f"{FREED}_{mode}") is not None}
    return BranchResult(**{name: row[name] for name in names}, blocks_freed=freed)


def write_results(results: Sequence[BranchResult], path: Path, notes: Mapping[str, str]) -> None:
    """Write the rows of one unit; `notes` go into the file's metadata."""
    schema = sample_schema().with_metadata(dict(notes))
    pq.write_table(pa.Table.from_pylist([to_row(result) for result in results], schema=schema), path)


def read_results(path: Path) -> list[BranchResult]:
    """Read the rows of one unit; `ExperimentError` if the file is damaged or of another version."""
    try:
        return [from_row(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ExperimentError(f"{path}: cannot be read as results: {_line(error)}") from None


def write_samples(groups: Sequence[tuple[Mapping[str, str], Sequence[BranchResult]]], path: Path) -> None:
    """Write all rows of a run; each group's labels become leading columns."""
    names = list(groups[0][0])
    rows = [{**labels, **to_row(result)} for labels, results in groups for result in results]
    schema = pa.schema([*((name, pa.string()) for name in names), *sample_schema()])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def write_cells(groups: Sequence[tuple[Mapping[str, str], Sequence[Cell]]], path: Path) -> None:
    """Write all cells of a run, one row per trace set and arm."""
    rows = [{**labels, **cell_to_row(cell)} for labels, cells in groups for cell in cells]
    # Named types: a column of missing intervals would otherwise have none.
    schema = pa.schema([(name, _cell_type(name, groups[0][0])) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _cell_type(name: str, labels: Mapping[str, str]) -> Any:
    if name in (*labels, "arm", "workload"):
        return pa.string()
    if name == "query_aware":
        return pa.bool_()
    counts = (
        "samples",
        "contexts",
        "diverged",
        *(f"{flipped}_{way}" for flipped in _FLIPPED for way in ("lost", "won")),
    )
    return pa.int64() if name in counts else pa.float64()


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a parquet file; `ExperimentError` if it is missing or damaged."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    except (pa.ArrowException, OSError) as error:
        raise ExperimentError(f"{path}: cannot be read: {_line(error)}") from None


def cell_to_row(cell: Cell) -> dict[str, Any]:
    """One flat row: `top1`, `top1_low`, `top1_high`, `top1_diff`, `top1_diff_low`, ..., `task_lost`, `task_won`."""
    row: dict[str, Any] = {
        name: getattr(cell, name)
        for name in ("arm", "workload", "query_aware", "samples", "contexts", "worst_decile_nll", "diverged")
    }
    for name in QUALITY:
        row |= _spread(name, cell.quality[name])
        row |= _spread(f"{name}_diff", cell.difference.get(name))
    for name in _FLIPPED:
        found = cell.flips.get(name)
        row |= {f"{name}_lost": found and found.right_to_wrong, f"{name}_won": found and found.wrong_to_right}
    row |= dict(cell.amounts)
    row["peak_bytes"] = cell.peak_bytes
    return row | {f"{FREED}_{mode}": cell.blocks_freed.get(mode) for mode in RECLAIM_MODES}


def cell_from_row(row: Mapping[str, Any]) -> Cell:
    """The cell that `cell_to_row` flattened."""
    compared = row["nll_diff"] is not None
    size = (row["samples"], row["contexts"])
    return Cell(
        arm=row["arm"],
        workload=row["workload"],
        query_aware=row["query_aware"],
        samples=row["samples"],
        contexts=row["contexts"],
        quality={name: _gather(name, row, size) for name in QUALITY},
        difference={name: _gather(f"{name}_diff", row, size) for name in QUALITY} if compared else {},
        flips={n: Flips(row[f"{n}_lost"], row[f"{n}_won"], size[0]) for n in _FLIPPED} if compared else {},
        worst_decile_nll=row["worst_decile_nll"],
        diverged=row["diverged"],
        amounts={name: row[name] for name in AMOUNTS},
        peak_bytes=row["peak_bytes"],
        blocks_freed={m: row[f"{FREED}_{m}"] for m in RECLAIM_MODES if row[f"{FREED}_{m}"] is not None},
    )


def _spread(name: str, found: Estimate | None) -> dict[str, float | None]:
    if found is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _gather(name: str, row: Mapping[str, Any], size: tuple[int, int]) -> Estimate:
    return Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"], *size)


def _line(error: Exception) -> str:
    """An exception on one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
