"""Do bytes, fractions and budgets mean what they say? Checks of the structure of the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from kvassay.measure.aggregate import DENSE
from kvassay.measure.checks import ArmFacts, Finding, Rows, SetFacts, some
from kvassay.measure.result import BranchResult

ROUNDING = 1e-6
"""Relative difference between a stored fraction and its quotient that is floating point."""
SLACK = 0.05
"""Share of the budget that an arm may be off, beside one block per head."""
SHARP = 0.002
"""Share of the context by which a guess at a wrong base may be off: a token for every 500."""
REMOVED = "the share removed"
FAR = 2.0
"""Times the budget (or its inverse) from which on an arm is suspect whatever the reason."""


def denominator(rows: Rows) -> Iterator[Finding]:
    """Fractions that are not the arm's number over dense's for the same question."""
    dense = rows.get(DENSE, {})
    for arm, mine in rows.items():
        for name, (numerator, base) in _FRACTIONS.items():
            wrong = [
                (key, row, base(row, dense[key]))
                for key, row in mine.items()
                if key in dense and not _quotient(getattr(row, name), getattr(row, numerator), base(row, dense[key]))
            ]
            if wrong:
                _, row, of = wrong[0]
                came = getattr(row, numerator)
                yield Finding(
                    "denominator", "invalid", arm,
                    f"{name} is {getattr(row, name):.4g}, but {came:.6g} of dense's {of:.6g} bytes are "
                    f"{came / of if of else math.nan:.4g}, in {some([key for key, *_ in wrong], len(mine))}",
                )  # fmt: skip


def _scope(row: BranchResult, base: BranchResult) -> float:
    """Dense's bytes in the arm's scope. Outside it the arm holds what dense holds, so three numbers give it."""
    return base.retained_bytes - (row.retained_bytes - row.retained_bytes_scope)


_FRACTIONS: dict[str, tuple[str, Callable[[BranchResult, BranchResult], float]]] = {
    "retained_fraction": ("retained_bytes", lambda row, base: base.retained_bytes),
    "retained_fraction_scope": ("retained_bytes_scope", _scope),
    "read_fraction": ("read_bytes", lambda row, base: base.read_bytes),
}
"""Fractions by name: the numerator's name, and dense's bytes it is a share of, from the arm's row and dense's."""


def _quotient(fraction: float, numerator: float, denominator: float) -> bool:
    if denominator <= 0:
        return fraction == 0
    return math.isclose(fraction, numerator / denominator, rel_tol=ROUNDING, abs_tol=1e-12)


def budget_base(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """Arms that hold or read far more or less than their budget, and of what it would have been the share."""
    for arm, mine in rows.items():
        about = facts.arms[arm]
        if about.budget is None or not mine:
            continue
        found = _budget(list(mine.values()), about, facts)
        if found is not None:
            yield found


def _budget(rows: Sequence[BranchResult], about: ArmFacts, facts: SetFacts) -> Finding | None:
    """Compare tokens kept (or read, or worth the bytes held) with the budget's, means over questions."""
    budget = about.budget
    assert budget is not None
    context = _mean([row.context_tokens for row in rows])
    new = _mean([row.question_tokens + row.answer_tokens - 1 for row in rows])
    wanted = _mean([budget.tokens(row.context_tokens) for row in rows])
    if budget.unit == "read_tokens":
        came, verb = _mean([row.selected_tokens for row in rows]), "reads"
    elif budget.unit == "bytes" or (budget.unit == "keep_tokens" and about.evicts_only):
        came, verb = _mean([row.retained_fraction_scope for row in rows]) * (context + new) - new, "holds"
    else:
        return None
    slack = SLACK * wanted + facts.block_size
    if wanted - slack - new <= came <= wanted + slack + (new if verb == "reads" else 0):
        return None
    whole = _mean([row.retained_fraction for row in rows]) * (context + new) - new
    base = _wrong_base(came, wanted, context, new, whole if verb == "holds" else None, facts)
    far = came > FAR * wanted or came * FAR < wanted
    return Finding(
        "budget_base", "suspect" if base or far else "note", about.label,
        f"{verb} {came:.0f} tokens per head and layer in scope, {came / context:.0%} of the context; {budget.label} "
        f"asks for {wanted:.0f}" + (f": as if it were {base}" if base else ""),
    )  # fmt: skip


def _wrong_base(
    came: float, wanted: float, context: float, new: float, whole: float | None, facts: SetFacts
) -> str | None:
    """What else the budget's share would have to be of, to give what the arm came to.

    Tokens held are counted sharply; tokens read vary by head and step, and only the grossest guess is tried.
    """
    share = wanted / context
    protected = facts.protection.sink + facts.protection.recent
    if whole is None:
        return REMOVED if math.isclose(came, context - wanted, rel_tol=SLACK) else None
    guesses = (
        ("a share of the whole model's cache", wanted + came - whole),
        (REMOVED, context - wanted),
        ("a share of context, question and answer", share * (context + new)),
        ("a share of the tokens that are not protected", share * (context - protected) + protected),
    )
    return next((text for text, tokens in guesses if abs(came - tokens) <= max(1.0, SHARP * context)), None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
