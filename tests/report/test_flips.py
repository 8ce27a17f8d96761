"""Turned answers: counted all, listed some, and what was left out is said."""

from __future__ import annotations

from pathlib import Path

from kvassay.experiment.folder import SAMPLES
from kvassay.experiment.results import Results
from kvassay.experiment.rows import write_samples
from kvassay.report.flips import LISTED, SHOWN_CHARACTERS, ArmFlips, flips_of
from kvassay.report.html import render
from tests.report.full_run import MODEL, SET
from tests.rows import row
from tests.runs import make_run


def turned(folder: Path, tasks: list[tuple[float, float]], text: str = "no") -> tuple[Results, list[ArmFlips]]:
    """fp8's flips where question n was solved to `tasks[n]` by dense and by fp8."""
    results = make_run(folder)
    rows = [
        row(arm, "t0", number, task=score, generated=text)
        for number, scores in enumerate(tasks)
        for arm, score in zip(("dense", "fp8"), scores, strict=True)
    ]
    write_samples([({"model": MODEL, "trace_set": SET}, rows)], folder / SAMPLES)
    return results, flips_of(results)[MODEL, SET]


def test_lost_ones_are_listed_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    results, (found,) = turned(tmp_path, [(0, 1)] * 3 + [(1, 0)] * 12 + [(1, 1), (0, 0), (0.9, 0.2)])
    assert (found.arm, found.lost, found.won, found.questions, found.left_out) == ("fp8", 12, 3, 18, 15 - LISTED)
    assert [one.question for one in found.listed] == list(range(3, 3 + LISTED))
    assert {one.way for one in found.listed} == {"right to wrong"}
    assert "12 lost, 3 won of 18 questions; 5 not listed" in render(results)


def test_a_long_text_is_cut_and_says_so(tmp_path: Path) -> None:
    _, (found,) = turned(tmp_path, [(0, 1)], text="x" * (SHOWN_CHARACTERS + 7))
    assert found.listed[0].arm == "x" * SHOWN_CHARACTERS + "… (7 more characters)"
    assert found.listed[0].way == "wrong to right"
    assert found.listed[0].expected is None  # the traces are not in the folder


def test_a_hair_of_float_noise_turns_nothing(tmp_path: Path) -> None:
    assert turned(tmp_path, [(1.0, 1 - 1e-12)])[1] == []
