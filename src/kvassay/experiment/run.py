"""Running an experiment into its folder: record what is missing, replay what is missing, put results together.

Each unit (one context with all its arms) is written in one step when it is done, so a run may be killed at any
moment; the same command continues and ends with the result of an uninterrupted run. Decode times are measured
last, when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvassay.errors import ExperimentError
from kvassay.experiment.arms import describe_arms
from kvassay.experiment.asked import check_imports, check_loadable, short_model
from kvassay.experiment.checking import opening_of
from kvassay.experiment.code import policy_code
from kvassay.experiment.collect import collect
from kvassay.experiment.disk import disk_line
from kvassay.experiment.drafters import draft_models
from kvassay.experiment.fits import KeptFits
from kvassay.experiment.folder import FIDELITY, MANIFEST, RESOLVED, RunFolder
from kvassay.experiment.memory import memory_plan
from kvassay.experiment.plan import Plan, Unit
from kvassay.experiment.progress import Listener, Silent
from kvassay.experiment.provenance import commit, machine, now
from kvassay.experiment.replaced import changed_code, replaced_lines
from kvassay.experiment.results import Results, dump_manifest, read_manifest
from kvassay.experiment.rows import read_results
from kvassay.experiment.speculating import speculate_run
from kvassay.experiment.timing import time_run
from kvassay.experiment.toml import resolved_toml
from kvassay.experiment.unit import Done, Replay, Session
from kvassay.experiment.workers import Workers, suggested_jobs, threads_for
from kvassay.record.load import load, torch_device
from kvassay.replay.calibration import fitting_once
from kvassay.replay.closed import replay_trace
from kvassay.runtime import release_memory
from kvassay.trace.reader import Trace
from kvassay.workload.sample import Sample

MANIFEST_SCHEMA = 1


def run(
    plan: Plan,
    path: str | Path,
    listener: Listener | None = None,
    replay: Replay = replay_trace,
    jobs: int | None = None,
) -> Results:
    """Run what is left of a plan in the folder `path` and return all its results.

    replay: what replays a context; one of the caller's own is not timed (there is no `latency.parquet` then)
    jobs: units computed side by side, each in a process with its share of the cores (None: as many as cores
        and memory allow; 1: in this process). Results may differ in their last bits between numbers of jobs,
        never between an interrupted and an uninterrupted run of the same number.
    Raises `ModelError` for a model or device that cannot be there, `DoesNotFit` for too little memory,
    `ExperimentError` for a file to import that cannot be and `PolicyError` for a policy whose own environment is not
    there, before anything is written, and `ExperimentError` if another run holds the folder, it holds another
    experiment, or it cannot be written; whatever is finished stays, and a finished run is shown as it was until every
    new context has been computed.
    """
    check_imports(plan.experiment, plan.source)
    for arm in plan.arms:
        for part in arm.policy.parts:
            part.check_ready()
    torch_device(_device(plan))
    for model in (*(model for model, _ in _by_model(plan)), *draft_models(plan.experiment)):
        check_loadable(model)
    folder = RunFolder(path)
    jobs = jobs or (suggested_jobs(plan) if replay is replay_trace else 1)
    hears = listener or Silent()
    for need in memory_plan(plan, jobs):
        hears.note(need.line)
        need.check()
    hears.note(disk_line(plan, folder))
    with folder.locked(), fitting_once(KeptFits(folder, plan.code)):
        earlier = _earlier(folder, plan)
        manifest = _begun(plan, jobs, earlier)
        changed = changed_code(folder, earlier, manifest)
        if changed:
            hears.note(changed)
        for line in replaced_lines(folder, earlier, plan):
            hears.note(line)
        if not earlier.get("finished"):
            _write_start(folder, plan, manifest)
        if jobs == 1:
            done = _units(plan, folder, hears, replay, manifest, Session.compute)
        else:
            done = _side_by_side(plan, folder, hears, replay, manifest, jobs)
        done.sort(key=lambda item: plan.units.index(item.unit))
        manifest["units"] = [_about(item) for item in done]
        _write_start(folder, plan, manifest)  # from here on the tables are being replaced
        if changed:
            (folder.path / FIDELITY).unlink(missing_ok=True)  # it is of the old code
        latency = time_run(plan, folder, done, manifest["machine"], hears.step) if replay is replay_trace else ()
        speculate_run(plan, folder, done, hears.step)
        manifest["finished"] = now()
        found = [(item.unit.trace_set, read_results(folder.unit(item.key))) for item in done]
        collect(folder, plan, found, latency, manifest)
        folder.write_text(folder.path / MANIFEST, dump_manifest(manifest))
    return Results.open(folder.path)


def _earlier(folder: RunFolder, plan: Plan) -> dict[str, Any]:
    """The manifest of this experiment's earlier run in the folder; empty if there is none."""
    about = plan.experiment.experiment
    earlier = read_manifest(folder.path) if (folder.path / MANIFEST).is_file() else {}
    if earlier and earlier["name"] != about.name:
        raise ExperimentError(
            f"{folder.path}: holds the run of '{earlier['name']}', not of '{about.name}'; choose --out"
        )
    return earlier


