"""The run folders below a folder, each in a few words."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import LONG, MANIFEST, RESOLVED, RunFolder
from kvassay.experiment.records import read_records
from kvassay.experiment.results import holds_long_only, read_manifest
from kvassay.measure.long import LongRow


@dataclass(frozen=True)
class RunLine:
    """One run folder."""

    path: Path
    state: str
    """`finished`, `3 of 8 units`, `long rows, finished`, or why it cannot be read."""
    models: str
    """Of long rows, the models whose shape they have."""
    arms: int
    started: str
    """In UTC; of long rows alone, when their experiment was written into the folder."""


def list_runs(folder: Path) -> list[RunLine]:
    """Every run folder directly in `folder`, or `folder` itself, the newest first; `ExperimentError` if missing."""
    if not folder.is_dir():
        raise ExperimentError(f"{folder}: no such folder; runs go to ./runs unless --out says otherwise")
    found = [folder] if _is_run(folder) else [path for path in folder.iterdir() if _is_run(path)]
    return sorted((_line(path) for path in found), key=lambda line: (line.started, line.path.name), reverse=True)


def _is_run(path: Path) -> bool:
    return (path / MANIFEST).is_file() or holds_long_only(path)


def _line(path: Path) -> RunLine:
    try:
        if holds_long_only(path):
            return _long_line(path)
        manifest = read_manifest(path)
        units = len(list(RunFolder(path).units.glob("[!.]*.parquet")))
        state = "finished" if manifest["finished"] else f"{units} of {manifest['planned_units']} units"
        models = ", ".join(model["name"] for model in manifest["models"]) or "-"
        return RunLine(path, state, models, len(manifest["arms"]), manifest["started"])
    except (ExperimentError, KeyError, TypeError) as error:
        return RunLine(path, f"damaged: {error}", "-", 0, "")


def _long_line(path: Path) -> RunLine:
    layers = sorted(RunFolder(path).long_rows.glob("[!.]*.parquet"))
    finished = (path / LONG).is_file()
    rows = [row for file in ([path / LONG] if finished else layers) for row in read_records(file, LongRow)]
    state = "long rows, finished" if finished else f"long rows, layers done: {len(layers)}"
    models = ", ".join(dict.fromkeys(row.row for row in rows)) or "-"
    written = path / RESOLVED
    started = (
        datetime.fromtimestamp(written.stat().st_mtime, UTC).isoformat("T", "seconds") if written.is_file() else ""
    )
    return RunLine(path, state, models, len({row.arm for row in rows}), started)
