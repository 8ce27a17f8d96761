"""Predeclaration: what judges a run, what is refused, and how an exploratory judgement shows."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from kvassay.errors import GateError
from kvassay.experiment.folder import GATE
from kvassay.gate import declare as declaring
from kvassay.gate.chain import LOG
from kvassay.gate.declare import declare
from kvassay.gate.session import EXPLORED, judge_run, pin
from kvassay.measure.verdict import VERDICTS, load_judgement
from kvassay.report.verdicts import verdict_table
from tests.gate import made
from tests.gate.folder import STARTED, write_run
from tests.gate.made import CAND, everywhere

BEFORE, AFTER = "2026-01-01T00:00:00+00:00", "2026-01-03T00:00:00+00:00"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "gates" / "gate.toml"
    found.parent.mkdir()
    found.write_text(made.GATE, encoding="utf-8")
    return found


def declare_at(file: Path, time: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaring, "now", lambda: time)
    declare(file)


def shown(run: Path) -> str:
    stream = io.StringIO()
    Console(file=stream, width=400).print(verdict_table(run))
    return stream.getvalue()


def test_a_gate_declared_before_judges(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_at(file, BEFORE, monkeypatch)
    results = write_run(tmp_path / "run")
    judgement = judge_run(results, file)
    assert (judgement.exploratory, judgement.warning, judgement.declared) == (False, "", BEFORE)
    assert [(verdict.arm, verdict.outcome) for verdict in judgement.overall] == [(CAND, "promote")]
    assert load_judgement(results.path) == judgement
    assert (results.path / GATE).read_bytes() == file.read_bytes()
    assert (results.path / LOG).read_text() == (file.parent / LOG).read_text()
    assert judgement.gate_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    # its folder is enough to judge it again
    assert judge_run(results).verdicts == judgement.verdicts


def refuse(run: Path, file: Path, message: str) -> None:
    results = write_run(run)
    with pytest.raises(GateError) as caught:
        judge_run(results, file)
    said = str(caught.value)
    assert said.startswith(f"{file}: {message}") and said.endswith("--exploratory judges all the same, and says so")
    assert not (run / VERDICTS).exists() and not (run / GATE).exists()
    judgement = judge_run(results, file, exploratory=True)
    assert judgement.warning == f"EXPLORATORY, not a test of anything declared beforehand: {message}"
    assert judgement.exploratory and all(verdict.exploratory for verdict in judgement.verdicts)
    assert shown(run).splitlines()[0].startswith("! EXPLORATORY")
    assert (run / EXPLORED).read_bytes() == file.read_bytes() and not (run / GATE).exists()


def test_a_gate_never_declared_is_refused(tmp_path: Path, file: Path) -> None:
    refuse(tmp_path / "run", file, "gate 'hand' was never declared; `kvassay gate declare` does it, before a run")


def test_a_gate_declared_afterwards_is_refused(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_at(file, AFTER, monkeypatch)
    refuse(tmp_path / "run", file, f"gate 'hand' was declared at {AFTER}, after cells began to be computed ({STARTED})")


def test_units_older_than_the_run_count_as_its_beginning(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_at(file, BEFORE, monkeypatch)
    results = write_run(tmp_path / "run")
    unit = results.path / "units" / "copied.parquet"
    unit.parent.mkdir()
    unit.write_bytes(b"")
    os.utime(unit, (1767222000, 1767222000))  # 2025-12-31T23:00:00Z, an hour before the declaration
    with pytest.raises(GateError, match=r"after cells began to be computed \(2025-12-31T23:00:00\+00:00\)"):
        judge_run(results, file)
    with pytest.raises(GateError, match="after cells began to be computed"):
        pin(file, results.path, exploratory=False)


def test_a_gate_changed_afterwards_is_refused(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_at(file, BEFORE, monkeypatch)
    file.write_text(made.GATE.replace("margin = 0.1", "margin = 0.5"))
    refuse(tmp_path / "run", file, f"gate 'hand' was changed since it was declared ({BEFORE})")


def test_nor_does_declaring_the_change_help(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_at(file, BEFORE, monkeypatch)
    file.write_text(made.GATE.replace("margin = 0.1", "margin = 0.5"))
    declare_at(file, AFTER, monkeypatch)
    refuse(tmp_path / "run", file, f"gate 'hand' was declared at {AFTER}, after cells began to be computed ({STARTED})")


def test_of_several_forms_the_one_in_force_judges(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_at(file, BEFORE, monkeypatch)
    file.write_text(made.GATE.replace("margin = 0.1", "margin = 0.5"))
    later = "2026-01-01T12:00:00+00:00"
    declare_at(file, later, monkeypatch)
    judge_run(write_run(tmp_path / "new"), file)
    file.write_text(made.GATE)
    refuse(tmp_path / "run", file, f"another form of gate 'hand' was in force when the run began (declared at {later})")


def test_a_run_started_with_one_gate_is_not_judged_by_another(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = file.with_name("other.toml")
    other.write_text(made.GATE.replace('name = "hand"', 'name = "other"'))
    declare_at(file, BEFORE, monkeypatch)
    declare_at(other, BEFORE, monkeypatch)
    run = tmp_path / "run"
    pin(file, run, exploratory=False)
    results = write_run(run)
    with pytest.raises(GateError, match="the run was started with another gate, which lies in its folder"):
        judge_run(results, other)
    assert "the same log declares other gates: hand" in judge_run(results, other, exploratory=True).notes
    assert (run / GATE).read_bytes() == file.read_bytes()  # the pinned gate stays
    assert not judge_run(results).exploratory


def test_a_gate_that_may_not_judge_is_refused_before_anything_runs(tmp_path: Path, file: Path) -> None:
    with pytest.raises(GateError, match="was never declared"):
        pin(file, tmp_path / "run", exploratory=False)
    assert not (tmp_path / "run").exists()


def test_a_broken_log_is_refused_even_exploratory(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_at(file, AFTER, monkeypatch)
    log = file.parent / LOG
    log.write_text(log.read_text().replace(AFTER, BEFORE))
    with pytest.raises(GateError, match="line 1: was edited"):
        judge_run(write_run(tmp_path / "run"), file, exploratory=True)


def test_without_any_gate(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="the run was started without a gate; name one with --gate"):
        judge_run(write_run(tmp_path / "run"))


def test_a_changed_threshold_recomputes_no_cell(tmp_path: Path, file: Path) -> None:
    results = write_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in results.path.glob("*.parquet")}
    first = judge_run(results, file, exploratory=True)
    file.write_text(made.GATE.replace("at_least = 0.5", "at_least = 0.9"))
    second = judge_run(results, file, exploratory=True)
    assert (first.overall[0].outcome, second.overall[0].outcome) == ("promote", "reject")
    assert {path: path.read_bytes() for path in results.path.glob("*.parquet")} == before


def test_judged_again_alike_nothing_is_written(tmp_path: Path, file: Path) -> None:
    """Else a look at published verdicts would change them."""
    results = write_run(tmp_path / "run")
    first = judge_run(results, file, exploratory=True)
    verdicts = results.path / "verdicts.json"
    os.utime(verdicts, (1.0, 1.0))
    assert judge_run(results, file, exploratory=True) == first and verdicts.stat().st_mtime == 1.0
    file.write_text(made.GATE.replace("at_least = 0.5", "at_least = 0.9"))
    assert judge_run(results, file, exploratory=True) != first and verdicts.stat().st_mtime > 1.0


def test_judging_again_replaces_damaged_verdicts(tmp_path: Path, file: Path) -> None:
    results = write_run(tmp_path / "run")
    first = judge_run(results, file, exploratory=True)
    (results.path / "verdicts.json").write_text("{")
    again = judge_run(results, file, exploratory=True)
    assert again.verdicts == first.verdicts and load_judgement(results.path) == again


def test_verdicts_of_earlier_cells_are_marked(tmp_path: Path, file: Path) -> None:
    results = write_run(tmp_path / "run")
    judge_run(results, file, exploratory=True)
    assert "about earlier cells" not in shown(results.path)
    write_run(results.path, everywhere(blocks={CAND: 1.0}))
    assert "! these verdicts are about earlier cells" in shown(results.path)


def test_the_table_shows_each_arm_with_reason_and_scope(tmp_path: Path, file: Path) -> None:
    results = write_run(tmp_path / "run", everywhere(blocks={CAND: 6.4}))
    judge_run(results, file, exploratory=True)
    text = shown(results.path)
    line, worst = [line for line in text.splitlines() if line.startswith(CAND)]
    assert worst.split()[2:] == [
        "reject",
        "-0.02",
        "(tiny,",
        "needle_multikey",
        "2k)",
        "0.05",
        "(tiny,",
        "needle_multikey",
        "2k)",
    ]
    assert line.split()[2] == "reject" and "0.05, at least 0.5 was asked" in line and "acts on full layers" in line
    assert "no verdict: dense, dense', random keep=0.25" in text
