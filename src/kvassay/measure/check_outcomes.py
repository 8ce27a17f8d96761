"""Are the outcomes believable? Arms better than dense or alike to the last bit, sweeps in vain, too few samples."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby

from kvassay.measure.aggregate import AGAIN, DENSE, Cell
from kvassay.measure.checks import LEAKS, ArmFacts, Finding, Rows, SetFacts, Severity
from kvassay.measure.metrics import CARDS
from kvassay.measure.resample import MIN_CLUSTERS
from kvassay.measure.result import BranchResult

JUDGED = ("task", "top1", "nll")
"""Metrics by which an arm can be better than dense."""
BEATS = "beats_dense"
"""Name of the finding about an arm that is."""
FLAT = (*JUDGED, "kl")
"""Metrics that must all be flat for a sweep to count as without effect."""
_WINDOWS = {"recency", "streaming"}

Axis = tuple[str, tuple[str, ...]]
"""A budget or parameter, and the arms that differ in it alone."""


def beats_dense(cells: Sequence[Cell], facts: SetFacts, leaks: Sequence[Finding]) -> Iterator[Finding]:
    """Arms better than dense beyond noise, with what the leak checks said of them."""
    for cell in cells:
        better = [name for name in JUDGED if beats(cell, name)]
        if not better or cell.arm == AGAIN:
            continue
        fired = sorted({leak.name for leak in leaks if leak.arm == cell.arm and leak.severity == "invalid"})
        shown = ", ".join(f"{name} {cell.difference[name].mean:+.3f} (noise {cell.noise[name]:.3f})" for name in better)
        ran = [name for name in LEAKS if name != "future_query" or not facts.arms[cell.arm].decides_later]
        checked = (
            f"leak checks fired: {', '.join(fired)}" if fired else f"leak checks ran, none fired: {', '.join(ran)}"
        )
        reference = facts.arms[cell.arm].reference
        severity: Severity = "invalid" if fired else "note" if reference else "suspect"
        alike = [] if reference else _references_that_beat(better, cells, facts)
        also = f"; so are references, which only leave tokens out: {', '.join(alike[:3])}" if alike else ""
        yield Finding(BEATS, severity, cell.arm, f"{shown}; {checked}{also}")


def _references_that_beat(names: Sequence[str], cells: Sequence[Cell], facts: SetFacts) -> list[str]:
    """References that are better than dense in all of these metrics: then leaving tokens out can do that here."""
    return [cell.arm for cell in cells if facts.arms[cell.arm].reference and all(beats(cell, name) for name in names)]


def beats(cell: Cell, name: str, least: float = 0.0) -> bool:
    """Whether an arm is better than dense beyond noise, and by more than `least`, in a metric with a direction."""
    noise = cell.noise.get(name)
    if noise is None:
        return False
    gain = cell.difference[name].mean * (1 if CARDS[name].better == "higher" else -1)
    return gain > max(noise, least)


def identical_arms(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """Groups of arms with the same replies and the same NLL to the last bit on every shared question."""
    for group in alike(rows):
        if len({facts.arms[arm].policy for arm in group}) == 1 and DENSE not in group:
            continue  # budgets or parameters of one policy: a sweep without effect
        yield _identical(group, rows, facts)


def alike(rows: Rows) -> list[tuple[str, ...]]:
    """Arms whose answers are the same to the last bit, in groups of two or more."""
    shared = [key for key in next(iter(rows.values()), {}) if all(key in mine for mine in rows.values())]
    groups: dict[Hashable, list[str]] = {}
    for arm, mine in rows.items():
        groups.setdefault(tuple((mine[key].generated, mine[key].nll, mine[key].kl) for key in shared), []).append(arm)
    return [tuple(arms) for arms in groups.values() if len(arms) > 1 and shared]


def _identical(group: Sequence[str], rows: Rows, facts: SetFacts) -> Finding:
    """One finding per group: explained, odd, or proof that what an arm claims is not what was read."""
    told = [f"'{arm}'" for arm in group]
    severity, reason = _why_alike(group, rows, facts)
    message = f"{', '.join(told[:-1])} and {told[-1]} gave the same answers to the last bit{reason}"
    return Finding("identical_arms", severity, None, message, tuple(group))


def _why_alike(group: Sequence[str], rows: Rows, facts: SetFacts) -> tuple[Severity, str]:
    arms = [facts.arms[arm] for arm in group]
    if all(arm.policy == DENSE or _spared(arm, rows[arm.label]) for arm in arms):
        return "note", ": all keep and read everything"
    if {arm.policy for arm in arms} == _WINDOWS and _same_window(arms, facts):
        return "note", f": with {facts.protection.sink} sink tokens protected for every arm they are one policy"
    amounts = {arm: _amounts(rows[arm]) for arm in group}
    if len(set(amounts.values())) == 1:
        return "suspect", " and hold the same bytes: one policy under two names, or not applied"
    if all(mine[1] == amounts[group[0]][1] for mine in amounts.values()) and _only_adds(arms, amounts):
        return "suspect", " and read the same bytes, though some hold more beside: not applied"
    shown = ", ".join(f"{held / 1024:.0f} KiB held, {read / 1024:.0f} read" for held, read in amounts.values())
    return "invalid", f", though their bytes differ ({shown}): what an arm reports is not what attention read"


def _only_adds(arms: Sequence[ArmFacts], amounts: Mapping[str, tuple[float, float]]) -> bool:
    """Whether one of the arms is dense and no other says that it holds less."""
    dense = [amounts[arm.label][0] for arm in arms if arm.policy == DENSE]
    return bool(dense) and all(held >= max(dense) for held, _ in amounts.values())


def _same_window(arms: Sequence[ArmFacts], facts: SetFacts) -> bool:
    sinks = [int(arm.parameters.get("sink", 0)) for arm in arms]
    return len({arm.budget for arm in arms}) == 1 and max(sinks) <= facts.protection.sink


def _spared(arm: ArmFacts, mine: Mapping[tuple[str, int], BranchResult]) -> bool:
    """Whether the budget covers every context, so that nothing is changed."""
    budget = arm.budget
    return budget is not None and all(
        budget.amount == 1 or (budget.unit != "bytes" and budget.tokens(row.context_tokens) >= row.context_tokens)
        for row in mine.values()
    )


def _amounts(mine: Mapping[tuple[str, int], BranchResult]) -> tuple[float, float]:
    return sum(row.retained_bytes for row in mine.values()), sum(row.read_bytes for row in mine.values())


def no_effect(rows: Rows, cells: Sequence[Cell], facts: SetFacts) -> Iterator[Finding]:
    """Budgets and parameters that were varied and changed nothing: to the last bit, or within noise."""
    same = [set(group) for group in alike(rows)]
    by_label = {cell.arm: cell for cell in cells}
    for axis, arms in _axes(facts):
        policy = facts.arms[arms[0]].policy
        what = f"{axis} of {policy} ({', '.join(arms)})"
        if any(set(arms) <= group for group in same):
            if all(_spared(facts.arms[arm], rows[arm]) for arm in arms):
                continue
            differ = len({_amounts(rows[arm]) for arm in arms}) > 1
            yield Finding(
                "no_effect", "invalid" if differ else "suspect", None,
                f"{what}: the same answers to the last bit"
                + (" though the bytes reported differ" if differ else " and the same bytes"),
                tuple(arms),
            )  # fmt: skip
        elif _flat(mine := [by_label[arm] for arm in arms if arm in by_label]):
            names = ", ".join(_flat_metrics(mine))
            yield Finding("no_effect", "note", None, f"{what}: {names} differ by less than noise", tuple(arms))


def _axes(facts: SetFacts) -> Iterator[Axis]:
    """Each set of arms that differ in their budget alone, or in one parameter alone."""
    arms = list(facts.arms.values())
    names = {name for arm in arms for name in arm.parameters}
    for axis in ("budget", *sorted(names)):
        rest = sorted((_without(arm, axis), arm.label) for arm in arms)
        for _, group in groupby(rest, key=lambda pair: pair[0]):
            labels = tuple(label for _, label in group)
            if len(labels) > 1:
                yield axis, tuple(arm.label for arm in arms if arm.label in labels)


def _without(arm: ArmFacts, axis: str) -> str:
    """Everything about an arm but one axis, as text that sorts; unlike any other if it lacks the axis."""
    unit = arm.budget.unit if arm.budget is not None else None
    if (axis == "budget" and arm.budget is None) or (axis != "budget" and axis not in arm.parameters):
        return f"alone: {arm.label}"
    parameters = {name: repr(value) for name, value in sorted(arm.parameters.items()) if name != axis}
    budget = unit if axis == "budget" else arm.budget
    return repr((arm.policy, parameters, budget, arm.own_prefill, arm.label.endswith("'")))


def _flat_metrics(cells: Sequence[Cell]) -> list[str]:
    return [name for name in FLAT if all(name in cell.quality for cell in cells)]


def _flat(cells: Sequence[Cell]) -> bool:
    """Whether, in every metric that was measured, the means lie no further apart than the smallest noise of them."""
    for name in _flat_metrics(cells):
        noise = [cell.noise.get(name) for cell in cells]
        means = [cell.difference[name].mean for cell in cells if name in cell.difference]
        known = [n for n in noise if n is not None]
        if len(cells) < 2 or len(known) < len(cells) or max(means) - min(means) > min(known):
            return False
    return True


def underpowered(cells: Sequence[Cell]) -> Iterator[Finding]:
    """Fewer contexts than any interval needs. Whether more are too few depends on the margin: a gate says."""
    contexts = min((cell.contexts for cell in cells), default=MIN_CLUSTERS)
    if contexts < MIN_CLUSTERS:
        what = f"{contexts} context{'s' if contexts > 1 else ''} only"
        yield Finding("underpowered", "note", None, f"{what}: no intervals, and no test (they need {MIN_CLUSTERS})")
