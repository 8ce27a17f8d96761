"""The worst case of each threshold, on a hand-made judgement."""

from __future__ import annotations

from dataclasses import replace

from kvassay.measure.verdict import Check
from kvassay.report.worst import worst_cases
from tests.report.test_verdicts import BAD, GOOD, JUDGEMENT


def quality(value: float | None) -> Check:
    return Check("quality top1", -0.1, "at_least", value, None, None, None, "measured")


def kl(value: float) -> Check:
    return Check("quality kl", 0.2, "at_most", value, None, None, None, "measured")


RIVAL = replace(quality(-1.0), name="better than random", against="random")
FRONT = Check("on the front", None, "at_least", None, None, None, True, "measured")


def test_the_value_farthest_from_passing_and_where() -> None:
    parts = [
        replace(GOOD, trace_set=f"{work} 2k", workload=work, model=model, checks=(*checks, RIVAL, FRONT))
        for work, model, checks in (
            ("copy", "a", (quality(-0.02), kl(0.1))),
            ("copy", "b", (quality(-0.31), kl(0.05))),
            ("chain", "b", (quality(None), kl(0.4))),
        )
    ]
    found = worst_cases(replace(JUDGEMENT, verdicts=(GOOD, BAD, *parts)))
    assert found is not None
    assert [head.name for head in found.heads] == ["arm", "verdict", "quality top1 ≥ -0.1", "quality kl ≤ 0.2"]
    assert [line.cells for line in found.lines] == [
        ("good keep=0.25", "promote", "-0.31 (b, copy 2k)", "0.4 (b, chain 2k)"),
        ("bad[bold] keep=0.5 (approximates)", "reject", "-", "-"),
    ]


def test_without_a_threshold_there_is_no_table() -> None:
    assert worst_cases(JUDGEMENT) is None
