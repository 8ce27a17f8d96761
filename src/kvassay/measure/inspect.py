"""All checks over one trace set, in the order of judgement: what went in, what the numbers mean, what came out."""

from __future__ import annotations

from collections.abc import Sequence

from kvassay.measure import check_amounts, check_inputs, check_outcomes
from kvassay.measure.aggregate import Cell
from kvassay.measure.checks import LEAKS, Finding, SetFacts, by_arm
from kvassay.measure.result import BranchResult

_ORDER = ("invalid", "suspect", "note")


def inspect(rows: Sequence[BranchResult], cells: Sequence[Cell], facts: SetFacts) -> tuple[Finding, ...]:
    """What is wrong or odd with the rows and cells of one trace set; the gravest first."""
    arms = by_arm(rows)
    found = [
        *check_inputs.question_visible(arms, facts),
        *check_inputs.other_prefill(arms, facts),
        *check_inputs.future_query(arms, facts),
        *check_inputs.bos(facts),
        *check_inputs.answer_cut(arms, facts),
        *check_amounts.denominator(arms),
        *check_amounts.budget_base(arms, facts),
        *check_outcomes.identical_arms(arms, facts),
        *check_outcomes.no_effect(arms, cells, facts),
        *check_outcomes.underpowered(cells),
    ]
    leaks = [finding for finding in found if finding.name in LEAKS]
    found += check_outcomes.beats_dense(cells, facts, leaks)
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))
