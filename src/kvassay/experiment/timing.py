"""The timing stage: decode attention of every arm, measured alone, after all contexts have been replayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import psutil

from kvassay.experiment.asked import short_model
from kvassay.experiment.code import closure, code_sha256
from kvassay.experiment.folder import LATENCY, RunFolder
from kvassay.experiment.plan import Plan, TraceSet
from kvassay.experiment.records import read_notes, read_records, write_records
from kvassay.experiment.unit import Done, Say, Session
from kvassay.kernels.roofs import Roofs, measure_roofs
from kvassay.measure.aggregate import DENSE
from kvassay.measure.latency import LatencyResult, quartiles
from kvassay.record.load import load
from kvassay.replay.closed import replay_trace
from kvassay.replay.compressors import keeps_entries
from kvassay.replay.latency import ArmTimes, time_arms
from kvassay.runtime import release_memory
from kvassay.trace.reader import Trace

KEY = "key"
CODE = "kvassay.replay.latency"
"""What times; changed code times anew."""


def time_run(
    plan: Plan, folder: RunFolder, done: Sequence[Done], machine: Mapping[str, Any], say: Say
) -> tuple[LatencyResult, ...]:
    """Write `latency.parquet`, unless an earlier run timed the same arms and contexts with the same code right here.

    Nothing else may run beside it. Without the stage there are no results, and no file of an earlier one.
    """
    target, wanted = folder.path / LATENCY, plan.experiment.latency
    if not wanted.enabled:
        target.unlink(missing_ok=True)
        return ()
    timed = [item for item in done if item.unit.index < wanted.contexts]
    key = _key(timed, wanted.rounds, machine)
    if read_notes(target).get(KEY) != key:
        rows = list(_timed(plan, folder, timed, machine, say))
        folder.write(target, lambda path: write_records(rows, LatencyResult, path, {KEY: key}))
    return read_records(target, LatencyResult)


def _key(timed: Sequence[Done], rounds: int, machine: Mapping[str, Any]) -> str:
    """Hash of what decides the times; a unit's key already covers trace, arms, protocol and policies."""
    here = {name: machine[name] for name in ("cpu", "cpu_count", "torch_threads", "device")}
    parts = [[item.key for item in timed], rounds, here, code_sha256(closure([CODE]))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _timed(
    plan: Plan, folder: RunFolder, timed: Sequence[Done], machine: Mapping[str, Any], say: Say
) -> Iterator[LatencyResult]:
    """Rows of all trace sets; one model in memory at a time."""
    say("timing: what this machine can do")
    busy = psutil.getloadavg()[0]
    device = plan.experiment.experiment.device
    roofs = measure_roofs(device)
    hardware = machine["device"] if device != "cpu" else f"{machine['cpu']}, {roofs.threads} threads"
    for model in dict.fromkeys(item.unit.trace_set.model for item in timed):
        session = Session(load(model, device=device), plan, folder, replay_trace, say)
        calibration = session.calibration(model)
        for trace_set in (one for one in plan.trace_sets if one.model == model):
            title = f"timing: {short_model(model)}, {trace_set.label}"
            mine = [item for item in timed if item.unit.trace_set == trace_set]
            if keeps_entries(session.loaded.layout):
                say(f"{title}: not timed, compressed entries lie outside the paged cache")
                continue
            say(title)
            arms = [arm for arm in plan.arms if not any(arm.label in item.idle for item in mine)]
            traces = [Trace.open(folder.traces / item.trace) for item in mine]
            found = [
                time_arms(session.loaded, trace, arms, plan.protocol, plan.experiment.latency.rounds, calibration)
                for trace in traces
            ]
            yield from _results(trace_set, [list(times) for times in zip(*found, strict=True)], roofs, hardware, busy)
        del session
        release_memory()


def _results(
    trace_set: TraceSet, arms: Sequence[Sequence[ArmTimes]], roofs: Roofs, hardware: str, busy: float
) -> Iterator[LatencyResult]:
    """One row per arm, from its times on each context; rounds of all contexts together."""
    spread = {times[0].arm: quartiles([second for one in times for second in one.attention]) for times in arms}
    for times in arms:
        arm = times[0].arm
        low, median, high = spread[arm]
        count, flops = fmean(one.read_bytes for one in times), fmean(one.flops for one in times)
        yield LatencyResult(
            model=short_model(trace_set.model),
            trace_set=trace_set.label,
            arm=arm,
            context_tokens=round(fmean(one.context_tokens for one in times)),
            rounds=sum(len(one.attention) for one in times),
            attention_seconds=median,
            attention_low=low,
            attention_high=high,
            policy_seconds=fmean(one.policy for one in times),
            dense_seconds=spread[DENSE].median,
            read_bytes=count,
            flops=flops,
            gigabytes_per_second=count / median / 1e9,
            bandwidth_fraction=count / median / roofs.bandwidth,
            matrix_fraction=flops / median / roofs.matrix_rate,
            hardware=hardware,
            load_average=busy,
        )
