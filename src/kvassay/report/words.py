"""How results are worded, the same in every form of report: numbers, arm marks, captions, parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import CHECKS
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.aggregate import DENSE, Cell
from kvassay.measure.checks import Finding
from kvassay.measure.resample import Estimate

REFERENCE, RECONSTRUCTION = "†", "‡"
FEW = 4
"""Findings of one name that are written out."""
WHOLE, PER_HEAD = "whole_block", "per_head_tables"

EXACT_TITLE = "Exact attention over what is retained"
TRANSFORMING_TITLE = "Transforming: keys, values or logits are approximated"
ENCODED_NOTE = "freed blocks are net of those that encoded segments fill again"
"""Said with the transforming arms: part of what they free they need again in another form."""


@dataclass(frozen=True)
class Part:
    """The arms of one kind, in one table."""

    title: str
    cells: tuple[Cell, ...]
    note: str = ""


def parts(found: SetResult, arms: Mapping[str, ArmInfo]) -> list[Part]:
    """Exact arms first, transforming arms apart; they are never ranked in one list."""
    exact = tuple(cell for cell in found.cells if arms[cell.arm].exact)
    other = tuple(cell for cell in found.cells if not arms[cell.arm].exact)
    named = (Part(EXACT_TITLE, exact), Part(TRANSFORMING_TITLE, other, ENCODED_NOTE))
    return [part for part in named if part.cells]


def arm_name(cell: Cell, arms: Mapping[str, ArmInfo]) -> str:
    """The arm's label with its marks."""
    info = arms[cell.arm]
    marks = (REFERENCE if info.reference else "") + (RECONSTRUCTION if info.reconstruction else "")
    name, space, rest = cell.arm.partition(" ")
    return f"{name}{marks}{space}{rest}"


def caption(found: SetResult) -> str:
    """What one table is about, in one line."""
    seen = "question VISIBLE while compressing" if found.query_aware else "question not visible while compressing"
    answered = found.cells[0].samples if found.cells else 0
    contexts = f"{found.contexts} context{'s' if found.contexts > 1 else ''}"
    return (
        f"{found.label}: {contexts} of {found.length} tokens, {answered} questions; "
        f"{seen} (query_aware = {str(found.query_aware).lower()})"
    )


def common(results: Results) -> str:
    """What all arms share, in one line."""
    protection, protocol = results.manifest["protection"], results.manifest["protocol"]
    return (
        f"Every arm keeps the first {protection['sink']} and last {protection['recent']} tokens, inside its budget; "
        f"blocks of {protocol['block_size']} tokens; up to {protocol['free_tokens']} tokens generated per question."
    )


def warnings(found: SetResult) -> list[str]:
    """What a reader must know before believing a table."""
    return _standing(found) + _findings([one for one in found.findings if one.severity != "note"])


def remarks(found: SetResult) -> list[str]:
    """What explains a table: arms that are not in it, and findings that are no faults."""
    return _idle(found) + _findings([one for one in found.findings if one.severity == "note"])


def limits(found: SetResult) -> list[str]:
    """What a table leaves out, and whether it says anything at all."""
    return _idle(found) + _standing(found)


def _idle(found: SetResult) -> list[str]:
    return [f"not applicable, {arm}: {reason}" for arm, reason in found.not_applicable.items()]


def _standing(found: SetResult) -> list[str]:
    lines = [f"left out of the averages: {line}" for line in found.missing]
    dense = found.cell(DENSE)
    lines += [] if dense is None else _states(dense)
    if dense is not None and found.floor is not None and not found.floor["passed"]:
        lines.append(
            f"below the dense floor: dense itself reaches top-1 {number(dense.quality['top1'].mean)} and NLL "
            f"{number(dense.quality['nll'].mean)} (floor: at least {found.floor['min_top1']}, at most "
            f"{found.floor['max_nll']}); no arm can be judged here"
        )
    return lines


def _states(dense: Cell) -> list[str]:
    """State beside keys and values that is in dense's bytes and traffic."""
    held = dense.amounts["retained_bytes"]
    lines = [
        f"of {size(held)} that dense holds, {size(dense.amounts[name])} are {what}"
        for name, what in (("index_bytes", "index keys"), ("pooled_bytes", "compressed entries"))
        if dense.amounts[name]
    ]
    if read := dense.amounts["index_read_bytes"]:
        lines.append(f"of {size(dense.amounts['read_bytes'])} that it reads per token, {size(read)} are index keys")
    return lines


