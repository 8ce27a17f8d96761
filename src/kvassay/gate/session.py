"""Judging a run folder: the gate is pinned before anything is computed, and the verdicts are written beside the cells.

A changed threshold recomputes no cell. A gate that was declared or changed after cells were computed is refused
unless the judgement is to be exploratory, and then everything says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvassay.errors import GateError
from kvassay.experiment.folder import CELLS, GATE, MANIFEST, RunFolder
from kvassay.experiment.provenance import now
from kvassay.experiment.results import Results, read_manifest
from kvassay.gate.chain import LOG, dump
from kvassay.gate.declare import digest_of
from kvassay.gate.evidence import gather
from kvassay.gate.judge import judge
from kvassay.gate.standing import Standing, standing
from kvassay.measure.verdict import VERDICTS, Judgement, dump_judgement, load_judgement

EXPLORED = "gate-exploratory.toml"
"""The gate of an exploratory judgement, in the run folder; it never takes the place of `gate.toml`."""


def pin(file: Path, run: Path, *, exploratory: bool) -> None:
    """Put a gate into a run folder before the run begins or goes on; `GateError` if it may not judge it.

    An exploratory judgement pins nothing.
    """
    manifest = read_manifest(run) if (run / MANIFEST).is_file() else None
    found = standing(file, run, manifest)
    if exploratory:
        return
    if found.trouble:
        raise GateError(_refusal(found))
    folder = RunFolder(run)
    with folder.locked():
        _keep(folder, found)


def pinned(run: Path) -> bool:
    """Whether a gate lies in the run folder."""
    return (run / GATE).is_file()


def judge_run(results: Results, file: Path | None = None, *, exploratory: bool = False) -> Judgement:
    """Judge a finished run and write `verdicts.json`, unless that says the same already; `file` None: by the gate in
    the run folder.

    Raises `GateError` if there is no gate, or one that does not bind this run and `exploratory` is not asked for.
    """
    source = results.path / GATE if file is None else file
    if file is None and not pinned(results.path):
        raise GateError(f"{results.path}: the run was started without a gate; name one with --gate")
    found = standing(source, results.path, results.manifest)
    if found.trouble and not exploratory:
        raise GateError(_refusal(found))
    judgement, earlier = make_judgement(results, found, exploratory=exploratory), judged_before(results.path)
    if earlier is not None and earlier == replace(judgement, judged=earlier.judged, notes=earlier.notes):
        return earlier  # notes: a copied gate has no commit of its own to speak of
    folder = RunFolder(results.path)
    with folder.locked():
        if exploratory:
            _copy(folder, found.file, folder.path / EXPLORED)
        else:
            _keep(folder, found)
        folder.write_text(folder.path / VERDICTS, dump_judgement(judgement))
    return judgement


def judged_before(run: Path) -> Judgement | None:
    """The judgement in a run folder; None if there is none, or a damaged one, which judging again replaces."""
    try:
        return load_judgement(run)
    except GateError:
        return None


def make_judgement(results: Results, found: Standing, *, exploratory: bool) -> Judgement:
    """The judgement of a run by a gate, wherever the two stand; nothing is written."""
    judged = judge(found.gate, results.arms, gather(results), exploratory=exploratory)
    warning = ""
    if exploratory:
        why = found.trouble or "asked for as such"
        warning = f"EXPLORATORY, not a test of anything declared beforehand: {why}"
    return Judgement(
        gate=found.gate.gate.name,
        gate_sha256=found.sha256,
        declared=found.declared,
        judged=now(),
        exploratory=exploratory,
        warning=warning,
        cells_sha256=digest_of(results.path / CELLS),
        verdicts=judged.verdicts,
        excluded=judged.excluded,
        notes=(*judged.notes, *_notes(found)),
    )


def _notes(found: Standing) -> list[str]:
    """What git and the log say beside: many gates declared leave a choice among them afterwards."""
    others = sorted({entry.gate for entry in found.log} - {found.gate.gate.name})
    also = [f"the same log declares other gates: {', '.join(others)}"] if others else []
    return [*also, *([found.note] if found.note else [])]


def _keep(folder: RunFolder, found: Standing) -> None:
    """Copy gate and log into the run folder, unless that is where they are from."""
    if found.file.resolve() == (folder.path / GATE).resolve():
        return
    _copy(folder, found.file, folder.path / GATE)
    folder.write_text(folder.path / LOG, dump(found.log))


def _copy(folder: RunFolder, file: Path, target: Path) -> None:
    """Byte by byte, so that its hash is the declared one."""

    def fill(path: Path) -> None:
        path.write_bytes(file.read_bytes())

    folder.write(target, fill)


def _refusal(found: Standing) -> str:
    return f"{found.file}: {found.trouble}; --exploratory judges all the same, and says so"
