"""Arms with a prefill of their own: what differs from the shared dense prefill, and how the report shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.experiment.plan import make_plan
from kvassay.experiment.results import Results
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.report import words
from kvassay.report.html import render
from kvassay.report.points import policy_of
from tests.experiment.tiny import write_experiment


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Results:
    folder = tmp_path_factory.mktemp("own-prefill")
    file = write_experiment(folder, tiny_model, 2)
    text = file.read_text(encoding="utf-8")
    text = text.replace("budgets =", 'own_prefill = ["fp8", "dense", "knorm"]\nbudgets =')
    file.write_text(text, encoding="utf-8")
    return run(make_plan(load_experiment(file), file.name, folder), folder / "run")


def nll(results: Results, arm: str) -> list[float]:
    return [row.nll for row in results.samples() if row.arm == arm]


def test_dense_is_the_same_either_way(results: Results) -> None:
    shared, own = nll(results, "dense"), nll(results, "dense own-prefill")
    assert len(shared) == len(own) == 4
    assert own == pytest.approx(shared, abs=1e-4)


def test_fp8_is_not(results: Results) -> None:
    dense, shared, own = (nll(results, arm) for arm in ("dense", "fp8", "fp8 own-prefill"))
    # Far beyond the arithmetic's noise, in every question: later chunks read what fp8 made of earlier ones.
    assert all(abs(a - b) > 1e-3 for a, b in zip(shared, own, strict=True))
    assert all(abs(a - b) > 1e-3 for a, b in zip(dense, own, strict=True))


def test_dense_stays_what_all_are_compared_with(results: Results) -> None:
    own = results.sets[0].cell("fp8 own-prefill")
    assert own is not None
    pairs = zip(nll(results, "fp8 own-prefill"), nll(results, "dense"), strict=True)
    assert own.difference["nll"].mean == pytest.approx(sum(a - b for a, b in pairs) / 4, abs=1e-9)
    assert [cell.arm for cell in results.sets[0].cells].count("dense") == 1


def test_the_checks_find_nothing_wrong_and_note_the_other_prefill(results: Results) -> None:
    found = results.sets[0].findings
    assert [(f.name, f.message) for f in found if f.severity != "note"] == []
    own = {"fp8 own-prefill", "dense own-prefill", "knorm keep=0.5 own-prefill"}
    assert {f.arm for f in found if f.name == "other_prefill"} == own
    assert {row.prefill for row in results.samples() if row.arm in own} == {"own"}
    assert {row.prefill for row in results.samples() if row.arm not in own} == {"shared_dense"}


def test_the_report_marks_them(results: Results) -> None:
    assert [label for label, info in results.arms.items() if info.own_prefill] == [
        "fp8 own-prefill", "dense own-prefill", "knorm keep=0.5 own-prefill",
    ]  # fmt: skip
    assert any(line.startswith("own-prefill: ") for line in words.legend(results.arms))
    shared = {label: info for label, info in results.arms.items() if not info.own_prefill}
    assert not any(line.startswith("own-prefill: ") for line in words.legend(shared))
    page = render(results)
    assert "knorm keep=0.5 own-prefill" in page and "own-prefill: prefilled with" in page


def test_charts_draw_them_as_policies_of_their_own(results: Results) -> None:
    drawn = {policy_of(info) for info in results.arms.values()}
    assert {"fp8", "fp8 own-prefill", "dense", "dense own-prefill", "knorm", "knorm own-prefill"} <= drawn
