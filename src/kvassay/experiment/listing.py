"""The run folders below a folder, each in a few words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import MANIFEST, RunFolder
from kvassay.experiment.results import read_manifest


@dataclass(frozen=True)
class RunLine:
    """One run folder."""

    path: Path
    state: str
    """`finished`, `3 of 8 units`, or why it cannot be read."""
    models: str
    arms: int
    started: str


def list_runs(folder: Path) -> list[RunLine]:
    """Every run folder directly in `folder`, or `folder` itself, the newest first; `ExperimentError` if missing."""
    if not folder.is_dir():
        raise ExperimentError(f"{folder}: no such folder; runs go to ./runs unless --out says otherwise")
    found = [folder] if (folder / MANIFEST).is_file() else [p for p in folder.iterdir() if (p / MANIFEST).is_file()]
    return sorted((_line(path) for path in found), key=lambda line: (line.started, line.path.name), reverse=True)


def _line(path: Path) -> RunLine:
    try:
        manifest = read_manifest(path)
        units = len(list(RunFolder(path).units.glob("[!.]*.parquet")))
        state = "finished" if manifest["finished"] else f"{units} of {manifest['planned_units']} units"
        models = ", ".join(model["name"] for model in manifest["models"]) or "-"
        return RunLine(path, state, models, len(manifest["arms"]), manifest["started"])
    except (ExperimentError, KeyError, TypeError) as error:
        return RunLine(path, f"damaged: {error}", "-", 0, "")
