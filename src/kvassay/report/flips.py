"""Questions whose task answer an arm lost or won against dense, with what both wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kvassay.experiment.folder import RunFolder
from kvassay.experiment.recorded import read_recorded
from kvassay.experiment.results import Results, SetResult
from kvassay.measure.aggregate import DENSE, FULL_MARKS

LISTED = 10
"""Questions written out per arm and trace set; the others are counted."""
SHOWN_CHARACTERS = 240
"""Of a text; a longer one is cut, and says so."""

Way = Literal["right to wrong", "wrong to right"]


@dataclass(frozen=True)
class Flip:
    """One question that turned."""

    way: Way
    trace: str
    question: int
    """Ordinal within its context."""
    expected: str | None
    """The recorded answer; None if the trace is not there any more."""
    dense: str
    """Generated text, raw."""
    arm: str


@dataclass(frozen=True)
class ArmFlips:
    """The turned questions of one arm on one trace set."""

    arm: str
    lost: int
    won: int
    questions: int
    listed: tuple[Flip, ...]
    """Lost ones first."""

    @property
    def left_out(self) -> int:
        """Turned questions that are not listed."""
        return self.lost + self.won - len(self.listed)


Key = tuple[str, int]
"""A question: (trace, ordinal)."""
Texts = dict[Key, tuple[bool, str]]
"""By question: whether the task was solved (no, if nothing was generated), and the text."""


def flips_of(results: Results) -> dict[tuple[str, str], list[ArmFlips]]:
    """Arms that turned any question, by (model, trace set), in the order in which they ran."""
    by_arm = _texts(results)
    expected = _expected(results)
    return {
        (found.model, found.label): list(_set(found, by_arm.get((found.model, found.label), {}), expected))
        for found in results.sets
    }


def _texts(results: Results) -> dict[tuple[str, str], dict[str, Texts]]:
    columns = results.columns("model", "trace_set", "arm", "trace", "branch", "task", "generated")
    found: dict[tuple[str, str], dict[str, Texts]] = {}
    for model, label, arm, trace, branch, task, text in zip(*columns.values(), strict=True):
        found.setdefault((model, label), {}).setdefault(arm, {})[trace, branch] = ((task or 0.0) >= FULL_MARKS, text)
    return found


def _set(
    found: SetResult, texts: Mapping[str, Texts], expected: Callable[[str, int], str | None]
) -> Iterator[ArmFlips]:
    dense = texts.get(DENSE, {})
    for cell in found.cells:
        mine = texts.get(cell.arm, {})
        shared = [key for key in dense if key in mine]
        lost = [key for key in shared if dense[key][0] and not mine[key][0]]
        won = [key for key in shared if mine[key][0] and not dense[key][0]]
        if not lost and not won:
            continue
        ways: dict[Key, Way] = {**dict.fromkeys(lost, "right to wrong"), **dict.fromkeys(won, "wrong to right")}
        listed = tuple(
            Flip(ways[key], *key, expected(*key), _cut(dense[key][1]), _cut(mine[key][1]))
            for key in (lost + won)[:LISTED]
        )
        yield ArmFlips(cell.arm, len(lost), len(won), len(shared), listed)


def _expected(results: Results) -> Callable[[str, int], str | None]:
    traces = RunFolder(results.path).traces

    @cache
    def answers(trace: str) -> tuple[str, ...] | None:
        recorded = read_recorded(traces / trace)
        return None if recorded is None else recorded.answers

    def expected(trace: str, question: int) -> str | None:
        found = answers(trace)
        return None if found is None else _cut(found[question])

    return expected


def _cut(text: str) -> str:
    left = len(text) - SHOWN_CHARACTERS
    return text if left <= 0 else f"{text[:SHOWN_CHARACTERS]}… ({left} more characters)"
