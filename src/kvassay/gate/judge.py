"""From evidence to verdicts, in the order in which a careful reader would stop.

Findings first (what is wrong with the numbers), then whether dense itself can do the work, then whether an arm is
better than dense (a symptom), then the thresholds: quality, savings, baselines and front, speed. Over all trace
sets the worst counts, and only the promoting workloads together promote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvassay.experiment.arminfo import ArmInfo
from kvassay.gate.decide import UNDERPOWERED, quality_checks, reduction_check, speed_check
from kvassay.gate.evidence import Pair, SetEvidence
from kvassay.gate.rivals import Rivalry, rival_checks, rivalry
from kvassay.gate.schema import Gate
from kvassay.measure.aggregate import AGAIN, DENSE, Cell
from kvassay.measure.check_outcomes import BEATS, JUDGED, beats
from kvassay.measure.checks import Finding
from kvassay.measure.metrics import CARDS
from kvassay.measure.resample import Estimate
from kvassay.measure.verdict import Check, Outcome, Verdict

ELSEWHERE = "; and {} more"
"""How the reasons of other trace sets are counted."""
_SEVERE: tuple[Literal["invalid", "suspect"], ...] = ("invalid", "suspect")
"""Severities of a finding that are an outcome, the worse first."""


@dataclass(frozen=True)
class Judged:
    """Verdicts, and what got none."""

    verdicts: tuple[Verdict, ...]
    excluded: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """What one trace set says of one arm."""

    verdict: Verdict
    clear: bool
    """Nothing speaks against the arm here (a veto-only workload that is passed has the outcome `hold`)."""


def excluded(gate: Gate, arms: Mapping[str, ArmInfo]) -> dict[str, str]:
    """Arms that are no candidates, and why."""
    return {label: why for label, info in arms.items() if (why := _why_not(gate, info)) is not None}


def _why_not(gate: Gate, info: ArmInfo) -> str | None:
    if info.policy == DENSE or info.label == AGAIN:
        return "dense, which all are compared with"
    if info.reference:
        return "a reference: no engine could run it"
    if info.policy in gate.baselines.arms or info.label.partition(" ")[0] in gate.baselines.arms:
        return "a baseline"
    if info.always_on:
        return "an arm that always runs, for comparison"
    if "~" in info.policy:
        return "a control twin of another policy"
    return None


def judge(gate: Gate, arms: Mapping[str, ArmInfo], sets: Sequence[SetEvidence], *, exploratory: bool = False) -> Judged:
    """All verdicts of a run: the one over all trace sets per candidate first, then those of every trace set."""
    out = excluded(gate, arms)
    names = [label for label in arms if label not in out]
    judged, notes = _sets(gate, sets)
    parts: dict[str, list[_Part]] = {label: [] for label in names}
    blind: list[SetEvidence] = []
    for evidence in judged:
        if evidence.dense is None or (evidence.found.floor is not None and not evidence.found.floor["passed"]):
            blind.append(evidence)
            continue
        for label, part in _parts(gate, arms, names, evidence, exploratory).items():
            parts[label].append(part)
    whole = [_overall(gate, arms[label], parts[label], judged, blind, exploratory) for label in names]
    if len(names) > 1:
        notes.append(f"{len(names)} arms, each judged at alpha {gate.gate.alpha:g}: not corrected for their number")
    return Judged((*whole, *(part.verdict for label in names for part in parts[label])), out, tuple(notes))


def _sets(gate: Gate, sets: Sequence[SetEvidence]) -> tuple[list[SetEvidence], list[str]]:
    """The trace sets that are judged, and what must be known of any; what holds for several is said once."""
    judged: list[SetEvidence] = []
    places: dict[str, list[str]] = {}
    for evidence in sets:
        notes = [f"{item.name}: {item.message}" for item in evidence.found.findings if item.arm is None]
        notes += [f"left out of the averages: {line}" for line in evidence.found.missing]
        if evidence.found.workload not in gate.workloads:
            notes.append(f"not judged, the gate gives '{evidence.found.workload}' no role")
        elif evidence.found.query_aware and not gate.gate.query_aware:
            notes.append("not judged, the question was visible while compressing")
        else:
            judged.append(evidence)
        for note in notes:
            places.setdefault(note, []).append(evidence.place)
    return judged, [f"{_places(found, len(sets))}: {note}" for note, found in places.items()]


def _places(found: Sequence[str], count: int) -> str:
    """Trace sets of which the same is said."""
    return f"all {count} trace sets" if 1 < count == len(found) else "; ".join(found)


def _parts(
    gate: Gate, arms: Mapping[str, ArmInfo], names: Sequence[str], evidence: SetEvidence, exploratory: bool
) -> dict[str, _Part]:
    """One trace set's verdicts; all paired differences are resampled together.

    Rivals are for the promoting workloads: a needle that every arm finds tells none from another.
    """
    cells = [cell for label in names if (cell := evidence.found.cell(label)) is not None]
    promoting = evidence.found.workload in gate.roles.promote
    rivals = {cell.arm: rivalry(gate, arms, cell, evidence) for cell in cells if promoting}
    differences = evidence.differences(pair for arm, found in rivals.items() for pair in found.pairs(arm))
    return {
        cell.arm: _part(gate, arms, cell, evidence, rivals.get(cell.arm), differences, exploratory) for cell in cells
    }


def _part(
    gate: Gate,
    arms: Mapping[str, ArmInfo],
    cell: Cell,
    evidence: SetEvidence,
    rivals: Rivalry | None,
    differences: Mapping[Pair, Estimate],
    exploratory: bool,
) -> _Part:
    checks = tuple(_checks(gate, cell, evidence, rivals, differences))
    findings = [item for item in evidence.found.findings if item.concerns(cell.arm)]
    outcome, reason = _decide(gate, cell, checks, findings)
    clear = outcome == "promote"
    if clear and evidence.found.workload in gate.roles.veto:
        outcome, reason = "hold", "passed, but this workload may veto, never promote"
    found, info = evidence.found, arms[cell.arm]
    scope = f"{found.model}; {_work([(found.workload, found.length)])}; {_layers(info)}"
    verdict = Verdict(
        found.label, found.workload, cell.arm, outcome, reason, scope, exploratory, checks, found.model, not info.exact
    )
    return _Part(verdict, clear)


def _checks(
    gate: Gate, cell: Cell, evidence: SetEvidence, rivals: Rivalry | None, differences: Mapping[Pair, Estimate]
) -> list[Check]:
    dense = evidence.dense
    assert dense is not None
    checks = [
        check
        for limit in gate.quality
        if limit.about(cell.workload)
        for check in quality_checks(gate, limit, cell, evidence)
    ]
    savings = [reduction_check(limit, cell, dense) for limit in gate.reduction if limit.about(cell.workload)]
    checks += _one_of(savings) if gate.one_of == "reduction" else savings
    if rivals is not None:
        checks += rival_checks(gate, cell.arm, rivals, differences)
    return checks + [speed_check(limit, cell, evidence) for limit in gate.speed if limit.about(cell.workload)]


def _one_of(savings: list[Check]) -> list[Check]:
    """Where one saving is enough, the others are shown and decide nothing."""
    if not any(check.passed for check in savings):
        return savings
    return [
        check if check.passed else replace(check, decides=False, note="another saving is enough") for check in savings
    ]


def _decide(gate: Gate, cell: Cell, checks: Sequence[Check], findings: Sequence[Finding]) -> tuple[Outcome, str]:
    """The first thing that stops a careful reader."""
    better = [metric for metric in JUDGED if beats(cell, metric, gate.gate.suspect_above.get(metric, 0.0))]
    for outcome in _SEVERE:
        for item in findings:
            if item.severity == outcome and (outcome == "invalid" or item.name != BEATS or better):
                return outcome, f"{item.name}: {item.message}"
    if better:
        return "suspect", f"better than dense beyond noise: {CARDS[better[0]].title} {_number(cell, better[0])}"
    failed = [check for check in checks if check.decides and check.passed is False]
    if failed:
        return "reject", _first([describe(check) for check in failed])
    open_ones = [check for check in checks if check.decides and check.passed is None]
    if open_ones:
        return "hold", _first([_undecided(check) for check in open_ones])
    return "promote", "; ".join(_modelled(check) for check in checks if check.evidence == "modelled")


def describe(check: Check) -> str:
    """A decided check in words: `quality top1 -0.31, at least -0.05 was asked`."""
    if check.threshold is None or check.value is None:
        return check.note or check.name
    wanted = "at least" if check.direction == "at_least" else "at most"
    note = f" ({check.note})" if check.note else ""
    return f"{check.name} {check.value:.3g}, {wanted} {check.threshold:.3g} was asked{note}"


def _undecided(check: Check) -> str:
    """Underpowered comes first in a reason, whatever it is about."""
    if check.note.startswith(UNDERPOWERED):
        return f"{UNDERPOWERED}: {check.name}{check.note.removeprefix(UNDERPOWERED)}"
    return f"{check.name}: {check.note}"


def _modelled(check: Check) -> str:
    what = check.name.removesuffix(" gain")
    return f"modelled {what}, {check.note.rpartition('; ')[2]}"


def _first(reasons: Sequence[str], more: str = " (and {} more)") -> str:
    """The first reason, and how many more there are."""
    return reasons[0] + (more.format(len(reasons) - 1) if len(reasons) > 1 else "")


def _number(cell: Cell, metric: str) -> str:
    limit = cell.noise[metric]
    return f"{cell.difference[metric].mean:+.3g}, noise {0.0 if limit is None else limit:.3g}"


def _layers(info: ArmInfo) -> str:
    layers = f"acts on {', '.join(info.acts_on)} layers" if info.acts_on else "layers not recorded"
    kind = "" if info.exact else f"; approximates {', '.join(info.approximates)}"
    return layers + kind + ("; own prefill" if info.own_prefill else "")


def _overall(
    gate: Gate,
    info: ArmInfo,
    parts: Sequence[_Part],
    judged: Sequence[SetEvidence],
    blind: Sequence[SetEvidence],
    exploratory: bool,
) -> Verdict:
    """The verdict that counts: the worst of the parts, and what is not there at all."""
    outcome, reason = _worst(gate, info.label, parts, judged, blind)
    found = [part.verdict for part in parts]
    there = [item.found for item in judged if any((v.model, v.trace_set) == _name(item) for v in found)]
    models = ", ".join(dict.fromkeys(item.model for item in there)) or "no model"
    scope = f"{models}; {_work([(item.workload, item.length) for item in there])}; {_layers(info)}"
    checks = tuple(
        replace(check, name=f"{part.model}, {part.trace_set}: {check.name}") for part in found for check in part.checks
    )
    return Verdict("", "", info.label, outcome, reason, scope, exploratory, checks, "", not info.exact)


def _work(places: Sequence[tuple[str, int]]) -> str:
    """Workloads by length: `copy, chain at 2048 tokens; kv_short at 8192 tokens`."""
    lengths = dict.fromkeys(length for _, length in places)
    told = [
        f"{', '.join(dict.fromkeys(name for name, found in places if found == length))} at {length} tokens"
        for length in lengths
    ]
    return "; ".join(told) or "no workload"


def _worst(
    gate: Gate, label: str, parts: Sequence[_Part], judged: Sequence[SetEvidence], blind: Sequence[SetEvidence]
) -> tuple[Outcome, str]:
    """The worst outcome of the parts; `hold` where something is undecided or was not run; else `promote`.

    A rejection stands whatever looks too good elsewhere.
    """
    unclear = [part.verdict for part in parts if not part.clear]
    stops: tuple[Outcome, ...] = ("invalid", "reject", "suspect")
    for outcome in stops:
        if worst := [part for part in unclear if part.outcome == outcome]:
            return outcome, _first([f"{part.model}, {part.trace_set}: {part.reason}" for part in worst], ELSEWHERE)
    reasons = sorted(map(_placed, unclear), key=lambda reason: not reason.startswith(UNDERPOWERED))
    reasons += [f"no verdict on {item.place}: dense is below its floor" for item in blind]
    reasons += _absent(label, judged)
    told = ([_first(reasons, ELSEWHERE)] if reasons else []) + _lacking(gate, judged)
    if told:
        return "hold", "; ".join(told)
    clear = [part.verdict.reason for part in parts if part.verdict.outcome == "promote"]
    return "promote", "; ".join(dict.fromkeys(reason for reason in clear if reason))


def _lacking(gate: Gate, judged: Sequence[SetEvidence]) -> list[str]:
    """Promoting workloads that were not run, said once for all models of which it is true."""
    models: dict[str, list[str]] = {}
    for model in dict.fromkeys(item.found.model for item in judged) or ("any model",):
        ran = {item.found.workload for item in judged if item.found.model == model}
        if lacking := [name for name in gate.roles.promote if name not in ran]:
            models.setdefault(", ".join(lacking), []).append(model)
    return [
        f"not run on {', '.join(found)}: {lacking}; the workloads of promote do so together only"
        for lacking, found in models.items()
    ]


def _absent(label: str, judged: Sequence[SetEvidence]) -> list[str]:
    """Why an arm has no cell, said once for all trace sets of which it is true."""
    places: dict[str, list[str]] = {}
    for item in judged:
        if item.found.cell(label) is None:
            why = item.found.not_applicable.get(label)
            places.setdefault("did not run" if why is None else f"not applicable, {why}", []).append(item.place)
    return [f"{_places(found, len(judged))}: {why}" for why, found in places.items()]


def _placed(verdict: Verdict) -> str:
    """A reason with its place, underpowered first."""
    place = f"{verdict.model}, {verdict.trace_set}: "
    if verdict.reason.startswith(f"{UNDERPOWERED}: "):
        return f"{UNDERPOWERED}: {place}{verdict.reason.removeprefix(f'{UNDERPOWERED}: ')}"
    return place + verdict.reason


def _name(evidence: SetEvidence) -> tuple[str, str]:
    return evidence.found.model, evidence.found.label
