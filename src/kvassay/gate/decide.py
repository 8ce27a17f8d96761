"""One threshold against one number: passed, failed, or not decided, and why.

What is uncertain is decided by its test at the gate's alpha. An arm passes if being beyond the threshold is
refuted, fails if being within it is refuted, and is undecided between. With fewer contexts than planned nothing is
passed: too few samples may reject, never promote.
"""

from __future__ import annotations

from dataclasses import replace

from kvassay.gate.evidence import SetEvidence
from kvassay.gate.schema import Gate, Quality, Reduction, Speed
from kvassay.measure.aggregate import Cell
from kvassay.measure.cost import CostResult
from kvassay.measure.equivalence import equivalence, non_inferiority, superiority
from kvassay.measure.latency import LatencyResult
from kvassay.measure.metrics import CARDS
from kvassay.measure.resample import Estimate
from kvassay.measure.result import NOT_GENERATED
from kvassay.measure.statistics import reach
from kvassay.measure.verdict import Check, Direction

UNDERPOWERED = "underpowered"
"""How the reason for too few samples begins."""


def by_test(p: float | None, alpha: float) -> bool | None:
    """True if the test refutes failing, False if it would refute passing (its p is the complement), else None."""
    if p is None:
        return None
    return True if p < alpha else False if p > 1 - alpha else None


def quality_checks(gate: Gate, limit: Quality, cell: Cell, evidence: SetEvidence) -> list[Check]:
    """The loss against dense, and for equivalence the gain too."""
    card = CARDS[limit.metric]
    found = cell.difference.get(limit.metric)
    lower_better = card.better == "lower"
    direction: Direction = "at_most" if lower_better else "at_least"
    worst = limit.margin if lower_better else -limit.margin
    if found is None:
        unit = f"{card.unit}, arm minus dense"
        return [
            Check(
                f"quality {limit.metric}", worst, direction, None, None, None, None, "measured",
                unit=unit, note=NOT_GENERATED,
            )
        ]  # fmt: skip
    passed = by_test(non_inferiority(found, limit.margin, card.better), gate.gate.alpha)
    loss = _tested(f"quality {limit.metric}", worst, direction, found, passed, f"{card.unit}, arm minus dense")
    loss = _planned(_quiet(loss, limit, evidence), gate, found)
    if limit.test == "non_inferiority":
        return [loss]
    test = equivalence(found, limit.margin)
    other = None if test is None else test.above_p if lower_better else test.below_p
    gain = _tested(
        f"quality {limit.metric} not better either",
        -worst,
        "at_least" if lower_better else "at_most",
        found,
        by_test(other, gate.gate.alpha),
        f"{card.unit}, arm minus dense",
    )
    return [loss, _planned(_quiet(gain, limit, evidence), gate, found)]


def lead_check(gate: Gate, rival: str, metric: str, found: Estimate) -> Check:
    """Whether the arm answers better than a rival that costs no more."""
    card, lead = CARDS[metric], gate.baselines.lead
    passed = by_test(superiority(found, lead, card.better), gate.gate.alpha)
    lower_better = card.better == "lower"
    check = _tested(
        f"better than {rival}",
        -lead if lower_better else lead,
        "at_most" if lower_better else "at_least",
        found,
        passed,
        f"{card.title}, {card.unit}, arm minus {rival}",
    )
    return replace(_planned(check, gate, found), against=rival)


def _tested(
    name: str, threshold: float, direction: Direction, found: Estimate, passed: bool | None, unit: str
) -> Check:
    note = f"{UNDERPOWERED}: {_too_few(found)}" if passed is None else ""
    return Check(
        name, threshold, direction, found.mean, found.low, found.high, passed, "measured", unit=unit, note=note
    )


def _too_few(found: Estimate) -> str:
    if found.low is None:
        return "one context gives no interval" if found.clusters == 1 else f"{found.clusters} contexts give no interval"
    return f"{found.clusters} contexts leave it between {found.low:+.3g} and {found.high:+.3g}"


def _quiet(check: Check, limit: Quality, evidence: SetEvidence) -> Check:
    """Not passed where dense' itself lies as far from dense as the margin: the machine's noise drowns it."""
    again = evidence.reach_of(limit.metric)
    if again is None or check.passed is not True or reach(again) < limit.margin:
        return check
    note = f"the margin {limit.margin:g} is within noise: dense' reaches {reach(again):.3g} from dense"
    return replace(check, passed=None, note=note)


def _planned(check: Check, gate: Gate, found: Estimate) -> Check:
    planned = gate.samples.contexts
    if check.passed is not True or found.clusters >= planned:
        return check
    return replace(check, passed=None, note=f"{UNDERPOWERED}: {found.clusters} of {planned} planned contexts")


