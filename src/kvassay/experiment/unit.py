"""One unit of a run: one context recorded (or found), replayed under all arms, and written in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from kvassay.errors import ExperimentError
from kvassay.experiment.calibrate import calibration_name, calibration_sample
from kvassay.experiment.folder import RunFolder
from kvassay.experiment.plan import Plan, Unit, trace_folder, unit_key
from kvassay.experiment.rows import read_results, write_results
from kvassay.measure.result import BranchResult
from kvassay.record.load import LoadedModel
from kvassay.record.transformers import record_sample
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.protocol import Protocol
from kvassay.runtime import release_memory
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build
from kvassay.workload.sample import Sample

Say = Callable[[str], None]


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
    idle: Mapping[str, str]
    """Arms that have nothing to do on it, and why."""


@dataclass(frozen=True)
class Session:
    """What the units of one model share."""

    loaded: LoadedModel
    plan: Plan
    folder: RunFolder
    replay: Replay
    say: Say

    def sample(self, unit: Unit) -> Sample:
        """The unit's context and questions."""
        workload = unit.trace_set.workload
        params: dict[str, Any] = dict(workload.params)
        return build(
            workload.name,
            self.loaded.tokenizer,
            workload.length,
            seed=self.plan.experiment.experiment.seed,
            index=unit.index,
            questions=workload.questions,
            query_aware=workload.query_aware,
            **params,
        )

    def calibration(self, model: str) -> Trace | None:
        """The trace that this model's offline policies are fitted on, recorded if need be; None if there are none."""
        wanted = self.plan.calibration
        if wanted is None:
            return None
        sample = calibration_sample(self.loaded, wanted)
        return self._trace(calibration_name(model, sample), sample)

    def finished(self, unit: Unit, sample: Sample, calibration: Trace | None) -> Done | None:
        """The unit, if an earlier run has finished it and its file is whole."""
        path = self._trace_path(unit.trace_name, sample)
        if not path.is_dir():
            return None
        done = self._done(unit, Trace.open(path), calibration)
        return done if _readable(self.folder.unit(done.key)) else None

    def compute(self, unit: Unit, sample: Sample, calibration: Trace | None) -> Done:
        """Record the unit's context if need be, replay it, write its rows."""
        trace = self._trace(unit.trace_name, sample)
        done = self._done(unit, trace, calibration)
        rows = self.replay(self.loaded, trace, self.plan.arms, self.plan.protocol, self.say, calibration=calibration)
        _check_rows(rows, trace, [arm.label for arm in self.plan.arms if arm.label not in done.idle])
        notes = {"unit": done.key, "trace": done.trace, "code_sha256": self.plan.code}
        self.folder.write(self.folder.unit(done.key), lambda path: write_results(rows, path, notes))
        release_memory()
        return done

    def _done(self, unit: Unit, trace: Trace, calibration: Trace | None) -> Done:
        idle = not_applicable(trace, self.plan.arms, self.plan.protocol.block_size)
        return Done(unit, unit_key(trace, self.plan, calibration), trace.path.name, idle)

    def _trace_path(self, name: str, sample: Sample) -> Path:
        return self.folder.traces / trace_folder(name, self.loaded.identity, sample, self.plan.options)

    def _trace(self, name: str, sample: Sample) -> Trace:
        """The trace of a sample: recorded now, or by an earlier run."""
        path = self._trace_path(name, sample)
        if path.is_dir():
            return Trace.open(path)

        def say(done: int, total: int) -> None:
            self.say(f"recording {done}/{total} tokens")

        return record_sample(self.loaded, sample, path, self.plan.options, say)


def _readable(path: Path) -> bool:
    """Whether a unit is there and whole; a damaged one is computed again."""
    if not path.is_file():
        return False
    try:
        return bool(read_results(path))
    except ExperimentError:
        return False


def _check_rows(rows: Sequence[BranchResult], trace: Trace, arms: Sequence[str]) -> None:
    """Refuse an incomplete answer of the replay rather than store it."""
    wanted = {(branch, arm) for branch in range(len(trace.branches)) for arm in arms}
    found = [(row.branch, row.arm) for row in rows]
    if set(found) != wanted or len(found) != len(wanted):
        lacking = sorted(wanted - set(found))
        raise ExperimentError(
            f"{trace.path.name}: the replay gave {len(found)} rows for {len(wanted)} questions x arms"
            + (f"; question {lacking[0][0]} under '{lacking[0][1]}' is missing" if lacking else "")
        )
