"""The run folder: where each thing lies, one writer at a time, and files that are whole or not there.

manifest.json   machine, versions, models, arms, traces, times
resolved.toml   the experiment with every default written out
traces/         recorded contexts, by key
units/          one parquet per context with all arms, by key: what a later run continues from
samples.parquet every question under every arm
cells.parquet   one row per trace set and arm
checks.json     what is wrong or odd with them, by name
latency.parquet decode time of every arm, measured on this machine
speculation/    one parquet per context with what was accepted of drafts, if that is measured
speculation.parquet all of them
fidelity.parquet attention error by layer and head in the open loop, if `kvassay fidelity` was asked for it
long/           one parquet per layer of a long row with all arms, by key: what a later run continues from
long.parquet    one row per layer of each long row and arm, if the experiment has `[[long]]`
cost.parquet    decode time of every arm on other hardware, modelled
schema.json     every column of these files: type, unit, denominator, direction, measured or modelled
gate.toml       the gate that judges the run, with a copy of its log, gate-log.jsonl
verdicts.json   what the gate says of every arm
report.html     the same for people, and report.md without charts
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from kvassay.errors import ExperimentError

MANIFEST = "manifest.json"
RESOLVED = "resolved.toml"
SAMPLES = "samples.parquet"
CELLS = "cells.parquet"
CHECKS = "checks.json"
LATENCY = "latency.parquet"
COST = "cost.parquet"
FIDELITY = "fidelity.parquet"
LONG = "long.parquet"
SCHEMA = "schema.json"
SPECULATION = "speculation.parquet"
GATE = "gate.toml"
"""What judges the run, with a copy of its log beside it: what the run was started with."""
REPORT = "report.html"
MARKDOWN = "report.md"
TEMPORARY = ".tmp-"
"""Prefix of files being written; whatever is left of them belongs to a run that was killed."""


class RunFolder:
    """A run folder by its path. Write only inside `locked()`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.traces = self.path / "traces"
        self.units = self.path / "units"
        self.speculation = self.path / "speculation"
        self.long_rows = self.path / "long"
        self.fits = self.path / "fits"

    def unit(self, key: str) -> Path:
        """File of a finished unit."""
        return self.units / f"{key}.parquet"

    def long_row(self, key: str) -> Path:
        """File of one layer of a long row under all arms."""
        return self.long_rows / f"{key}.parquet"

    def drafted(self, key: str) -> Path:
        """File of a context's speculative acceptance."""
        return self.speculation / f"{key}.parquet"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, hold it alone, and clear away what a killed run left half written.

        Raises `ExperimentError` if another run holds it, or it cannot be written.
        """
        with os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(self.path / ".lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                raise ExperimentError(
                    f"{self.path}: another run is writing here; wait for it or choose --out"
                ) from None
        try:
            self._clean()
            yield
        finally:
            lock.release()

    def _clean(self) -> None:
        # Trace recordings grow in hidden siblings of their final folder; both kinds begin with a dot.
        for folder in (self.path, self.units, self.traces, self.speculation, self.long_rows, self.fits):
            for left in folder.glob(".*"):
                if left.name == ".lock":
                    continue
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)

    def write(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Let `fill` write a temporary file, force it to disk and put it in place in one step.

        Raises `ExperimentError`, naming file and reason, if the disk is full or the folder read-only.
        """
        from kvassay.trace.files import sync  # late: it brings torch, which listing runs does without

        temporary = target.with_name(f"{TEMPORARY}{target.name}")
        with os_errors(target):
            target.parent.mkdir(exist_ok=True)
            try:
                fill(temporary)
                sync(temporary)
                temporary.replace(target)
                sync(target.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def write_text(self, target: Path, text: str) -> None:
        """`write` for text."""

        def fill(path: Path) -> None:
            path.write_text(text, encoding="utf-8")

        self.write(target, fill)


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into an `ExperimentError` that names file and reason, and free bytes if the disk is full."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            from kvassay.trace.files import free_bytes

            reason += f" ({free_bytes(path)} bytes free); free some and run the same command to continue"
        raise ExperimentError(f"{error.filename or path}: cannot be written: {reason}") from error
