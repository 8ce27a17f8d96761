"""Reading a run folder: the manifest and the cells, typed, for reports and gates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvassay.errors import ExperimentError
from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.findings import load_findings
from kvassay.experiment.folder import (
    CELLS,
    CHECKS,
    COST,
    FIDELITY,
    LATENCY,
    LONG,
    MANIFEST,
    RESOLVED,
    SAMPLES,
    SPECULATION,
    RunFolder,
)
from kvassay.experiment.records import read_records
from kvassay.experiment.rows import cell_from_row, from_row, read_columns, read_table
from kvassay.measure.acceptance import AcceptanceResult
from kvassay.measure.aggregate import Cell
from kvassay.measure.checks import Finding
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.result import BranchResult, LayerFidelity


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
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Arms that had nothing to do on some context, and why; they have no rows there."""
    missing: tuple[str, ...] = ()
    """What was left out of the averages, one line each."""
    findings: tuple[Finding, ...] = ()
    """What the checks found, the gravest first."""

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
            found = load_findings(folder / CHECKS)
            sets = tuple(_set(item, rows, found) for item in manifest["trace_sets"])
        except (KeyError, TypeError) as error:
            raise ExperimentError(f"{folder / MANIFEST}: not as this kvassay writes it: {error!r}") from None
        return cls(folder, manifest, arms, sets)

    def samples(self) -> list[BranchResult]:
        """Every question under every arm."""
        return [from_row(row) for row in read_table(self.path / SAMPLES)]

    def first_traces(self) -> dict[tuple[str, str], str]:
        """Name of the first recorded context of each (model, trace set)."""
        found: dict[tuple[str, str], str] = {}
        for unit in self.manifest["units"]:
            found.setdefault((unit["model"], unit["trace_set"]), unit["trace"])
        return found

    def columns(self, *names: str) -> dict[str, list[Any]]:
        """Some columns of `samples.parquet`, in its order; those that an older run did not write are left out."""
        return read_columns(self.path / SAMPLES, names)

    @cached_property
    def latency(self) -> tuple[LatencyResult, ...]:
        """Measured decode times, one per trace set and arm; none if the run did not time any."""
        return read_records(self.path / LATENCY, LatencyResult)

    @cached_property
    def speculation(self) -> tuple[AcceptanceResult, ...]:
        """Acceptance in speculative decoding, one per question, arm, mode, drafter and k; none if not measured."""
        return read_records(self.path / SPECULATION, AcceptanceResult)

    @cached_property
    def fidelity(self) -> tuple[LayerFidelity, ...]:
        """Open loop, one per question, arm and layer of the contexts screened; none if the run was not screened."""
        return read_records(self.path / FIDELITY, LayerFidelity)

    @cached_property
    def cost(self) -> tuple[CostResult, ...]:
        """Modelled decode times, one per trace set, arm and hardware."""
        return read_records(self.path / COST, CostResult)


def as_data(results: Results) -> dict[str, Any]:
    """The manifest, the findings and the rows of its parquet files, but for single questions, as plain JSON data."""
    return {
        "manifest": dict(results.manifest),
        "cells": read_table(results.path / CELLS),
        "checks": [
            {"model": found.model, "trace_set": found.label, **asdict(finding)}
            for found in results.sets
            for finding in found.findings
        ],
        "latency": [asdict(row) for row in results.latency],
        "cost": [asdict(row) for row in results.cost],
        "speculation": [asdict(row) for row in results.speculation],
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder; `ExperimentError` if there is none or it is damaged."""
    file = folder / MANIFEST
    refuse_long_only(folder, "no cells, samples or verdict")
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


def holds_long_only(folder: Path) -> bool:
    """Whether a run folder holds long rows, finished or not, and no run of workloads."""
    begun = (folder / RESOLVED).is_file() and RunFolder(folder).long_rows.is_dir()
    return not (folder / MANIFEST).is_file() and (begun or (folder / LONG).is_file())


def refuse_long_only(folder: Path, lacking: str) -> None:
    """`ExperimentError` if a run folder holds long rows only; `lacking` says what those do not have."""
    if not holds_long_only(folder):
        return
    if not (folder / LONG).is_file():
        raise ExperimentError(
            f"{folder}: holds long rows only, and has not finished; run the same command again to continue it"
        )
    raise ExperimentError(
        f"{folder}: holds long rows only, which have {lacking}; kvassay show (--json) prints what they have"
    )


def dump_manifest(manifest: Mapping[str, Any]) -> str:
    """The manifest as text."""
    return json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"


def _arm(item: Mapping[str, Any]) -> ArmInfo:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    return ArmInfo(**fields)


def _set(
    item: Mapping[str, Any], rows: list[dict[str, Any]], findings: Mapping[tuple[str, str], tuple[Finding, ...]]
) -> SetResult:
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
        not_applicable=item.get("not_applicable", {}),
        findings=findings.get((item["model"], item["trace_set"]), ()),
    )
