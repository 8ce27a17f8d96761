"""Result rows as parquet: one schema for the questions of a unit, one for the cells of a run."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvassay.errors import ExperimentError
from kvassay.experiment.records import arrow_type, first_line
from kvassay.measure.aggregate import FLIPPED, Cell
from kvassay.measure.metrics import AMOUNTS, CARDS, QUALITY, STATES
from kvassay.measure.resample import Bounds, Estimate
from kvassay.measure.result import FREE_RUNNING, RECLAIM_MODES, BranchResult
from kvassay.measure.statistics import Flips

FREED = "blocks_freed"
_FIELDS = tuple(f.name for f in dataclasses.fields(BranchResult) if f.name != FREED)
WALL = ("policy_seconds",)
"""Columns that two runs of the same unit cannot share: wall time."""


def sample_schema() -> Any:
    """Columns of `BranchResult`, `blocks_freed` spread over one column per reclaim mode."""
    hints = typing.get_type_hints(BranchResult)
    columns = [(f.name, arrow_type(hints[f.name])) for f in dataclasses.fields(BranchResult) if f.name != FREED]
    return pa.schema([*columns, *((f"{FREED}_{mode}", pa.float64()) for mode in RECLAIM_MODES)])


def to_row(result: BranchResult) -> dict[str, Any]:
    """One flat row."""
    row = dataclasses.asdict(result)
    freed = row.pop(FREED)
    return {**row, **{f"{FREED}_{mode}": freed.get(mode) for mode in RECLAIM_MODES}}


def from_row(row: Mapping[str, Any]) -> BranchResult:
    """The result that `to_row` flattened; columns it does not know are left out, newer ones may lack."""
    freed = {mode: row[f"{FREED}_{mode}"] for mode in RECLAIM_MODES if row.get(f"{FREED}_{mode}") is not None}
    values = {name: row[name] for name in _FIELDS if name in row}
    return BranchResult(**{**values, "kept": tuple(values.get("kept", ())), FREED: freed})


def write_results(results: Sequence[BranchResult], path: Path, notes: Mapping[str, str]) -> None:
    """Write the rows of one unit; `notes` go into the file's metadata."""
    schema = sample_schema().with_metadata(dict(notes))
    pq.write_table(pa.Table.from_pylist([to_row(result) for result in results], schema=schema), path)


def read_results(path: Path) -> list[BranchResult]:
    """Read the rows of one unit; `ExperimentError` if the file is damaged or of another version."""
    try:
        return [from_row(row) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise ExperimentError(f"{path}: cannot be read as results: {first_line(error)}") from None


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
    schema = pa.schema([(name, cell_type(name, groups[0][0])) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def cell_type(name: str, labels: Iterable[str]) -> Any:
    """Column type of a cell's number, name or count; `labels` are names."""
    if name in (*labels, "arm", "workload"):
        return pa.string()
    if name == "query_aware":
        return pa.bool_()
    counts = (
        "samples",
        "contexts",
        "diverged",
        *(f"{flipped}_{way}" for flipped in FLIPPED for way in ("lost", "won")),
    )
    return pa.int64() if name in counts else pa.float64()


def read_table(path: Path) -> list[dict[str, Any]]:
    """Rows of a parquet file; `ExperimentError` if it is missing or damaged."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    except (pa.ArrowException, OSError) as error:
        raise ExperimentError(f"{path}: cannot be read: {first_line(error)}") from None


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """Those of the named columns that a parquet file has; `ExperimentError` if it is missing or damaged."""
    try:
        file = pq.ParquetFile(path)
        there = [name for name in names if name in file.schema_arrow.names]
        columns: dict[str, list[Any]] = file.read(columns=there).to_pydict()
        return columns
    except (pa.ArrowException, OSError) as error:
        raise ExperimentError(f"{path}: cannot be read: {first_line(error)}") from None


def cell_to_row(cell: Cell) -> dict[str, Any]:
    """One flat row.

    By quality metric: `top1`, `top1_low`, `top1_high`, `top1_error` (mean, ends of the interval, standard error),
    `top1_worst` (worst tenth); `top1_diff`, `top1_diff_low`, `top1_diff_high`, `top1_diff_error`, `top1_diff_worst`
    (arm minus dense, paired), `top1_noise`. For `task` and `top1`: `_lost`, `_won`, `_mcnemar` (exact p).
    """
    row: dict[str, Any] = {
        name: getattr(cell, name) for name in ("arm", "workload", "query_aware", "samples", "contexts", "diverged")
    }
    for name in QUALITY:
        row |= _spread(name, cell.quality.get(name))
        row[f"{name}_worst"] = cell.worst.get(name)
        row |= _spread(f"{name}_diff", cell.difference.get(name))
        row[f"{name}_diff_worst"] = cell.worst_difference.get(name)
        row[f"{name}_noise"] = cell.noise.get(name)
    for name in FLIPPED:
        found = cell.flips.get(name)
        row |= {f"{name}_lost": found and found.right_to_wrong, f"{name}_won": found and found.wrong_to_right}
        row[f"{name}_mcnemar"] = found and found.p_value
    row |= dict(cell.amounts)
    row["peak_bytes"] = cell.peak_bytes
    return row | {f"{FREED}_{mode}": cell.blocks_freed.get(mode) for mode in RECLAIM_MODES}


def cell_from_row(row: Mapping[str, Any]) -> Cell:
    """The cell that `cell_to_row` flattened; KeyError for a row of another version."""
    compared = row["nll_diff"] is not None
    silent = not row["generated_tokens"]  # 0 in older runs
    names = [name for name in QUALITY if not (silent and name in FREE_RUNNING)]
    flipped = [name for name in FLIPPED if not (silent and name in FREE_RUNNING)]
    return Cell(
        arm=row["arm"],
        workload=row["workload"],
        query_aware=row["query_aware"],
        samples=row["samples"],
        contexts=row["contexts"],
        quality={name: _gather(name, row, CARDS[name].bounds) for name in names},
        difference={n: _gather(f"{n}_diff", row, CARDS[n].paired_bounds) for n in names} if compared else {},
        noise={name: row[f"{name}_noise"] for name in names} if compared else {},
        worst={name: row[f"{name}_worst"] for name in names},
        worst_difference={name: row[f"{name}_diff_worst"] for name in names} if compared else {},
        flips={name: _flips(name, row) for name in flipped} if compared else {},
        diverged=None if silent else row["diverged"],
        amounts={name: row.get(name, 0.0) if name in STATES else row[name] for name in AMOUNTS},
        peak_bytes=row["peak_bytes"],
        blocks_freed={m: row[f"{FREED}_{m}"] for m in RECLAIM_MODES if row[f"{FREED}_{m}"] is not None},
    )


def _spread(name: str, found: Estimate | None) -> dict[str, float | None]:
    names = (name, f"{name}_low", f"{name}_high", f"{name}_error")
    values = (None,) * 4 if found is None else (found.mean, found.low, found.high, found.error)
    return dict(zip(names, values, strict=True))


def _gather(name: str, row: Mapping[str, Any], bounds: Bounds) -> Estimate:
    mean, low, high, error = (row[column] for column in _spread(name, None))
    return Estimate(mean, low, high, row["samples"], row["contexts"], error, bounds)


def _flips(name: str, row: Mapping[str, Any]) -> Flips:
    return Flips(row[f"{name}_lost"], row[f"{name}_won"], row["samples"], row[f"{name}_mcnemar"])