def _begun(plan: Plan, jobs: int, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """What is known before anything runs; the first start is kept when a run continues."""
    about = plan.experiment.experiment
    return {
        "schema": MANIFEST_SCHEMA,
        "name": about.name,
        "started": earlier.get("started", now()),
        "finished": None,
        "machine": machine(about.device),
        "jobs": jobs,
        "threads_per_job": threads_for(jobs),
        "commit": commit(),
        "code_sha256": plan.code,
        "policy_code": {arm.label: policy_code(arm.policy) for arm in plan.arms},
        "protocol": asdict(plan.protocol),
        "protection": plan.experiment.protection.model_dump(),
        "arms": [asdict(info) for info in describe_arms(plan.arms, plan.experiment)],
        "models": [],
        "calibrations": [],
        "planned_units": len(plan.units),
        "units": [],
        "trace_sets": [],
    }


def _write_start(folder: RunFolder, plan: Plan, manifest: Mapping[str, Any]) -> None:
    """Write the experiment and its manifest, not finished."""
    folder.write_text(folder.path / RESOLVED, resolved_toml(plan.experiment))
    folder.write_text(folder.path / MANIFEST, dump_manifest(manifest))


Compute = Callable[[Session, Unit, Sample, Trace | None], Done | None]
"""Computes a unit now, or queues it and returns None."""


def _units(
    plan: Plan, folder: RunFolder, listener: Listener, replay: Replay, manifest: dict[str, Any], compute: Compute
) -> list[Done]:
    """Units found from earlier runs, and those that `compute` finishes; one model in memory at a time."""
    done = []
    for model, units in _by_model(plan):
        listener.step(f"loading {model}")
        session = Session(load(model, device=_device(plan)), plan, folder, replay, listener.step)
        # All texts first: a workload that cannot be made is refused before anything is recorded.
        samples = [session.sample(unit) for unit in units]
        calibration = session.calibration(model)
        _describe(manifest, session, model, calibration.path.name if calibration else None)
        for unit, sample in zip(units, samples, strict=True):
            listener.begin(unit.title)
            found = session.finished(unit, sample, calibration)
            finished = found or compute(session, unit, sample, calibration)
            if finished is not None:
                done.append(finished)
                listener.end(found is not None)
        del session
        release_memory()
    return done


def _side_by_side(
    plan: Plan, folder: RunFolder, listener: Listener, replay: Replay, manifest: dict[str, Any], jobs: int
) -> list[Done]:
    """Several units at once, each in a process of its own; this one only looks for what is there already."""
    with Workers(plan, folder.path, jobs) as workers:
        done = _units(plan, folder, listener, replay, manifest, lambda session, unit, *_: workers.submit(unit))
        listener.step(f"{jobs} contexts at a time")
        for item in workers.results():
            listener.begin(item.unit.title)
            done.append(item)
            listener.end(False)
    return done


def _by_model(plan: Plan) -> Iterator[tuple[str, Sequence[Unit]]]:
    for model in dict.fromkeys(unit.trace_set.model for unit in plan.units):
        yield model, [unit for unit in plan.units if unit.trace_set.model == model]


def _device(plan: Plan) -> str:
    return plan.experiment.experiment.device


def _describe(manifest: dict[str, Any], session: Session, model: str, calibration: str | None) -> None:
    manifest["models"].append(asdict(session.loaded.identity) | opening_of(session.loaded.tokenizer))
    if calibration is not None:
        manifest["calibrations"].append({"model": short_model(model), "trace": calibration})


def _about(item: Done) -> dict[str, Any]:
    return {
        "model": short_model(item.unit.trace_set.model),
        "trace_set": item.unit.trace_set.label,
        "context": item.unit.index,
        "trace": item.trace,
        "unit": item.key,
        "not_applicable": dict(item.idle),
    }
