"""A run folder for others: its numbers, verdicts and report, without the recorded contexts it was computed from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import RunFolder, os_errors
from kvassay.experiment.results import Results


def export_results(results: Results, target: Path) -> list[Path]:
    """Copy what a finished run folder says into `target`; returns the files written.

    `kvassay show`, `gate` and `compare` read the copy as they read the run; `run` does not continue it, since traces
    and finished units stay behind. Files of an earlier export are replaced, each in one step.
    Raises `ExperimentError` if `target` holds a run that can be continued, or cannot be written.
    """
    folder, written = RunFolder(target), []
    if folder.units.exists():
        raise ExperimentError(f"{target}: holds a run and its units; choose another folder")
    with os_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    for file in sorted(results.path.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            copy = target / file.name
            folder.write(copy, _copying(file))
            written.append(copy)
    return written


def _copying(file: Path) -> Callable[[Path], None]:
    def fill(target: Path) -> None:
        shutil.copyfile(file, target)

    return fill
