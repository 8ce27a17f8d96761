"""What an experiment asks for, before anything runs: contexts to record, units to replay, and their keys.

A key is a hash of everything that decides the result, so a folder can be continued, extended by arms or
workloads, or run again with changed code, and only what is new is computed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvassay.errors import ExperimentError
from kvassay.experiment.arms import build_arms, check_budgets
from kvassay.experiment.asked import check_asked, short_model
from kvassay.experiment.code import recorder_code, replay_code
from kvassay.experiment.drafters import check_speculation
from kvassay.experiment.schema import CalibrationTable, Experiment, Workload
from kvassay.experiment.tokens import show_tokens
from kvassay.policy.base import Policy
from kvassay.policy.card import TAPS, When
from kvassay.record.load import ModelIdentity
from kvassay.replay.arms import Arm
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.trace.schema import SCHEMA_VERSION
from kvassay.workload.sample import Sample

if TYPE_CHECKING:
    from kvassay.record.options import RecordOptions

KEY_LENGTH = 16
"""Hex digits of a key: 64 bits, ample for the units of one folder."""


@dataclass(frozen=True)
class TraceSet:
    """One model on one `[[workload]]`: what one table of the report is about."""

    model: str
    """As the experiment file names it."""
    workload: Workload

    @property
    def label(self) -> str:
        """Short name, unique within an experiment: `kv_short 2k`, with what differs from the defaults."""
        more = [f"{key}={_base(value)}" for key, value in self.workload.params.items()]
        text = f"{self.workload.name} {show_tokens(self.workload.length)}" + (f" ({', '.join(more)})" if more else "")
        return text + (" query-aware" if self.workload.query_aware else "")


@dataclass(frozen=True)
class Unit:
    """One context with all arms: the unit of work, and of resuming."""

    trace_set: TraceSet
    index: int

    @property
    def title(self) -> str:
        """One line for people."""
        return f"{short_model(self.trace_set.model)}, {self.trace_set.label}, context {self.index + 1}"

    @property
    def trace_name(self) -> str:
        """What its trace is called, before the key."""
        return f"{short_model(self.trace_set.model)}-{self.trace_set.label}-{self.index}"


@dataclass(frozen=True)
class Plan:
    """A checked experiment: everything that can be known without loading a model."""

    experiment: Experiment
    arms: tuple[Arm, ...]
    units: tuple[Unit, ...]
    protocol: Protocol
    options: RecordOptions
    code: str
    """Hash of the code that replays these arms."""
    source: str
    """Where the experiment is from, for errors."""
    base: Path
    """Where relative plug-in files lie."""

    @property
    def trace_sets(self) -> tuple[TraceSet, ...]:
        """Each model on each workload, in file order."""
        return tuple(unit.trace_set for unit in self.units if unit.index == 0)

    @property
    def calibration(self) -> CalibrationTable | None:
        """What each model is calibrated on; None if no arm learns offline."""
        offline = any(When.OFFLINE in arm.policy.card.when for arm in self.arms)
        return self.experiment.calibration if offline else None


def make_plan(experiment: Experiment, source: str, base: Path) -> Plan:
    """Check the experiment against models, workloads and policies, and say what is to be done.

    `source` begins every error; `base` is where relative plug-in files lie. Raises `ExperimentError`.
    """
    check_asked(experiment, source, base)
    arms = build_arms(experiment, source, base)
    check_budgets(experiment, arms, source)
    check_speculation(experiment, arms, source)
    sets = [TraceSet(model, workload) for model in experiment.experiment.models for workload in experiment.workload]
    labels = [(short_model(item.model), item.label) for item in sets]
    for number, label in enumerate(labels):
        if label in labels[:number]:
            raise ExperimentError(f"{source}: '{label[0]}' on '{label[1]}' is asked for twice")
    protocol = Protocol(
        free_tokens=experiment.protocol.free_tokens,
        block_size=experiment.protocol.block_size,
        seed=experiment.experiment.seed,
        allow_beyond_native=experiment.protocol.allow_beyond_native,
    )
    return Plan(
        experiment=experiment,
        arms=tuple(arms),
        units=tuple(Unit(item, index) for item in sets for index in range(item.workload.contexts)),
        protocol=protocol,
        options=record_options(experiment, [arm.policy for arm in arms]),
        code=replay_code(arm.policy for arm in arms),
        source=source,
        base=base,
    )


def record_options(experiment: Experiment, policies: Sequence[Policy]) -> RecordOptions:
    """The recording that these arms need, as the file or a policy asks."""
    from kvassay.record.options import RecordOptions  # late: it brings transformers, and the arms are checked first

    base = RecordOptions(
        prefill_chunk=experiment.record.prefill_chunk,
        q_tail=experiment.record.q_tail,
        dtype=experiment.record.dtype,
        allow_beyond_native=experiment.protocol.allow_beyond_native,
    )
    return options_for(policies, base)


def options_for(policies: Sequence[Policy], base: RecordOptions) -> RecordOptions:
    """`base` with what these policies need besides: queries, taps, and of which layers.

    Hidden states that a policy observes step by step come from the replay's own passes and need no tap.
    """
    shown = [
        policy.card
        for policy in policies
        if When.AFTER_PREFILL in policy.card.when or (When.OFFLINE in policy.card.when and not policy.writes_observe)
    ]
    layers = sorted({layer for card in shown for layer in card.taps})
    kinds = sorted({TAPS[evidence] for card in shown for evidence in card.evidence & TAPS.keys()})
    return dataclasses.replace(
        base,
        q_tail=max([base.q_tail, *(policy.queries_needed for policy in policies)]),
        taps=tuple(kinds),
        tap_layers=(tuple(layers) or None) if kinds == ["hidden"] else None,
    )


def _base(value: object) -> object:
    """A parameter for a label: the last part of a path."""
    return Path(value).name if isinstance(value, str) and "/" in value else value


def trace_folder(name: str, identity: ModelIdentity, sample: Sample, options: RecordOptions) -> str:
    """Folder of a trace: its name made safe, then the key of what it was recorded from.

    The sample itself is hashed, not the recipe, so that a corrected workload is recorded anew.
    """
    key = key_of(
        {
            "model": dataclasses.asdict(identity),
            "sample": json.loads(sample.to_json()),
            "options": dataclasses.asdict(options),
            "schema": SCHEMA_VERSION,
            "code": recorder_code(),
        }
    )
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-{key}"


def unit_key(trace: Trace, plan: Plan, calibration: Trace | None = None) -> str:
    """Key of a unit: what was recorded, how it is replayed, under which arms, fitted on what, by which code."""
    fitted = {} if calibration is None else {"calibration": trace_content(calibration)}
    return key_of(
        {
            **fitted,
            "trace": trace_content(trace),
            "arms": [arm_key(arm) for arm in plan.arms],
            "protocol": dataclasses.asdict(plan.protocol),
            "device": plan.experiment.experiment.device,
            "code": plan.code,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        }
    )


def trace_content(trace: Trace) -> str:
    """sha256 of what a trace holds, whenever it was recorded: its header with the hashes of all shards."""
    header = trace.header.model_dump(mode="json", exclude={"created"})
    return _sha256(header)


def arm_key(arm: Arm) -> dict[str, Any]:
    """What decides an arm's results: its policy's class and parameters, budget, protection, prefill."""
    policy = "+".join(_class_key(type(part)) for part in arm.policy.parts)
    rest = {f.name: str(getattr(arm, f.name)) for f in dataclasses.fields(arm) if f.name != "policy"}
    return {"policy": policy, "parameters": arm.policy.parameters, **rest}


def _class_key(kind: type[Policy]) -> str:
    module = kind.__module__ if kind.__module__.startswith("kvassay.") else "plug-in"
    return f"{module}:{kind.__qualname__}"


def key_of(parts: dict[str, Any]) -> str:
    """The key of something that is decided by these parts."""
    return _sha256(parts)[:KEY_LENGTH]


def _sha256(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
