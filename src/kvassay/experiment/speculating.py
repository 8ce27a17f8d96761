"""The speculation stage: acceptance on every context, once all of them have been replayed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kvassay.experiment.asked import short_model
from kvassay.experiment.code import closure, code_sha256
from kvassay.experiment.drafters import draft_models, speculating_arms
from kvassay.experiment.folder import SPECULATION, RunFolder
from kvassay.experiment.plan import Plan
from kvassay.experiment.records import read_notes, read_records, write_records
from kvassay.experiment.unit import Done, Say, Session
from kvassay.measure.acceptance import AcceptanceResult
from kvassay.record.load import LoadedModel, load
from kvassay.replay.closed import replay_trace
from kvassay.replay.drafting import Speculation
from kvassay.replay.speculation import replay_speculation
from kvassay.runtime import release_memory
from kvassay.trace.reader import Trace

KEY = "key"
CODE = "kvassay.replay.speculation"
"""What drafts and verifies; changed code measures anew."""


def speculate_run(plan: Plan, folder: RunFolder, done: Sequence[Done], say: Say) -> None:
    """Write `speculation.parquet` from one file per context, each computed once and kept when a run continues.

    Without drafters there is no file, nor one of an earlier run.
    """
    target = folder.path / SPECULATION
    if not plan.experiment.speculation.drafters:
        target.unlink(missing_ok=True)
        return
    code, parts = code_sha256(closure([CODE])), list[Path]()
    for model in dict.fromkeys(item.unit.trace_set.model for item in done):
        mine = [item for item in done if item.unit.trace_set.model == model]
        parts += _measured(plan, folder, model, mine, code, say)
    rows = [row for part in parts for row in read_records(part, AcceptanceResult)]
    folder.write(target, lambda path: write_records(rows, AcceptanceResult, path))


def _measured(plan: Plan, folder: RunFolder, model: str, done: Sequence[Done], code: str, say: Say) -> list[Path]:
    """The file of each context of one model, found or computed."""
    device = plan.experiment.experiment.device
    drafts = {name: load(name, device=device) for name in draft_models(plan.experiment)}
    keys = [_key(plan, item, drafts, code) for item in done]
    lacking = [(i, key) for i, key in zip(done, keys, strict=True) if read_notes(folder.drafted(key)).get(KEY) != key]
    if lacking:
        session = Session(load(model, device=device), plan, folder, replay_trace, say)
        calibration = session.calibration(model)
        for item, key in lacking:
            _write(folder, key, item, _speculate(session, item, drafts, calibration))
        del session
        release_memory()
    return [folder.drafted(key) for key in keys]


def _write(folder: RunFolder, key: str, item: Done, rows: Sequence[AcceptanceResult]) -> None:
    notes = {KEY: key, "trace": item.trace}
    folder.write(folder.drafted(key), lambda path: write_records(rows, AcceptanceResult, path, notes))


def _speculate(
    session: Session, item: Done, drafts: dict[str, LoadedModel], calibration: Trace | None
) -> list[AcceptanceResult]:
    plan = session.plan

    def say(doing: str) -> None:
        session.say(f"speculation, {item.unit.title}: {doing}")

    return replay_speculation(
        session.loaded,
        Trace.open(session.folder.traces / item.trace),
        speculating_arms(plan.experiment, plan.arms),
        plan.protocol,
        _settings(plan),
        {short_model(name): drafts.get(name) for name in plan.experiment.speculation.drafters},
        say,
        calibration=calibration,
    )


def _settings(plan: Plan) -> Speculation:
    table = plan.experiment.speculation
    return Speculation(**{field.name: getattr(table, field.name) for field in dataclasses.fields(Speculation)})


def _key(plan: Plan, item: Done, drafts: dict[str, LoadedModel], code: str) -> str:
    """Hash of what decides the rows; a unit's key already covers trace, arms, protocol and policies."""
    parts = [
        item.key,
        [arm.label for arm in speculating_arms(plan.experiment, plan.arms)],
        dataclasses.asdict(_settings(plan)),
        plan.experiment.speculation.drafters,
        [[name, draft.identity.weights_sha256] for name, draft in drafts.items()],
        code,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
