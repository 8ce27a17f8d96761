"""Running an experiment into its folder: record what is missing, replay what is missing, put results together.

Each unit (one context with all its arms) is written in one step when it is done, so a run may be killed at any
moment; the same command continues and ends with the result of an uninterrupted run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from kvassay.errors import ExperimentError
from kvassay.experiment.arms import describe_arms
from kvassay.experiment.calibrate import calibration_name, calibration_sample
from kvassay.experiment.collect import collect
from kvassay.experiment.folder import MANIFEST, RESOLVED, RunFolder
from kvassay.experiment.plan import Plan, Unit, short_model, trace_folder, unit_key
from kvassay.experiment.progress import Listener, Silent
from kvassay.experiment.provenance import commit, machine, now
from kvassay.experiment.results import Results, dump_manifest, read_manifest
from kvassay.experiment.rows import read_results, write_results
from kvassay.experiment.toml import resolved_toml
from kvassay.measure.result import BranchResult
from kvassay.record.load import LoadedModel, load
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import fitting_once
from kvassay.replay.closed import replay_trace
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build
from kvassay.workload.sample import Sample

MANIFEST_SCHEMA = 1


class Replay(Interface):
    """What replays one trace, as `replay_trace` does."""

    def __call__(
        self,
        loaded: LoadedModel,
        trace: Trace,
        arms: Sequence[Arm],
        protocol: Protocol,
        progress: Callable[[str], None],
        /,
        *,
        calibration: Trace | None,
    ) -> list[BranchResult]:
        """One row per question and arm."""


@dataclass(frozen=True)
class Done:
    """A finished unit: where its rows and its trace are."""

    unit: Unit
    key: str
    trace: str
    """Name of the trace folder."""


@dataclass(frozen=True)
class _Session:
    """What the units of one model share."""

    loaded: LoadedModel
    plan: Plan
    folder: RunFolder
    listener: Listener
    replay: Replay


def run(plan: Plan, path: str | Path, listener: Listener | None = None, replay: Replay = replay_trace) -> Results:
    """Run what is left of a plan in the folder `path` and return all its results.

    Raises `ExperimentError` if another run holds the folder or it cannot be written; whatever is finished stays.
    """
    folder = RunFolder(path)
    with folder.locked(), fitting_once():
        manifest = _start(folder, plan)
        done: list[Done] = []
        for model in dict.fromkeys(unit.trace_set.model for unit in plan.units):
            units = [unit for unit in plan.units if unit.trace_set.model == model]
            done += _run_model(model, units, plan, folder, listener or Silent(), replay, manifest)
        manifest["units"] = [_about(item) for item in done]
        manifest["finished"] = now()
        collect(folder, plan, [(item.unit.trace_set, read_results(folder.unit(item.key))) for item in done], manifest)
        folder.write_text(folder.path / MANIFEST, dump_manifest(manifest))
    return Results.open(folder.path)


def _start(folder: RunFolder, plan: Plan) -> dict[str, Any]:
    """Write what is known before anything runs; the first start is kept when a run continues."""
    about = plan.experiment.experiment
    earlier = read_manifest(folder.path) if (folder.path / MANIFEST).is_file() else {}
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "name": about.name,
        "started": earlier.get("started", now()),
        "finished": None,
        "machine": machine(about.device),
        "commit": commit(),
        "code_sha256": plan.code,
        "protocol": asdict(plan.protocol),
        "protection": plan.experiment.protection.model_dump(),
        "arms": [asdict(info) for info in describe_arms(plan.arms, plan.experiment)],
        "models": [],
        "calibrations": [],
        "planned_units": len(plan.units),
        "units": [],
        "trace_sets": [],
    }
    folder.write_text(folder.path / RESOLVED, resolved_toml(plan.experiment))
    folder.write_text(folder.path / MANIFEST, dump_manifest(manifest))
    return manifest


def _run_model(
    model: str,
    units: Sequence[Unit],
    plan: Plan,
    folder: RunFolder,
    listener: Listener,
    replay: Replay,
    manifest: dict[str, Any],
) -> list[Done]:
    """All units of one model; the model is let go of before the next is loaded."""
    listener.step(f"loading {model}")
    loaded = load(model, device=plan.experiment.experiment.device)
    manifest["models"].append(asdict(loaded.identity))
    # All texts first: a workload that cannot be made is refused before anything is recorded.
    samples = [make_sample(loaded, unit, plan) for unit in units]
    session = _Session(loaded, plan, folder, listener, replay)
    calibration = _calibration(session, model)
    if calibration is not None:
        manifest["calibrations"].append({"model": short_model(model), "trace": calibration.path.name})
    done = []
    for unit, sample in zip(units, samples, strict=True):
        listener.begin(unit.title)
        item, found = _run_unit(session, unit, sample, calibration)
        done.append(item)
        listener.end(found)
    del session, loaded
    gc.collect()
    return done


def _calibration(session: _Session, model: str) -> Trace | None:
    """The trace that this model's offline policies are fitted on; None if there are none."""
    wanted = session.plan.calibration
    if wanted is None:
        return None
    sample = calibration_sample(session.loaded, wanted)
    return _trace(session, calibration_name(model, sample), sample)


