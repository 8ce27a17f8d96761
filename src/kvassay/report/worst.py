"""Verdicts at a glance: of every threshold that has a number, the arm's worst value and where it was found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvassay.measure.verdict import Check, Judgement, Verdict
from kvassay.report import content, tables

TITLE = "Worst case of each threshold"
NOTE = "the value that is farthest from passing, over all trace sets, and where; rivals and the front are below"


def worst_cases(judgement: Judgement) -> tables.Grid | None:
    """One line per judged arm, one column per threshold; None if no threshold was checked anywhere."""
    parts = {one.arm: [part for part in judgement.of(one.arm) if not part.overall] for one in judgement.overall}
    names = _thresholds(check for found in parts.values() for part in found for check in part.checks)
    if not names:
        return None
    lines = [
        [content.name_of(one), one.outcome, *(_worst(parts[one.arm], name) for name in names)]
        for one in judgement.overall
    ]
    return tables.plain(TITLE, ["arm", "verdict", *names.values()], lines)


def _thresholds(checks: Iterable[Check]) -> dict[tuple[str, float | None], str]:
    """Thresholds that a gate sets a number for, rivals aside: name and number, and the head of their column."""
    found: dict[tuple[str, float | None], str] = {}
    for check in checks:
        if check.threshold is not None and not check.against:
            sign = "≥" if check.direction == "at_least" else "≤"
            how = f" ({check.evidence}, {check.hardware})" if check.hardware else ""
            found.setdefault((check.name, check.threshold), f"{check.name}{how} {sign} {check.threshold:g}")
    return found


def _worst(parts: Sequence[Verdict], name: tuple[str, float | None]) -> str:
    """The value farthest from passing, and its trace set."""
    found = [
        (check.value if check.direction == "at_least" else -check.value, check, part)
        for part in parts
        for check in part.checks
        if (check.name, check.threshold) == name and check.value is not None
    ]
    if not found:
        return "-"
    _, check, part = min(found, key=lambda one: one[0])
    return f"{check.value:.3g} ({part.model}, {part.trace_set})"
