"""The arms a candidate must not lose to: baselines that save as much, and the front of its budget class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvassay.experiment.arminfo import ArmInfo
from kvassay.gate.decide import by_test, lead_check, saved
from kvassay.gate.evidence import Pair, SetEvidence
from kvassay.gate.schema import Gate, Reduction
from kvassay.measure.aggregate import Cell
from kvassay.measure.equivalence import superiority
from kvassay.measure.front import front
from kvassay.measure.metrics import CARDS
from kvassay.measure.resample import Estimate
from kvassay.measure.result import NOT_GENERATED
from kvassay.measure.verdict import Check

_SAME = 1e-9
"""Savings nearer than this are equal."""


@dataclass(frozen=True)
class Axes:
    """What counts as saving for one arm on one trace set, and in which metric it must answer well."""

    metric: str | None
    """Of the first `[[quality]]` that holds for the workload and was measured; None if none was."""
    reductions: tuple[Reduction, ...]
    """Those the arm passes; all of them if it passes none."""


def axes(gate: Gate, cell: Cell, dense: Cell) -> Axes:
    """The axes on which an arm is compared with others."""
    limits = tuple(limit for limit in gate.reduction if limit.about(cell.workload))
    passed = tuple(limit for limit in limits if (saved(limit, cell, dense)[0] or 0.0) >= limit.at_least)
    wanted = (limit.metric for limit in gate.quality if limit.about(cell.workload))
    metric = next((name for name in wanted if name in cell.quality), None)
    return Axes(metric, passed or limits)


def amount(info: ArmInfo) -> str | None:
    """The budget without its unit: what is kept by one arm is read by another. None: the method's own size."""
    return None if info.budget is None else info.budget.partition("=")[2]


def baselines(gate: Gate, arms: Mapping[str, ArmInfo], cell: Cell, evidence: SetEvidence) -> dict[str, str | None]:
    """The arm of every baseline policy at a candidate's budget (or without one); None if it did not run so."""
    mine = amount(arms[cell.arm])
    there = [label for label in arms if evidence.found.cell(label) is not None]
    found: dict[str, str | None] = {}
    for policy in gate.baselines.arms:
        fitting = [
            label
            for label in there
            if _is(policy, arms[label]) and (mine is None or amount(arms[label]) in (None, mine))
        ]
        found |= dict(zip(fitting, fitting, strict=True)) if fitting else {policy: None}
    return found


def _is(policy: str, info: ArmInfo) -> bool:
    return not info.own_prefill and policy in (info.policy, info.label.partition(" ")[0])


def classmates(arms: Mapping[str, ArmInfo], cell: Cell, evidence: SetEvidence) -> list[Cell]:
    """Arms of the same comparison and budget that an engine could run, the candidate itself included."""
    mine = arms[cell.arm]
    return [
        other
        for other in evidence.found.cells
        if not (info := arms[other.arm]).reference and info.exact == mine.exact and amount(info) == amount(mine)
    ]


def costs_no_more(wanted: Axes, other: Cell, cell: Cell, dense: Cell) -> bool:
    """Whether another arm saves at least as much on every axis."""
    pairs = [(saved(limit, other, dense)[0], saved(limit, cell, dense)[0]) for limit in wanted.reductions]
    return all((theirs or 0.0) >= (mine or 0.0) - _SAME for theirs, mine in pairs)


@dataclass(frozen=True)
class Rivalry:
    """Whom one candidate is compared with on one trace set."""

    axes: Axes
    absent: tuple[str, ...]
    """Baselines that did not run at its budget."""
    beaten: tuple[str, ...]
    """Baselines that save less: they need not be answered better."""
    equal: tuple[str, ...]
    """Baselines that save as much."""
    above: tuple[str, ...]
    """Classmates on the front, if the candidate is not, that save as much and have a better mean."""

    def pairs(self, arm: str) -> list[Pair]:
        """The paired differences that are needed."""
        if self.axes.metric is None:
            return []
        return [(arm, other, self.axes.metric) for other in (*self.equal, *self.above)]


def rivalry(gate: Gate, arms: Mapping[str, ArmInfo], cell: Cell, evidence: SetEvidence) -> Rivalry:
    """Find a candidate's rivals on one trace set, on which dense ran."""
    dense = evidence.dense
    assert dense is not None
    wanted = axes(gate, cell, dense)
    found = baselines(gate, arms, cell, evidence)
    there = [evidence.found.cell(label) for label in found.values() if label is not None]
    equal = [other for other in there if other is not None and costs_no_more(wanted, other, cell, dense)]
    mates = classmates(arms, cell, evidence)
    best = on_front(wanted, mates, dense)
    names = {other.arm for other in equal}
    return Rivalry(
        wanted,
        tuple(policy for policy, label in found.items() if label is None),
        tuple(other.arm for other in there if other is not None and other.arm not in names),
        tuple(other.arm for other in equal),
        tuple(
            other.arm
            for other in mates
            if cell.arm not in best
            and other.arm in best - names
            and costs_no_more(wanted, other, cell, dense)
            and _good(other, wanted.metric) > _good(cell, wanted.metric)
        ),
    )


def on_front(wanted: Axes, cells: Sequence[Cell], dense: Cell) -> frozenset[str]:
    """Arms on the front of quality over bytes (or traffic) on one of the axes at least."""
    found: frozenset[str] = frozenset()
    for limit in wanted.reductions:
        points = {cell.arm: (1 - (saved(limit, cell, dense)[0] or 0.0), _good(cell, wanted.metric)) for cell in cells}
        found |= front(points)
    return found


def _good(cell: Cell, metric: str | None) -> float:
    """Quality as a number of which more is better; the same for all where it was not measured."""
    if metric is None:
        return 0.0
    mean = cell.quality[metric].mean
    return mean if CARDS[metric].better == "higher" else -mean


def rival_checks(gate: Gate, arm: str, rivals: Rivalry, differences: Mapping[Pair, Estimate]) -> list[Check]:
    """One check per baseline, one for the front."""
    metric = rivals.axes.metric
    checks = [_unlike(f"better than {policy}", None, "did not run at this budget") for policy in rivals.absent]
    checks += [_unlike(f"better than {label}", True, f"{label} saves less") for label in rivals.beaten]
    if metric is None:
        names = [*(f"better than {label}" for label in rivals.equal), "on the front"]
        return [*checks, *(_unlike(name, None, NOT_GENERATED) for name in names)]
    checks += [lead_check(gate, label, metric, differences[arm, label, metric]) for label in rivals.equal]
    return [*checks, _front_check(gate, arm, metric, rivals, differences)]


def _unlike(name: str, passed: bool | None, note: str) -> Check:
    return Check(name, None, "at_least", None, None, None, passed, "measured", note=note)


def _front_check(gate: Gate, arm: str, metric: str, rivals: Rivalry, differences: Mapping[Pair, Estimate]) -> Check:
    """On the front unless a classmate that saves as much answers better beyond chance."""
    card = CARDS[metric]
    behind = {label: differences[arm, label, metric] for label in rivals.above}
    worse = card.better == "higher"
    for label, found in behind.items():
        flipped = superiority(found, 0.0, "lower" if worse else "higher")
        if by_test(flipped, gate.gate.alpha):
            note = f"off the front: {label} saves as much and answers better"
            return Check(
                "on the front", 0.0, "at_least" if worse else "at_most", found.mean, found.low, found.high,
                False, "measured", unit=f"{card.title}, {card.unit}, arm minus {label}", note=note, against=label,
            )  # fmt: skip
    note = f"behind {', '.join(behind)}, within chance" if behind else ""
    return _unlike("on the front", True, note)