def _run_unit(session: _Session, unit: Unit, sample: Sample, calibration: Trace | None) -> tuple[Done, bool]:
    """One unit, and whether it was there already."""
    plan, folder = session.plan, session.folder
    trace = _trace(session, unit.trace_name, sample)
    key = unit_key(trace, plan, calibration)
    done = Done(unit, key, trace.path.name)
    if _readable(folder.unit(key)):
        return done, True
    rows = session.replay(
        session.loaded, trace, plan.arms, plan.protocol, session.listener.step, calibration=calibration
    )
    _check_rows(rows, trace, plan)
    notes = {"unit": key, "trace": trace.path.name, "code_sha256": plan.code}
    folder.write(folder.unit(key), lambda path: write_results(rows, path, notes))
    return done, False


def make_sample(loaded: LoadedModel, unit: Unit, plan: Plan) -> Sample:
    """The unit's context and questions."""
    workload = unit.trace_set.workload
    params: dict[str, Any] = dict(workload.params)
    return build(
        workload.name,
        loaded.tokenizer,
        workload.length,
        seed=plan.experiment.experiment.seed,
        index=unit.index,
        questions=workload.questions,
        query_aware=workload.query_aware,
        **params,
    )


def _trace(session: _Session, name: str, sample: Sample) -> Trace:
    """The trace of a sample: recorded now, or by an earlier run."""
    loaded, options = session.loaded, session.plan.options
    path = session.folder.traces / trace_folder(name, loaded.identity, sample, options)
    if path.is_dir():
        return Trace.open(path)

    def say(done: int, total: int) -> None:
        session.listener.step(f"recording {done}/{total} tokens")

    return record_sample(loaded, sample, path, options, say)


def _readable(path: Path) -> bool:
    """Whether a unit is there and whole; a damaged one is computed again."""
    if not path.is_file():
        return False
    try:
        return bool(read_results(path))
    except ExperimentError:
        return False


def _check_rows(rows: Sequence[BranchResult], trace: Trace, plan: Plan) -> None:
    """Refuse an incomplete answer of the replay rather than store it."""
    wanted = {(branch, arm.label) for branch in range(len(trace.branches)) for arm in plan.arms}
    found = [(row.branch, row.arm) for row in rows]
    if set(found) != wanted or len(found) != len(wanted):
        lacking = sorted(wanted - set(found))
        raise ExperimentError(
            f"{trace.path.name}: the replay gave {len(found)} rows for {len(wanted)} questions x arms"
            + (f"; question {lacking[0][0]} under '{lacking[0][1]}' is missing" if lacking else "")
        )


def _about(item: Done) -> dict[str, Any]:
    return {
        "model": short_model(item.unit.trace_set.model),
        "trace_set": item.unit.trace_set.label,
        "context": item.unit.index,
        "trace": item.trace,
        "unit": item.key,
    }
