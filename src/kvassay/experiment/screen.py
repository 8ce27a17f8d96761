"""Screening in the open loop: one trace under the policies asked for, or a finished run under its own arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvassay.errors import ExperimentError, PolicyError
from kvassay.experiment.folder import FIDELITY, RESOLVED, RunFolder
from kvassay.experiment.plan import make_plan
from kvassay.experiment.records import write_records
from kvassay.experiment.replaced import other_policies
from kvassay.experiment.results import Results
from kvassay.experiment.schema import load_experiment
from kvassay.measure.fidelity import ArmFidelity, screen
from kvassay.measure.result import LayerFidelity
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import parse
from kvassay.replay.arms import Arm, always_on, grid
from kvassay.replay.open import left_out, open_loop, output_errors
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace

TOKEN_UNITS = ("keep_tokens", "read_tokens")


@dataclass(frozen=True)
class Screening:
    """What the open loop says of one trace."""

    trace: Trace
    arms: tuple[Arm, ...]
    """The arms replayed, yardsticks first."""
    lines: tuple[ArmFidelity, ...]
    """One line per arm, in the same order."""
    rows: tuple[LayerFidelity, ...]
    """One row per branch, arm and layer."""
    skipped: dict[str, str]
    """Arms that take the closed loop: label and reason."""
    reproduced: float | None
    """Largest deviation of dense from the recorded attention output, as a part of its peak, over all layers; None if
    no `output` tap was recorded."""


def screen_trace(
    path: str | Path,
    policies: Sequence[str],
    budgets: Sequence[str],
    *,
    protection: Protection,
    protocol: Protocol,
    yardsticks: bool = True,
    calibration: str | Path | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Screening:
    """Replay `policies` at `budgets` over the trace at `path`; `KvassayError` for whatever does not fit.

    Arms that the open loop does not cover are listed, not refused. `yardsticks` adds the arms that always run;
    `calibration` is the trace that policies which learn offline are fitted on.
    """
    trace = Trace.open(path)
    other = None if calibration is None else Trace.open(calibration)
    wanted = _arms(policies, [Budget.parse(text) for text in budgets], protection, yardsticks)
    reasons = left_out(trace, wanted, protocol, calibrated=other is not None)
    arms = tuple(arm for arm in wanted if arm.label not in reasons)
    if not arms:
        raise PolicyError("; ".join(f"arm '{label}' {reason}" for label, reason in reasons.items()))
    rows = open_loop(trace, arms, protocol, progress, calibration=other)
    progress("compare dense with the recorded output")
    errors = [found.error for found in output_errors(trace, protocol)]
    return Screening(
        trace,
        arms,
        tuple(screen(rows)),
        tuple(rows),
        reasons,
        max(errors) if errors else None,
    )


def _arms(policies: Sequence[str], budgets: Sequence[Budget], protection: Protection, yardsticks: bool) -> list[Arm]:
    tokens = [Budget("keep_tokens", budget.amount) for budget in budgets if budget.unit in TOKEN_UNITS]
    shared = [arm for arm in always_on(tokens, protection) if not arm.again] if yardsticks else []
    own = [arm for text in policies for arm in grid([parse(text)], budgets, protection)]
    return list({arm.label: arm for arm in (*shared, *own)}.values())


def screen_run(results: Results, progress: Callable[[str], None] = lambda message: None) -> dict[str, str]:
    """Screen a run's arms on the first context of each trace set, and write `fidelity.parquet` into its folder.

    Policies of files are looked up from the working directory, as the run was started there or beside its file.
    Returns the arms that the open loop does not cover, with reasons; dense' is left out, it is dense here.
    Raises `ExperimentError` if a context is not in the folder any more or a policy's code is not that of the run's
    results, or whatever the arms' policies raise.
    """
    folder = RunFolder(results.path)
    source = results.path / RESOLVED
    plan = make_plan(load_experiment(source), str(source), Path())
    changed = other_policies(results.manifest, plan.arms)
    if changed:
        raise ExperimentError(
            f"{results.path}: the code of {', '.join(changed)} is not that of the run's results; run it again first"
        )
    fitted = {item["model"]: item["trace"] for item in results.manifest["calibrations"]}
    rows: list[LayerFidelity] = []
    skipped: dict[str, str] = {}
    for (model, label), name in results.first_traces().items():
        calibration = Trace.open(folder.traces / fitted[model]) if model in fitted else None
        trace = Trace.open(folder.traces / name)
        left = left_out(trace, plan.arms, plan.protocol, calibrated=calibration is not None)
        skipped |= left
        covered = [arm for arm in plan.arms if arm.label not in left and not arm.again]
        progress(f"{model}, {label}")
        rows += open_loop(trace, covered, plan.protocol, progress, calibration=calibration)
    with folder.locked():
        folder.write(folder.path / FIDELITY, lambda path: write_records(rows, LayerFidelity, path))
    return skipped
