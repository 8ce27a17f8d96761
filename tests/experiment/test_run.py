"""Running into a folder: what is computed once, what a killed run leaves, who may write."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import pytest

from kvassay.errors import ExperimentError, KvassayError, ModelError, WorkloadError
from kvassay.experiment import unit as module
from kvassay.experiment.code import source_file
from kvassay.experiment.folder import FIDELITY, GATE, RunFolder
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.progress import Silent
from kvassay.experiment.results import Results
from kvassay.experiment.rows import WALL, read_table
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.measure.result import BranchResult
from kvassay.policy.kvpress.bridge import SETTING
from kvassay.record.load import LoadedModel
from kvassay.replay.arms import Arm
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from tests.experiment.test_code import PLUGIN
from tests.experiment.tiny import write_experiment
from tests.rows import row

MAKER = Callable[..., Plan]


class FakeReplay:
    """Rows that depend on trace and arm alone; counts its calls and may stop."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.calibrations: list[Trace | None] = []
        self.stop_at = stop_at

    def __call__(
        self,
        loaded: LoadedModel,
        trace: Trace,
        arms: Sequence[Arm],
        protocol: Protocol,
        progress: Callable[[str], None],
        *,
        calibration: Trace | None,
    ) -> list[BranchResult]:
        self.calibrations.append(calibration)
        if self.stop_at == len(self.calls):
            raise KeyboardInterrupt
        self.calls.append(trace.path.name)
        branches = range(len(trace.branches))
        return [row(arm.label, trace.path.name, branch) for branch in branches for arm in arms]


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> MAKER:
    def make(contexts: int = 3, change: tuple[str, str] = ("", "")) -> Plan:
        file = write_experiment(tmp_path, tiny_model, contexts)
        file.write_text(file.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
        return make_plan(load_experiment(file), file.name, tmp_path)

    return make


def comparable(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in WALL} for r in read_table(folder / "samples.parquet")]


def test_a_run_writes_what_it_says(plan: MAKER, tmp_path: Path) -> None:
    made = plan()
    results = run(made, tmp_path / "run", replay=FakeReplay())
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        ".lock", "cells.parquet", "checks.json", "cost.parquet", "manifest.json",
        "resolved.toml", "samples.parquet", "schema.json", "traces", "units",
    ]  # fmt: skip
    assert len(results.samples()) == 3 * 2 * len(made.arms)
    assert [cell.arm for cell in results.sets[0].cells] == [arm.label for arm in made.arms]
    assert (results.sets[0].contexts, results.sets[0].cells[0].samples) == (3, 6)
    assert load_experiment(tmp_path / "run" / "resolved.toml").workload == made.experiment.workload
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["machine"]["cpu_count"] == os.cpu_count() and manifest["machine"]["torch"]
    assert [unit["context"] for unit in manifest["units"]] == [0, 1, 2]
    assert manifest["models"][0]["name"] == "tiny-llama"


