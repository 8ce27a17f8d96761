"""What a gate said of a run: one verdict per arm over everything, one per arm and trace set, each with its checks.

The gate writes them (`verdicts.json`), reports read them; nothing here judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pydantic

from kvassay.errors import GateError

VERDICTS = "verdicts.json"
"""Name of the file in a run folder."""
SCHEMA: Literal[1] = 1

Outcome = Literal["promote", "hold", "reject", "suspect", "invalid"]
OUTCOMES: tuple[Outcome, ...] = ("promote", "hold", "reject", "suspect", "invalid")
Evidence = Literal["measured", "modelled"]
Direction = Literal["at_least", "at_most"]

OUTCOME_TEXT: dict[Outcome, str] = {
    "promote": "passes every threshold of the gate: deserves an implementation, within the scope stated",
    "hold": "not decided: evidence is lacking (too few samples, a workload or measurement that was not there)",
    "reject": "fails a threshold, or loses to an arm that any user can switch on",
    "suspect": "better than dense beyond noise, or a check warned: look for a leak before believing it",
    "invalid": "a check proved the numbers wrong: nothing follows from them",
}


@dataclass(frozen=True)
class Check:
    """One threshold against one number."""

    name: str
    """What was compared, e.g. `quality top1` or `bytes freed (compaction)`."""
    threshold: float | None
    """None where the gate sets no number (a comparison with the front, say)."""
    direction: Direction
    """How the value must stand to the threshold."""
    value: float | None
    """None if there is no such evidence."""
    low: float | None
    """Ends of the value's interval, None if it has none."""
    high: float | None
    passed: bool | None
    """None: not decided, for lack of evidence or of samples."""
    evidence: Evidence
    hardware: str | None = None
    """Name of the hardware the number holds for; None if it depends on none (bytes, quality)."""
    unit: str = ""
    """Unit and denominator."""
    note: str = ""
    """Why it was not decided, or what the number stands for."""
    decides: bool = True
    """False: shown only, as another threshold is enough."""
    against: str = ""
    """Whom the value is measured against, if not dense: a baseline, or arms that save as much."""


@dataclass(frozen=True)
class Verdict:
    """What the gate says of one arm, on one trace set or over all of them."""

    trace_set: str
    """Label of the trace set; empty for the verdict over all of them, the one that counts."""
    workload: str
    """Empty for the verdict over all trace sets."""
    arm: str
    outcome: Outcome
    reason: str
    """One line, e.g. `underpowered: ...`, or `modelled latency, calibration error 12%`."""
    scope: str
    """Models, lengths, workloads and layers the verdict is about."""
    exploratory: bool
    """Judged by a gate that was declared or changed after results existed, or never declared."""
    checks: tuple[Check, ...] = ()
    model: str = ""
    """Short name of the model; empty for the verdict over all trace sets."""
    approximate: bool = False
    """The arm approximates keys, values or logits, and is judged among its like, in the second comparison."""

    @property
    def overall(self) -> bool:
        """True for the verdict over all trace sets."""
        return not self.trace_set

    @property
    def line(self) -> str:
        """Outcome and reason on one line: `hold: underpowered: ...`, `promote (modelled latency, ...)`."""
        if not self.reason:
            return self.outcome
        return f"promote ({self.reason})" if self.outcome == "promote" else f"{self.outcome}: {self.reason}"


@dataclass(frozen=True)
class Judgement:
    """All verdicts of a run, and by which gate."""

    gate: str
    """Name of the gate."""
    gate_sha256: str
    declared: str | None
    """When the gate was entered in its log (UTC); None if it never was."""
    judged: str
    """When (UTC)."""
    exploratory: bool
    warning: str
    """Why this is exploratory; empty if it is not. Stands at the top of every report."""
    cells_sha256: str
    """Of `cells.parquet` as it was judged: another one has not been judged."""
    verdicts: tuple[Verdict, ...]
    """Those over all trace sets first, in the order in which the arms ran."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Arms that get no verdict (dense, baselines, references), and why."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the whole: findings that touch no single arm, evidence that is missing."""

    @property
    def overall(self) -> tuple[Verdict, ...]:
        """The verdicts that count, one per judged arm."""
        return tuple(verdict for verdict in self.verdicts if verdict.overall)

    def of(self, arm: str) -> tuple[Verdict, ...]:
        """All verdicts of an arm, the one over all trace sets first."""
        return tuple(verdict for verdict in self.verdicts if verdict.arm == arm)

    def count(self) -> dict[Outcome, int]:
        """How many arms got which outcome, in the order of `OUTCOMES`; outcomes that none got are left out."""
        return count(self.overall)


def count(verdicts: Sequence[Verdict]) -> dict[Outcome, int]:
    """How many verdicts have which outcome, in the order of `OUTCOMES`; outcomes without any are left out."""
    found = [verdict.outcome for verdict in verdicts]
    return {outcome: found.count(outcome) for outcome in OUTCOMES if outcome in found}


@dataclass(frozen=True)
class _File:
    """`verdicts.json` as written."""

    schema: Literal[1]
    judgement: Judgement


_ADAPTER = pydantic.TypeAdapter(_File)


def dump_judgement(judgement: Judgement) -> str:
    """The judgement as JSON text; a number that is not finite is written as null."""
    return _ADAPTER.dump_json(_File(SCHEMA, judgement), indent=1).decode() + "\n"


def load_judgement(folder: str | Path) -> Judgement | None:
    """The judgement in a run folder, None if it was never judged; `GateError` for a damaged file."""
    file = Path(folder) / VERDICTS
    if not file.is_file():
        return None
    try:
        return _ADAPTER.validate_json(file.read_bytes()).judgement
    except OSError as error:
        raise GateError(f"{file}: cannot be read: {error.strerror or error}") from None
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise GateError(f"{file}: not as this kvassay writes it: {place}: {first['msg']}") from None
