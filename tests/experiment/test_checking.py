"""Findings from a run: checked when it is collected, kept in its folder, shown with its results."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment.checking import opening_of
from kvassay.experiment.findings import dump_findings, load_findings
from kvassay.experiment.plan import make_plan
from kvassay.experiment.results import Results
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.measure.checks import Finding
from kvassay.measure.result import BranchResult
from kvassay.record.load import LoadedModel
from kvassay.replay.arms import Arm
from kvassay.replay.protocol import Protocol
from kvassay.report.table import ReportTable, console_for
from kvassay.trace.reader import Trace
from tests.experiment.tiny import write_experiment
from tests.rows import row

ARM = "knorm keep=0.5"


def planted(change: dict[str, Any]) -> Callable[..., list[BranchResult]]:
    """A replay whose arms all differ, but for what is planted in one of them."""

    def replay(
        loaded: LoadedModel,
        trace: Trace,
        arms: Sequence[Arm],
        protocol: Protocol,
        progress: Callable[[str], None],
        *,
        calibration: Trace | None,
    ) -> list[BranchResult]:
        rows = [
            row(arm.label, trace.path.name, branch, context_tokens=384, nll=0.5 + number / 8, generated_tokens=4)
            for branch in range(len(trace.branches))
            for number, arm in enumerate(arms)
        ]
        return [replace(r, **change) if r.arm == ARM else r for r in rows]

    return replay


def checked(tmp_path: Path, tiny_model: Path, change: dict[str, Any]) -> Results:
    file = write_experiment(tmp_path, tiny_model, 2)
    plan = make_plan(load_experiment(file), file.name, tmp_path)
    return run(plan, tmp_path / "run", replay=planted(change))


def test_findings_are_written_with_the_run_and_shown(tmp_path: Path, tiny_model: Path) -> None:
    results = checked(tmp_path, tiny_model, {"query_aware": True, "read_fraction": 0.5})
    named = {(finding.name, finding.arm) for finding in results.sets[0].findings if finding.severity == "invalid"}
    assert named == {("question_visible", ARM), ("denominator", ARM)}
    assert results.sets[0].findings == Results.open(results.path).sets[0].findings
    stored = json.loads((results.path / "checks.json").read_text(encoding="utf-8"))
    assert stored["sets"][0]["findings"][0]["severity"] == "invalid"
    stream = io.StringIO()
    console_for(stream).print(ReportTable(results))
    assert f"! invalid, question_visible: {ARM}: its context held the question in 4 of 4" in stream.getvalue()


def test_contexts_are_looked_at_as_they_were_recorded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that says it puts a token in front which the recorded contexts lack."""
    monkeypatch.setattr("kvassay.experiment.run.opening_of", lambda tokenizer: {"opening": [256], "bos": 256})
    findings = checked(tmp_path, tiny_model, {}).sets[0].findings
    assert [(f.severity, f.message.endswith("(2 of 2 contexts)")) for f in findings if f.name == "bos"] == [
        ("invalid", True)
    ]


def test_the_opening_is_what_the_tokenizer_adds() -> None:
    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [2, *text.encode()] if add_special_tokens else list(text.encode())

    tokenizer = SimpleNamespace(bos_token_id=2, encode=encode)
    assert opening_of(tokenizer) == {"opening": [2], "bos": 2}  # type: ignore[arg-type]
    assert opening_of(None) == {"opening": [], "bos": None}


def test_findings_survive_the_file(tmp_path: Path) -> None:
    found = {("m", "copy 2k"): (Finding("bos", "invalid", None, "3 times"),), ("m", "words 2k"): ()}
    file = tmp_path / "checks.json"
    file.write_text(dump_findings(found), encoding="utf-8")
    assert load_findings(file) == found
    assert load_findings(tmp_path / "none.json") == {}
    file.write_text('{"sets": [{}]}', encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"checks\.json: cannot be read as findings"):
        load_findings(file)