def saved(limit: Reduction, cell: Cell, dense: Cell) -> tuple[float | None, str]:
    """Fraction of dense's bytes that an arm frees or does not read, and by which way of reclaiming.

    None where nothing can be saved: no layer's cache grows with the context.
    """
    if limit.of == "read_bytes":
        name = "read_bytes_growing" if limit.layers == "growing" else "read_bytes"
        read, all_of_it = cell.amounts[name], dense.amounts[name]
        return (1 - read / all_of_it if all_of_it else None), ""
    total = cell.amounts["blocks_total"]
    ways = {mode: cell.blocks_freed[mode] for mode in limit.reclaim if mode in cell.blocks_freed}
    if not total or not ways:
        return None, ""
    best = max(ways, key=lambda mode: ways[mode])
    share = 1.0
    if limit.layers == "model":
        share = dense.amounts["retained_bytes_scope"] / dense.amounts["retained_bytes"]
    return share * ways[best] / total, best


def reduction_check(limit: Reduction, cell: Cell, dense: Cell) -> Check:
    """Bytes that come back to the pool, or that a step need not read."""
    value, way = saved(limit, cell, dense)
    freed = limit.of == "freed_bytes"
    name = f"freed ({' or '.join(limit.reclaim)})" if freed else "read less"
    part = "growing layers'" if limit.layers == "growing" else "whole model's"
    unit = f"fraction of the {part} dense bytes{'' if freed else ' per token'}"
    note = f"by {way}" if way else "" if value is not None else "no layer grows with the context"
    passed = None if value is None else value >= limit.at_least
    return Check(name, limit.at_least, "at_least", value, None, None, passed, "measured", unit=unit, note=note)


def speed_check(limit: Speed, cell: Cell, evidence: SetEvidence) -> Check:
    """Decode time or goodput against dense: measured if that counts and is there, else modelled if that counts."""
    found = _measured(limit, cell, evidence) if "measured" in limit.evidence else None
    if found is None and "modelled" in limit.evidence:
        found = _modelled(limit, cell, evidence)
    if found is not None:
        return found
    where = "" if limit.takes("") else f" on {' or '.join(limit.hardware)}"
    kinds = " or ".join(limit.evidence)
    silent = limit.of == "goodput" and "task" not in cell.quality
    return Check(
        f"{limit.of} gain", limit.at_least, "at_least", None, None, None, None, limit.evidence[0],
        unit="times dense", note=NOT_GENERATED if silent else f"no {kinds} {limit.of}{where}",
    )  # fmt: skip


def _measured(limit: Speed, cell: Cell, evidence: SetEvidence) -> Check | None:
    rows = [row for row in evidence.latency if row.arm == cell.arm and limit.takes(row.hardware)]
    factor = _output_factor(limit, cell, evidence.dense)
    if not rows or factor is None:
        return None

    def gain(row: LatencyResult, attention: float) -> float:
        return factor * row.dense_seconds / (attention + row.policy_seconds)

    row = min(rows, key=lambda item: gain(item, item.attention_seconds))
    value = gain(row, row.attention_seconds)
    low, high = gain(row, row.attention_high), gain(row, row.attention_low)
    return _sped(limit, value, low, high, row.hardware, "attention and policy time; interval: quartiles of rounds")


def _modelled(limit: Speed, cell: Cell, evidence: SetEvidence) -> Check | None:
    rows = [row for row in evidence.cost if row.arm == cell.arm and limit.takes(row.hardware)]
    factor = _output_factor(limit, cell, evidence.dense)
    if not rows or factor is None:
        return None

    def gain(row: CostResult) -> float:
        return factor * row.dense_seconds_per_token / row.seconds_per_token

    row = min(rows, key=gain)
    value, error = gain(row), row.calibration_error
    note = calibration(error)
    low, high = (None, None) if error is None else (value / (1 + error), value * (1 + error))
    check = _sped(limit, value, low, high, row.hardware, f"attention time; {note}")
    return replace(check, evidence="modelled")


def calibration(error: float | None) -> str:
    """How far the model was from measured times, in words."""
    return "not calibrated" if error is None else f"calibration error {100 * error:.0f}%"


def _sped(limit: Speed, value: float, low: float | None, high: float | None, hardware: str, note: str) -> Check:
    """Undecided where the threshold lies within the spread of the number; the slowest hardware that counts decides."""
    bottom, top = (value if low is None else low), (value if high is None else high)
    passed = True if bottom >= limit.at_least else False if top < limit.at_least else None
    return Check(
        f"{limit.of} gain", limit.at_least, "at_least", value, low, high, passed, "measured", hardware,
        "times dense", note if passed is not None else f"not told from the threshold; {note}",
    )  # fmt: skip


def _output_factor(limit: Speed, cell: Cell, dense: Cell | None) -> float | None:
    """For goodput: the arm's right answers per generated token / dense's, so that longer or wrong outputs cost."""
    if limit.of == "latency":
        return 1.0
    if dense is None or "task" not in cell.quality:
        return None
    wanted = [each.quality[name].mean for each in (cell, dense) for name in ("task", "generated_tokens")]
    task, tokens, dense_task, dense_tokens = wanted
    if not (tokens > 0 and dense_tokens > 0 and dense_task > 0):
        return None
    return (task / tokens) / (dense_task / dense_tokens)
