"""Two runs side by side: pairing by what was asked, tests by hand, and what only one run has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment.compare import compare
from kvassay.experiment.folder import CELLS, MANIFEST, SAMPLES
from kvassay.experiment.results import Results
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.measure.aggregate import aggregate
from kvassay.measure.result import BranchResult
from kvassay.trace.identity import context_sha256, question_sha256
from kvassay.trace.reader import read_header
from tests.rows import SILENT, row
from tests.runs import make_run

ARM = "snapkv(window=16) keep=0.25"
CONTEXTS = 6
Change = Callable[[BranchResult], BranchResult]


def rows(change: Change = lambda one: one, contexts: Sequence[int] = range(CONTEXTS)) -> list[BranchResult]:
    """Six contexts of two questions; `change` is made to the arm's rows."""
    found = []
    for context in contexts:
        for branch in (0, 1):
            place = {"trace": f"t{context}", "branch": branch}
            found.append(row("dense", **place))
            found.append(change(row(ARM, **place, nll=1.0 + context / 10, top1=0.5, retained_bytes=256.0 * 1024)))
    return found


def run_of(folder: Path, found: Sequence[BranchResult], **manifest: Any) -> Results:
    """A run folder of these rows."""
    make_run(folder)
    labels = {"model": "tiny-model", "trace_set": "kv_short 2k"}
    write_samples([(labels, found)], folder / SAMPLES)
    write_cells([(labels, aggregate(found).cells)], folder / CELLS)
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**data, **manifest}))
    return Results.open(folder)


def cell(found: Any, arm: str = ARM) -> Any:
    return next(one for one in found.cells if one.arm == arm)


def test_two_runs_of_the_same_are_identical(tmp_path: Path) -> None:
    def slower(one: BranchResult) -> BranchResult:
        return replace(one, policy_seconds=9.0)

    found = compare(run_of(tmp_path / "a", rows()), run_of(tmp_path / "b", rows(slower)))
    assert all(one.identical for one in found.cells) and not found.changes and not found.only
    assert [contrast.significant for contrast in cell(found).contrasts] == [False, False, None]
    top1, task, nll = cell(found).contrasts
    assert (top1.p_value, top1.adjusted, task.p_value, nll.p_value) == (1.0, 1.0, 1.0, None)


def test_a_difference_is_paired_by_question_tested_and_corrected(tmp_path: Path) -> None:
    def worse(one: BranchResult) -> BranchResult:
        # The difference is 0.20, 0.21, ... 0.25 by context, though the spread between contexts is far larger.
        context = int(one.trace[1])
        lost = context == 0 and one.branch == 1
        return replace(one, nll=one.nll + 0.2 + context / 100, task=0.0 if lost else 1.0, retained_bytes=128.0 * 1024)

    found = compare(run_of(tmp_path / "a", rows()), run_of(tmp_path / "b", rows(worse)), ("nll", "task"))
    mine = cell(found)
    nll, task = mine.contrasts
    assert (mine.questions, mine.contexts, mine.identical) == (12, 6, False)
    assert nll.difference.mean == pytest.approx(0.225) and nll.before == pytest.approx(1.25)
    # Cluster-robust: contexts' sums deviate by 2 x (-.025 .. .025); s = sqrt(6/5 x sum of squares) / 12.
    error = (6 / 5 * sum((2 * (context / 100 - 0.025)) ** 2 for context in range(6))) ** 0.5 / 12
    assert nll.difference.error == pytest.approx(error)
    assert nll.p_value is not None and nll.p_value < 1e-5
    # Tests with a p: nll and task of the arm, task of dense (whose nll agrees exactly, without bounds).
    assert found.comparisons == 3 and nll.adjusted == pytest.approx(3 * nll.p_value) and nll.significant is True
    assert task.significant is False and (mine.flips["task"].right_to_wrong, mine.flips["task"].wrong_to_right) == (
        1,
        0,
    )
    held = next(amount for amount in mine.amounts if amount.name == "retained_bytes")
    assert (held.before, held.after, held.unit) == (256.0 * 1024, 128.0 * 1024, "bytes")
    assert cell(found, "dense").identical


def test_questions_of_one_run_alone_are_left_out_and_counted(tmp_path: Path) -> None:
    found = compare(run_of(tmp_path / "a", rows()), run_of(tmp_path / "b", rows(contexts=range(1, 8))))
    assert (cell(found).questions, cell(found).unpaired) == (10, (2, 4))


def test_what_only_one_has_and_what_differs_is_named(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", rows(), code_sha256="1" * 64)

    def other(one: BranchResult) -> BranchResult:
        return replace(one, arm="snapkv(window=32) keep=0.25")

    machine = {**a.manifest["machine"], "torch": "2.14.0"}
    b = run_of(tmp_path / "b", rows(other), code_sha256="2" * 64, machine=machine, protection={"sink": 8, "recent": 32})
    found = compare(a, b)
    assert [(one.kind, one.name, one.run) for one in found.only] == [
        ("arm", f"tiny-model, kv_short 2k: {ARM}", "A"),
        ("arm", "tiny-model, kv_short 2k: snapkv(window=32) keep=0.25", "B"),
    ]
    assert [(one.what, one.before, one.after) for one in found.changes] == [
        ("code_sha256", "1" * 64, "2" * 64),
        ("machine.torch", "2.13.0", "2.14.0"),
        ("protection.sink", 4, 8),
    ]
    assert found.notes == ("6 traces are no longer there; their questions are paired by the trace's name",)


def test_nothing_in_common_and_an_unknown_metric_are_refused(tmp_path: Path) -> None:
    a = run_of(tmp_path / "a", rows())
    alone = [one for one in rows() if one.arm == ARM]
    b = run_of(tmp_path / "b", [replace(one, arm="other") for one in alone])
    with pytest.raises(ExperimentError, match="share no arm on any trace set"):
        compare(a, b)
    with pytest.raises(ExperimentError, match=r"no quality metric is called 'top2' \(did you mean 'top1'\?\)"):
        compare(a, a, ("top2",))


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[str, str, bytes], Results]:
    """Runs whose contexts have a trace each, with tokens that hash as told and K/V of their own."""

    def made(name: str, prefix: str, content: bytes) -> Results:
        results = run_of(tmp_path / name, [replace(one, trace=f"{prefix}-{one.trace}") for one in rows()])
        for context in range(CONTEXTS):
            write_header(results.path / "traces" / f"{prefix}-t{context}", context, content)
        return results

    return made