def _findings(findings: Sequence[Finding]) -> list[str]:
    """What the checks found, one line each; of many with one name the first few, of notes the first."""
    lines = []
    for name in dict.fromkeys(finding.name for finding in findings):
        mine = [finding for finding in findings if finding.name == name]
        few = 1 if mine[0].severity == "note" else FEW
        for finding in mine[:few]:
            about = f"{finding.arm}: " if finding.arm is not None else ""
            lines.append(f"{finding.severity}, {name}: {about}{finding.message}")
        if len(mine) > few:
            lines.append(f"{mine[few].severity}, {name}: and {len(mine) - few} more (see {CHECKS})")
    return lines


def legend(arms: Mapping[str, ArmInfo]) -> list[str]:
    """What the marks mean, of those that occur."""
    lines = []
    if any(info.reference for info in arms.values()):
        lines.append(f"{REFERENCE} reference: a yardstick that no engine could run, not a candidate")
    if any(info.reconstruction for info in arms.values()):
        lines.append(f"{RECONSTRUCTION} reconstruction: gaps of the published text were filled in by us")
    if any(label == f"{DENSE}'" for label in arms):
        lines.append("dense' is dense in another batch split: its distance from dense is the noise of the arithmetic")
    if any(info.own_prefill for info in arms.values()):
        lines.append(
            "own-prefill: prefilled with the policy in the loop, reading what it left; all other arms share one dense "
            "prefill"
        )
    return lines


def unjudged(results: Results) -> str | None:
    """One line if dense is below its floor somewhere: how many tables say nothing of any arm, and what helps."""
    below = [found for found in results.sets if found.floor is not None and not found.floor["passed"]]
    if not below:
        return None
    where = "; ".join(f"{found.model}, {found.label}" for found in below)
    return (
        f"no arm can be judged in {len(below)} of {len(results.sets)} tables ({where}): dense itself is below the "
        "floor there; try a larger model, shorter contexts or another workload"
    )


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; `-` for none."""
    if value is None:
        return "-"
    return "nan" if math.isnan(value) else f"{value:.{digits}f}"


def average(cell: Cell, metric: str, digits: int = 3) -> str:
    """A cell's mean; `-` if it was not measured."""
    found = cell.quality.get(metric)
    return number(None if found is None else found.mean, digits)


def spread(estimate: Estimate, digits: int = 2) -> str:
    """Mean and half width of the interval: `0.93 ±0.05`."""
    half = estimate.half_width
    shown = number(estimate.mean, digits)
    return shown if half is None else f"{shown} ±{number(half, digits)}"


def interval(estimate: Estimate | None, digits: int = 3) -> str:
    """Mean and interval: `0.933 [0.850, 1.000]`."""
    if estimate is None:
        return "-"
    shown = number(estimate.mean, digits)
    if estimate.low is None or estimate.high is None:
        return shown
    return f"{shown} [{number(estimate.low, digits)}, {number(estimate.high, digits)}]"


def percent(fraction: float) -> str:
    """A fraction as per cent; one digit below 10."""
    value = 100 * fraction
    return "nan" if math.isnan(value) else f"{value:.1f}%" if value < 9.95 else f"{value:.0f}%"


def size(count: float) -> str:
    """Bytes in binary units, three digits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    value, unit = float(count), units[0]
    for bigger in units[1:]:
        if value < 1000:
            break
        value, unit = value / 1024, bigger
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def blocks(count: float | None) -> str:
    """A mean number of blocks; whole if it is."""
    if count is None:
        return "-"
    return f"{count:.0f}" if count == int(count) else f"{count:.1f}"


def freed(cell: Cell, mode: str) -> str:
    """Blocks freed of all: `12/128`."""
    return f"{blocks(cell.blocks_freed.get(mode))}/{blocks(cell.amounts['blocks_total'])}"


def flipped(cell: Cell, metric: str = "task") -> str:
    """Answers lost and won against dense: `2/1`."""
    found = cell.flips.get(metric)
    return "-" if found is None else f"{found.right_to_wrong}/{found.wrong_to_right}"


def machine_line(manifest: Mapping[str, object]) -> str:
    """Where the numbers come from, in one line."""
    machine = manifest["machine"]
    assert isinstance(machine, dict)
    where = machine["device"] if machine["device"] != "cpu" else machine["cpu"]
    return (
        f"{where}, {machine['cpu_count']} CPUs, {machine['memory_gib']} GiB; torch {machine['torch']}, "
        f"transformers {machine['transformers']}, kvassay {machine['kvassay']}"
    )


def models(results: Results) -> Sequence[tuple[str, list[SetResult]]]:
    """Trace sets by model, in order."""
    grouped: dict[str, list[SetResult]] = {}
    for found in results.sets:
        grouped.setdefault(found.model, []).append(found)
    return list(grouped.items())
