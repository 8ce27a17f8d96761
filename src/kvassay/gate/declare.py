"""Declaring a gate: checked, entered in the log beside it, and what its planned samples can tell apart."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

from kvassay import __version__
from kvassay.errors import GateError
from kvassay.experiment.provenance import now
from kvassay.gate.chain import LOG, Entry, append, read_log
from kvassay.gate.order import file_commit
from kvassay.gate.schema import ANY, Gate, Quality, load_gate
from kvassay.measure.metrics import CARDS
from kvassay.measure.power import Spread, assumed_flips, contexts_needed, smallest_difference

ASSUMED_FLIPS = 0.1
"""Share of answers taken to flip where the gate states no spread of a right-or-wrong metric."""


@dataclass(frozen=True)
class Declared:
    """A gate in its log."""

    gate: Gate
    entry: Entry
    log: Path
    anew: bool
    """False: the file as it is was declared already, and nothing was added."""


@dataclass(frozen=True)
class Detectable:
    """What the planned samples can tell of one `[[quality]]` threshold."""

    metric: str
    unit: str
    workloads: tuple[str, ...]
    margin: float
    smallest: float | None
    """Smallest difference found with the gate's power at its alpha, in the metric's unit; None: spread not known."""
    needed: int | None
    """Contexts per trace set at which the margin itself is found; None: not known, or beyond any plan."""
    source: str
    """Where the spread comes from."""
    contexts: int
    """Planned."""
    agreeing: int = 0
    """Contexts needed even if all of them agree with dense exactly (`equivalence.py`), for a metric with bounds."""

    @property
    def enough(self) -> bool | None:
        """Whether an arm equal to dense would be passed with the gate's power; None: not known."""
        if self.smallest is None:
            return None
        return self.smallest <= self.margin and self.contexts >= self.agreeing

    @property
    def line(self) -> str:
        """For people."""
        where = "" if self.workloads == (ANY,) else f" ({', '.join(self.workloads)})"
        head = f"{self.metric}{where}: margin {self.margin:g} {self.unit}"
        if self.smallest is None:
            return f"{head}; {self.source}"
        told = f"smallest detectable difference {self.smallest:.3g} ({self.source})"
        found = f"{head}, {self.contexts} contexts planned; {told}"
        if self.enough:
            return found
        if self.needed is None:
            return f"{found}: too few samples, and no plan would hold enough"
        return f"{found}: too few samples, an arm equal to dense may be held; {self.needed} contexts would do"


def declare(file: Path) -> Declared:
    """Check a gate file and enter it in the log beside it; `GateError` for a file or log that is not sound.

    A file that is the newest entry of its name already is not entered again.
    """
    gate = load_gate(file)
    log, digest = file.parent / LOG, digest_of(file)
    mine = [entry for entry in read_log(log) if entry.gate == gate.gate.name]
    if mine and mine[-1].sha256 == digest:
        return Declared(gate, mine[-1], log, False)
    entry = append(
        log,
        time=now(),
        gate=gate.gate.name,
        file=file.name,
        sha256=digest,
        kvassay=__version__,
        commit=file_commit(file),
    )
    return Declared(gate, entry, log, True)


def digest_of(file: Path) -> str:
    """sha256 of a file's bytes; `GateError` if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise GateError(f"{file}: cannot be read: {error.strerror or error}") from None


def detectable(gate: Gate) -> list[Detectable]:
    """For each `[[quality]]`, what the planned samples can tell apart."""
    return [_detectable(gate, limit) for limit in gate.quality]


def _detectable(gate: Gate, limit: Quality) -> Detectable:
    unit, plan = CARDS[limit.metric].unit, gate.samples
    spread = _spread(gate, limit.metric)
    if spread is None:
        hint = f"nothing is known of its spread; state it in [samples] spread, e.g. {{ {limit.metric} = 0.3 }}"
        return Detectable(limit.metric, unit, limit.workloads, limit.margin, None, None, hint, plan.contexts)
    error = spread.error(plan.contexts, plan.questions)
    # Equivalence needs both one-sided tests at once, so each takes half of what may go wrong.
    power = plan.power if limit.test == "non_inferiority" else 1 - (1 - plan.power) / 2
    alpha = gate.gate.alpha
    smallest = smallest_difference(error, plan.contexts, alpha=alpha, power=power)
    needed = contexts_needed(spread, plan.questions, limit.margin, alpha=alpha, power=power)
    agreeing = _agreeing(limit, alpha)
    return Detectable(
        limit.metric,
        unit,
        limit.workloads,
        limit.margin,
        smallest,
        None if needed is None else max(needed, agreeing),
        spread.source,
        plan.contexts,
        agreeing,
    )


def _agreeing(limit: Quality, alpha: float) -> int:
    """Fewest contexts n with (1 - d)^n < alpha, d being the margin as a share of the largest possible loss."""
    bounds = CARDS[limit.metric].paired_bounds
    if bounds is None:
        return 0
    share = limit.margin / bounds[1]
    return 1 if share >= 1 else math.floor(math.log(alpha) / math.log1p(-share)) + 1


def _spread(gate: Gate, metric: str) -> Spread | None:
    stated, correlation = gate.samples.spread.get(metric), gate.samples.correlation
    if stated is not None:
        return Spread(stated, correlation, f"stated: spread {stated:g}, correlation {correlation:g} within a context")
    if CARDS[metric].bounds == (0.0, 1.0) and math.isfinite(correlation):
        return assumed_flips(ASSUMED_FLIPS, correlation)
    return None