def write_header(folder: Path, context: int, content: bytes) -> None:
    import hashlib

    from kvassay.layout.config import from_config
    from kvassay.trace.schema import BranchEntry, ModelIdentity, PrefixEntry, Recipe, ShardEntry, TraceHeader, Versions
    from tests.record.tiny import config_of

    def entry(text: bytes) -> ShardEntry:
        return ShardEntry(sha256=hashlib.sha256(text).hexdigest(), bytes=1)

    header = TraceHeader(
        layout=from_config(config_of("llama")),
        model=ModelIdentity(name="tiny", weights_sha256="0" * 64, tokenizer_sha256=None, licence="none"),
        recipe=Recipe(name="kv_short", seed=0, index=context, length=2048),
        versions=Versions.current(),
        dtype="float32",
        prefill_chunk=512,
        created=datetime.now(UTC),
        prefix=PrefixEntry(tokens=2048),
        branches=tuple(BranchEntry(tokens=10, question_tokens=6) for _ in range(2)),
        shards={
            "prefix/tokens.safetensors": entry(b"context %d" % context),
            **{f"branch_00{b}/tokens.safetensors": entry(b"question %d %d" % (context, b)) for b in (0, 1)},
            "prefix/layer_000.safetensors": entry(content),
        },
    )
    folder.mkdir(parents=True)
    (folder / "trace.json").write_text(header.model_dump_json())


def test_questions_are_known_by_their_tokens_whatever_the_trace_is_called(traced: Any) -> None:
    found = compare(traced("a", "old", b"same"), traced("b", "new", b"same"))
    assert (cell(found).questions, cell(found).identical, found.notes) == (12, True, ())


def test_another_recording_of_the_same_text_is_paired_and_said(traced: Any) -> None:
    found = compare(traced("a", "old", b"one machine"), traced("b", "new", b"another"))
    assert cell(found).questions == 12
    assert found.notes == (
        "6 of 6 shared contexts were recorded with other bits of K, V or queries: differences are those of the "
        "recording, too",
    )


def test_what_one_run_did_not_generate_is_not_compared(tmp_path: Path) -> None:
    silent = [replace(one, **SILENT) for one in rows()]
    found = compare(run_of(tmp_path / "a", silent), run_of(tmp_path / "b", rows()))
    assert [one.metric for one in cell(found).contrasts] == ["top1", "nll"]
    assert set(cell(found).flips) == {"top1"} and not cell(found).identical
    assert found.notes[-1] == (
        "what is generated is not compared: in A, not measured: nothing was generated (free_tokens = 0)"
    )
    alone = compare(Results.open(tmp_path / "a"), Results.open(tmp_path / "b"), ["task"])
    assert cell(alone).contrasts == () and alone.comparisons == 0


def asked(found: Sequence[BranchResult], question: str) -> list[BranchResult]:
    """Rows that say what was asked, of traces with names of their own."""
    return [
        replace(one, trace=f"{question}-{one.trace}", context_sha256=f"c{one.trace}", question_sha256=question)
        for one in found
    ]


def test_rows_that_say_what_was_asked_are_paired_without_their_traces(tmp_path: Path, traced: Any) -> None:
    a, b = (
        run_of(tmp_path / name, [replace(one, trace=name + one.trace) for one in asked(rows(), "q")]) for name in "ab"
    )
    found = compare(a, b)
    assert (cell(found).questions, cell(found).identical, found.notes) == (12, True, ())
    other = compare(a, run_of(tmp_path / "other", asked(rows(), "another question")))
    assert cell(other).questions == 0 and other.notes[0].startswith("no question in common on tiny-model, kv_short 2k")


def test_an_older_run_with_its_traces_meets_a_newer_one_without(tmp_path: Path, traced: Any) -> None:
    older = traced("a", "old", b"same")
    headers = [read_header(path)[0] for path in sorted((older.path / "traces").iterdir())]
    newer = [
        replace(
            one,
            trace=f"new-{one.trace}",
            context_sha256=context_sha256(headers[int(one.trace[1])]),
            question_sha256=question_sha256(headers[int(one.trace[1])], one.branch),
        )
        for one in rows()
    ]
    found = compare(older, run_of(tmp_path / "b", newer))
    assert (cell(found).questions, cell(found).identical, found.notes) == (12, True, ())


def test_the_code_that_changed_is_named_by_arm(tmp_path: Path) -> None:
    code = {"dense": "0" * 64, ARM: "1" * 64, "only here": "2" * 64}
    a = run_of(tmp_path / "a", rows(), policy_code=code)
    b = run_of(tmp_path / "b", rows(), policy_code={"dense": "0" * 64, ARM: "3" * 64})
    assert [(one.what, one.before, one.after) for one in compare(a, b).changes] == [
        (f"own code of arm {ARM}", "1" * 64, "3" * 64)
    ]