def test_the_manifest_names_no_home(
    plan: MAKER, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    run(plan(), tmp_path / "run", replay=FakeReplay())
    for name in ("manifest.json", "resolved.toml"):
        assert str(tiny_model.parent) not in (tmp_path / "run" / name).read_text(encoding="utf-8")


def test_a_finished_unit_is_never_computed_again(plan: MAKER, tmp_path: Path) -> None:
    interrupted = FakeReplay(stop_at=2)
    with pytest.raises(KeyboardInterrupt):
        run(plan(), tmp_path / "run", replay=interrupted)
    with pytest.raises(ExperimentError, match="has not finished"):
        Results.open(tmp_path / "run")
    units = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run" / "units").iterdir()}
    again = FakeReplay()
    run(plan(), tmp_path / "run", replay=again)
    assert len(interrupted.calls) == 2 and len(again.calls) == 1
    assert again.calls[0] not in interrupted.calls
    assert all((tmp_path / "run" / "units" / n).stat().st_mtime_ns == t for n, t in units.items())
    nothing = FakeReplay()
    run(plan(), tmp_path / "run", replay=nothing)
    assert nothing.calls == []


def test_more_contexts_compute_only_these(plan: MAKER, tmp_path: Path) -> None:
    run(plan(2), tmp_path / "run", replay=FakeReplay())
    more = FakeReplay()
    assert run(plan(3), tmp_path / "run", replay=more).sets[0].cells[0].contexts == 3
    assert len(more.calls) == 1


@pytest.mark.parametrize(
    "change",
    [('["knorm"]', '["keydiff"]'), ("keep=0.5", "keep=0.25"), ("recent = 8", "recent = 9"), ("free_tokens = 3", "")],
)
def test_other_arms_or_protocol_are_other_cells_on_the_same_traces(
    plan: MAKER, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plan(2), tmp_path / "run", replay=FakeReplay())
    monkeypatch.setattr(module, "record_sample", lambda *_: pytest.fail("recorded again"))
    changed = FakeReplay()
    run(plan(2, change), tmp_path / "run", replay=changed)
    assert len(changed.calls) == 2


def test_other_code_is_other_cells(plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(plan(1), tmp_path / "run", replay=FakeReplay())
    monkeypatch.setattr("kvassay.experiment.plan.replay_code", lambda policies: "0" * 64)
    changed = FakeReplay()
    run(plan(1), tmp_path / "run", replay=changed)
    assert len(changed.calls) == 1


def test_a_plug_in_whose_code_changed_is_told_before_it_is_computed_anew(plan: MAKER, tmp_path: Path) -> None:
    file, folder = tmp_path / "mine.py", tmp_path / "run"
    change = ('["knorm"]', '["knorm", "mine.py:Mine", "mine.py:Mine~shuffled+int8"]')

    def with_factor(factor: str) -> tuple[list[str], int]:
        file.write_text(PLUGIN.format(factor=factor), encoding="utf-8")
        for name in [name for name in sys.modules if name.startswith("kvassay_plugin_")]:
            del sys.modules[name]
        source_file.cache_clear()
        replay, notes = FakeReplay(), Notes()
        run(plan(2, change), folder, notes, replay=replay)
        return about_results(notes), len(replay.calls)

    assert with_factor("1") == ([], 2)
    assert with_factor("1  # as before") == ([], 0)
    before = {path.name for path in (folder / "units").iterdir()}
    (folder / FIDELITY).touch()
    lines, computed = with_factor("2")
    assert computed == 2 and before < {path.name for path in (folder / "units").iterdir()}
    assert [line for line in lines if "another code of mine keep=0.5, mine~shuffled+int8 keep=0.5: every arm" in line]
    assert "the rows of before stay in units/" in lines[0] and "--out" in lines[0]
    assert not (folder / FIDELITY).exists()
    assert with_factor("2") == ([], 0)
    assert {row["unit"] for row in json.loads((folder / "manifest.json").read_text())["units"]}.isdisjoint(
        path.removesuffix(".parquet") for path in before
    )


def test_other_code_or_libraries_than_the_results_are_of_are_told(
    plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert noted(plan(1), folder) == []
    with monkeypatch.context() as patch:
        patch.setattr("kvassay.experiment.plan.replay_code", lambda policies: "0" * 64)
        (line,) = noted(plan(1), folder)
    assert f"{folder}: its results were computed with another code of kvassay's replay: every arm" in line
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["machine"]["torch"] = "1.0"
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (line,) = noted(plan(1), folder)
    assert "another code of kvassay's replay" in line or "torch 1.0 (now " in line


def test_a_damaged_unit_is_computed_again(plan: MAKER, tmp_path: Path) -> None:
    run(plan(2), tmp_path / "run", replay=FakeReplay())
    unit = next((tmp_path / "run" / "units").glob("*.parquet"))
    unit.write_bytes(unit.read_bytes()[:200])
    again = FakeReplay()
    run(plan(2), tmp_path / "run", replay=again)
    assert len(again.calls) == 1


def test_an_incomplete_replay_is_refused(plan: MAKER, tmp_path: Path) -> None:
    def short(*arguments: Any, calibration: Trace | None) -> list[BranchResult]:
        return FakeReplay()(*arguments, calibration=calibration)[:-1]

    with pytest.raises(
        ExperimentError, match=r"gave 19 rows for 20 questions x arms; question 1 under 'knorm keep=0.5'"
    ):
        run(plan(1), tmp_path / "run", replay=short)
    assert not (tmp_path / "run" / "units").exists()


def test_texts_are_made_before_anything_is_recorded(plan: MAKER, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the inserted text alone takes"):
        run(plan(1, ("pairs = 4", "pairs = 60")), tmp_path / "run", replay=FakeReplay())
    assert not (tmp_path / "run" / "traces").exists()


def test_two_runs_do_not_share_a_folder(plan: MAKER, tmp_path: Path) -> None:
    made = plan(1)
    (tmp_path / "run").mkdir()
    with (
        filelock.FileLock(tmp_path / "run" / ".lock"),
        pytest.raises(ExperimentError, match="another run is writing here"),
    ):
        run(made, tmp_path / "run", replay=FakeReplay())


def test_what_a_killed_run_left_half_written_is_cleared(plan: MAKER, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.units.mkdir(parents=True)
    (folder.units / ".tmp-abc.parquet").write_text("half", encoding="utf-8")
    (folder.traces / ".half-a-trace").mkdir(parents=True)
    run(plan(1), tmp_path / "run", replay=FakeReplay())
    assert [p.name for p in folder.units.iterdir() if p.name.startswith(".")] == []
    assert [p.name for p in folder.traces.iterdir() if p.name.startswith(".")] == []


def test_a_full_disk_is_one_line_and_leaves_nothing_half(
    plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: object, path: Path, notes: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(module, "write_results", full)
    with pytest.raises(ExperimentError) as caught:
        run(plan(1), tmp_path / "run", replay=FakeReplay())
    assert "No space left on device (" in str(caught.value) and "bytes free); free some and run the same" in str(
        caught.value
    )
    assert list((tmp_path / "run" / "units").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(plan: MAKER, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match=r"file/run.*: cannot be written: Not a directory"):
        run(plan(1), tmp_path / "file" / "run", replay=FakeReplay())


@pytest.fixture
def started(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `kvassay run` of the tiny experiment into a folder, in a process of its own."""
    # A background job of a shell ignores the signal, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes: list[subprocess.Popen[str]] = []

    def start(folder: Path, contexts: int = 4) -> subprocess.Popen[str]:
        file = write_experiment(tmp_path, tiny_model, contexts)
        command = [sys.executable, "-m", "kvassay", "run", str(file), "--out", str(folder)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_units(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while len(list((folder / "units").glob("[!.]*.parquet"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_in_the_middle_and_continued_is_as_if_never_killed(
    started: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    uninterrupted = started(whole)
    assert uninterrupted.communicate()[1] and uninterrupted.returncode == 0
    killed = started(torn)
    wait_for_units(torn, 1, killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    before = {p.name: p.stat().st_mtime_ns for p in (torn / "units").glob("[!.]*.parquet")}
    assert 1 <= len(before) < 4
    continued = started(torn)
    out, err = continued.communicate()
    assert continued.returncode == 0, err
    assert err.count("done before") == len(before)
    assert all((torn / "units" / name).stat().st_mtime_ns == stamp for name, stamp in before.items())
    assert comparable(torn) == comparable(whole)
    assert len(comparable(torn)) == 4 * 2 * 10
    assert "knorm keep=0.5" in out and (torn / "report.html").is_file()


def test_ctrl_c_is_130_and_says_how_to_go_on(started: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = started(tmp_path / "run", contexts=100)  # far more than are done before the signal, on any machine
    wait_for_units(tmp_path / "run", 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.endswith("interrupted; run the same command to continue\n")
    assert "Traceback" not in err


def test_another_experiments_folder_is_left_alone(plan: MAKER, tmp_path: Path) -> None:
    run(plan(1), tmp_path / "run", replay=FakeReplay())
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    other = plan(1, ('name = "tiny"', 'name = "other"'))
    with pytest.raises(ExperimentError, match="holds the run of 'tiny', not of 'other'"):
        run(other, tmp_path / "run", replay=FakeReplay())
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('name = "tiny"', 'name = "tiny"\ndevice = "tpu"'), "device 'tpu'"),
        (("models = [", 'models = ["/nope", '), "'/nope' is no folder"),
        (("knorm", "kvpress+fp8"), "KVASSAY_KVPRESS_PYTHON=/nope/python is no file"),
    ],
)
def test_what_a_run_needs_and_cannot_have_is_refused_before_anything_is_written(
    plan: MAKER, change: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, "/nope/python")
    with pytest.raises(KvassayError, match=message):
        run(plan(1, change), tmp_path / "run", replay=FakeReplay())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model.safetensors", r"no weights: neither \*\.safetensors nor"),
        ("tokenizer.json", "cannot be loaded"),
        ("config.json", "no config.json"),
    ],
)
def test_every_model_is_looked_at_before_the_first_is_run(
    gone: str, message: str, plan: MAKER, tiny_model: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    shutil.copytree(tiny_model, second)
    made = plan(1, ("models = [", f'models = ["{tiny_model}", "{second}"]  # ['))
    (second / gone).unlink()
    with pytest.raises(ModelError, match=message):
        run(made, tmp_path / "run", replay=FakeReplay())
    assert not (tmp_path / "run").exists()


IMPORT = 'name = "kv_short"\nlength = 384\ncontexts = 2\nquestions = 2\nparams = { pairs = 4, size = 2 }'


def imported(params: str) -> tuple[str, str]:
    """The change from the tiny workload to an imported one."""
    return IMPORT, f'name = "jsonl"\nlength = 384\ncontexts = 2\nquestions = 1\nparams = {params}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (imported("{}"), "tiny.toml: [[workload]] 1: jsonl: params.path is needed: a file with one JSON object of "
         "prompt, reasoning, answer a line"),
        (imported('{ path = "/nope.jsonl" }'), "tiny.toml: [[workload]] 1: /nope.jsonl: cannot be read as UTF-8 text ("
         "[Errno 2] No such file or directory: '/nope.jsonl')"),
        (("pairs", "pears"),
         "tiny.toml: [[workload]] 1: kv_short: unknown parameter 'pears' (did you mean 'pairs'?)"),
        (("pairs = 4", 'pairs = "4"'), "tiny.toml: [[workload]] 1: kv_short: pairs='4' must be of type int"),
        (("questions = 2", "questions = 0"), "questions"),
        (("pairs = 4", "pairs = 60"), "the inserted text alone takes"),
    ],
)  # fmt: skip
def test_a_failing_command_leaves_a_finished_run_as_it_was(
    plan: MAKER, change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(plan(2), folder, replay=FakeReplay())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(KvassayError) as caught:
        run(plan(2, change), folder, replay=FakeReplay())
    assert message in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert Results.open(folder).sets[0].contexts == 2


def test_a_row_that_the_file_lacks_is_refused_before_anything_is_written(plan: MAKER, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": "a", "reasoning": "b", "answer": "c"}) + "\n", encoding="utf-8")
    made = plan(2, imported(f'{{ path = "{file}" }}'))
    with pytest.raises(
        ExperimentError, match=r"tiny.toml: \[\[workload\]\] 1: .*: row 1 was asked for, the file has 1$"
    ):
        run(made, tmp_path / "run", replay=FakeReplay())
    assert not (tmp_path / "run").exists()


def test_what_extends_a_finished_run_shows_the_earlier_one_until_it_is_done(plan: MAKER, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(plan(2), folder, replay=FakeReplay())
    before = (folder / "manifest.json").read_bytes()
    other = ('["knorm"]', '["keydiff"]')
    with pytest.raises(KeyboardInterrupt):
        run(plan(2, other), folder, replay=FakeReplay(stop_at=1))
    assert (folder / "manifest.json").read_bytes() == before
    assert "knorm keep=0.5" in Results.open(folder).arms
    rest = FakeReplay()
    assert "keydiff keep=0.5" in run(plan(2, other), folder, replay=rest).arms
    assert len(rest.calls) == 1


class Notes(Silent):
    """Keeps what is to be known of the whole run, but for what it takes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        """Keep it if it is about the folder."""
        if "/run" in text:
            self.lines.append(text)


def noted(made: Plan, folder: Path) -> list[str]:
    notes = Notes()
    run(made, folder, notes, replay=FakeReplay())
    return about_results(notes)


def about_results(notes: Notes) -> list[str]:
    return [line for line in notes.lines if not line.startswith("disk, modelled: ")]


def test_arms_and_workloads_that_leave_the_table_are_named(plan: MAKER, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stay = "they leave the table; their contexts stay in units/"
    assert noted(plan(1), folder) == []
    assert noted(plan(1), folder) == noted(plan(2), folder) == []
    assert noted(plan(2, ('["knorm"]', '["knorm", "keydiff"]')), folder) == []
    assert noted(plan(2, ('["knorm"]', '["keydiff"]')), folder) == [
        f"{folder} held other arms (knorm keep=0.5): {stay}"
    ]
    (folder / GATE).touch()
    pinned = f"{folder / GATE} was pinned for this folder: it judges this run too"
    assert noted(plan(2, ('["knorm"]', '["keydiff"]')), folder) == []
    assert noted(plan(2, ('["knorm"]', '["keydiff", "knorm"]')), folder) == [pinned]
    assert noted(plan(2, ("length = 384", "length = 400")), folder) == [
        f"{folder} held other arms (keydiff keep=0.5) and other workloads "
        f"(tiny-llama on kv_short 384 (pairs=4, size=2)): {stay}",
        pinned,
    ]


def test_no_more_than_three_arms_are_named(plan: MAKER, tmp_path: Path) -> None:
    budgets = '["keep=0.5", "keep=0.4", "keep=0.3", "keep=0.2"]'
    run(plan(1, ('["keep=0.5"]', budgets)), tmp_path / "run", replay=FakeReplay())
    lines = noted(plan(1, ('["keep=0.5"]', '["keep=0.6"]')), tmp_path / "run")
    labels = [info["label"] for info in json.loads((tmp_path / "run" / "manifest.json").read_text())["arms"]]
    assert len(lines) == 1 and " more): they leave the table" in lines[0]
    named = lines[0].split("(", 1)[1].split(" and ")[0].split(", ")
    assert len(named) == 3 and not set(named) & set(labels)
