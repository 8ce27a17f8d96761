"""Was the gate there before the results? What the log, the run's start and git say, in one line if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvassay.experiment.folder import GATE, RunFolder
from kvassay.gate.chain import LOG, Entry, verify
from kvassay.gate.declare import digest_of
from kvassay.gate.order import git_order
from kvassay.gate.schema import Gate, load_gate


@dataclass(frozen=True)
class Standing:
    """A gate against a run."""

    gate: Gate
    file: Path
    sha256: str
    log: tuple[Entry, ...]
    declared: str | None
    """When the file as it is was declared (UTC); None if never."""
    trouble: str
    """Why the gate does not bind this run, on one line; empty if it does."""
    note: str = ""
    """What git says, where it says anything."""


def standing(file: Path, run: Path, manifest: Mapping[str, Any] | None) -> Standing:
    """Where a gate stands to a run; `manifest` None: nothing has been computed yet.

    Raises `GateError` for a gate or a log that is not sound.
    """
    gate, digest = load_gate(file), digest_of(file)
    path = file.parent / LOG
    log = verify(path) if path.is_file() else ()
    mine = [entry for entry in log if entry.gate == gate.gate.name]
    same = [entry for entry in mine if entry.sha256 == digest]
    trouble, note = _by_log(gate.gate.name, mine, same, began(run, manifest)), ""
    if not trouble:
        trouble = _by_pin(file, run, digest)
    if not trouble and manifest is not None and file.parent.resolve() != run.resolve():
        order = git_order(file, run, manifest)
        trouble = f"{file.name}: {order.reason}" if order.state == "not_before" else ""
        note = f"{file.name}: {order.reason}" if not trouble else ""
    return Standing(gate, file, digest, log, same[0].time if same else None, trouble, note)


def began(run: Path, manifest: Mapping[str, Any] | None) -> str | None:
    """When cells began to be computed (UTC, ISO 8601 to the second): the run's start, or an earlier unit's file.

    None if nothing has been computed yet.
    """
    times = [] if manifest is None else [datetime.fromisoformat(manifest["started"])]
    units = RunFolder(run).units.glob("*.parquet")
    times += [datetime.fromtimestamp(unit.stat().st_mtime, UTC) for unit in units]
    return min(times).isoformat(timespec="seconds") if times else None


def _by_log(name: str, mine: Sequence[Entry], same: Sequence[Entry], started: str | None) -> str:
    if not mine:
        return f"gate '{name}' was never declared; `kvassay gate declare` does it, before a run"
    if not same:
        return f"gate '{name}' was changed since it was declared ({mine[-1].time})"
    if started is None:
        return "" if mine[-1] in same else f"gate '{name}' was declared in another form since ({mine[-1].time})"
    force = [entry for entry in mine if entry.time <= started]
    if not any(entry in force for entry in same):
        return f"gate '{name}' was declared at {same[0].time}, after cells began to be computed ({started})"
    if force[-1] not in same:
        return f"another form of gate '{name}' was in force when the run began (declared at {force[-1].time})"
    return ""


def _by_pin(file: Path, run: Path, digest: str) -> str:
    """A run that was started with a gate is judged by that gate."""
    pinned = run / GATE
    if not pinned.is_file() or pinned.resolve() == file.resolve():
        return ""
    return "" if digest_of(pinned) == digest else "the run was started with another gate, which lies in its folder"
