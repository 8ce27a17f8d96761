"""Reading a run folder: the manifest and the cells, typed, for reports and gates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvassay.errors import ExperimentError
from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import CELLS, MANIFEST, SAMPLES
from kvassay.experiment.rows import cell_from_row, from_row, read_table
from kvassay.measure.aggregate import Cell
from kvassay.measure.result import BranchResult


@dataclass(frozen=True)
class SetResult:
    """One model on one workload: a cell per arm."""

    model: str
    label: str
    workload: str
    length: int
    """Tokens per context."""
    contexts: int
    questions: int
    """Per context."""
    query_aware: bool
    """Whether the question was visible when the cache was compressed."""
    cells: tuple[Cell, ...]
    floor: Mapping[str, Any] | None = None
    """`min_top1`, `max_nll` and `passed`: what dense must manage here before any arm may be judged."""
    missing: tuple[str, ...] = ()
    """What was left out of the averages, one line each."""

    def cell(self, arm: str) -> Cell | None:
        """The cell of an arm, if it ran here."""
        return next((cell for cell in self.cells if cell.arm == arm), None)


@dataclass(frozen=True)
class Results:
    """A finished run."""

    path: Path
    manifest: Mapping[str, Any]
    arms: Mapping[str, ArmInfo]
    """By label, in the order in which they ran."""
    sets: tuple[SetResult, ...]

    @classmethod
    def open(cls, path: str | Path) -> Results:
        """Read a run folder; `ExperimentError` if it is none, or its run has not finished."""
        folder = Path(path)
        manifest = read_manifest(folder)
        if not manifest.get("finished"):
            raise ExperimentError(f"{folder}: this run has not finished; run the same command again to continue it")
        try:
            arms = {item["label"]: _arm(item) for item in manifest["arms"]}
            rows = read_table(folder / CELLS)
            sets = tuple(_set(item, rows) for item in manifest["trace_sets"])
        except (KeyError, TypeError) as error:
            raise ExperimentError(f"{folder / MANIFEST}: not as this kvassay writes it: {error!r}") from None
        return cls(folder, manifest, arms, sets)

    def samples(self) -> list[BranchResult]:
        """Every question under every arm."""
        return [from_row(row) for row in read_table(self.path / SAMPLES)]


def as_data(results: Results) -> dict[str, Any]:
    """Manifest and cells as plain JSON data: one object per trace set and arm, as in `cells.parquet`."""
    return {"manifest": dict(results.manifest), "cells": read_table(results.path / CELLS)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; `ExperimentError` if there is none or it is damaged."""
    file = folder / MANIFEST
    if not file.is_file():
        what = "no such folder" if not folder.is_dir() else f"no {MANIFEST} in it, so it is not a run folder"
        raise ExperimentError(f"{folder}: {what}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{file}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ExperimentError(f"{file}: holds no object")
    return data


def dump_manifest(manifest: Mapping[str, Any]) -> str:
    """The manifest as text."""
    return json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"


def _arm(item: Mapping[str, Any]) -> ArmInfo:
    lists = {name: tuple(item[name]) for name in ("approximates", "gaps", "deviations")}
    return ArmInfo(**{**item, **lists})


def _set(item: Mapping[str, Any], rows: list[dict[str, Any]]) -> SetResult:
    mine = [row for row in rows if (row["model"], row["trace_set"]) == (item["model"], item["trace_set"])]
    return SetResult(
        model=item["model"],
        label=item["trace_set"],
        workload=item["name"],
        length=item["length"],
        contexts=item["contexts"],
        questions=item["questions"],
        query_aware=item["query_aware"],
        cells=tuple(cell_from_row(row) for row in mine),
        floor=item["floor"],
        missing=tuple(item["missing"]),
    )
