"""Units side by side in worker processes: the same results, errors that surface, nothing lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvassay.errors import ExperimentError, PolicyError
from kvassay.experiment import workers
from kvassay.experiment.folder import RunFolder
from kvassay.experiment.memory import memory_plan
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.rows import read_results
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.policy.dynacalkv import DynaCalKV
from tests.experiment.test_run import comparable
from tests.experiment.tiny import write_experiment

MAKER = Callable[..., Plan]

PLUGIN = """
import os
from dataclasses import dataclass
from kvassay.policy.base import Policy
from kvassay.policy.card import Card, Effect
from kvassay.errors import PolicyError

@dataclass(frozen=True)
class Bad(Policy):
    card = Card(name="bad", effects=frozenset({Effect.EVICT}), source="a test", summary="fails")

    def score(self, layer, memory):
        %s
"""


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> MAKER:
    def make(contexts: int = 2, score: str | None = None, name: str = "bad.py") -> Plan:
        file = write_experiment(tmp_path, tiny_model, contexts)
        if score is not None:
            (tmp_path / name).write_text(PLUGIN % score)
            file.write_text(file.read_text().replace('["knorm"]', f'["{name}:Bad"]'))
        return make_plan(load_experiment(file), file.name, tmp_path)

    return make


def test_side_by_side_is_one_after_the_other(plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(plan(), tmp_path / "alone", jobs=1)
    both = run(plan(), tmp_path / "both", jobs=2)
    assert json.loads((tmp_path / "both" / "manifest.json").read_text())["jobs"] == 2
    assert [cell.arm for cell in both.sets[0].cells] == [cell.arm for cell in alone.sets[0].cells]
    for mine, theirs in zip(comparable(tmp_path / "both"), comparable(tmp_path / "alone"), strict=True):
        assert (mine["trace"], mine["branch"], mine["arm"]) == (theirs["trace"], theirs["branch"], theirs["arm"])
        assert mine["nll"] == pytest.approx(theirs["nll"], abs=1e-4)
        assert mine["retained_bytes"] == theirs["retained_bytes"]
    # All is there now: no worker is asked for anything.
    monkeypatch.setattr(workers.Workers, "submit", lambda *_: pytest.fail("computed again"))
    before = comparable(tmp_path / "both")
    run(plan(), tmp_path / "both", jobs=2)
    assert comparable(tmp_path / "both") == before


def test_a_worker_fits_an_offline_policy_on_the_model_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_experiment(tmp_path, tiny_model, 2)
    low_rank = '["dynacalkv(tokens=64, multiple=2)"]'
    text = file.read_text().replace('["knorm"]', low_rank) + "\n[calibration]\nlength = 300\n"
    for long, short in (
        ("length = 384", "length = 200"),
        ("questions = 2", "questions = 1"),
        ("tokens = 3", "tokens = 0"),
    ):
        text = text.replace(long, short)
    file.write_text(text)
    loaded, folder = load_experiment(file), RunFolder(tmp_path / "run")
    plan, fits = make_plan(loaded, file.name, tmp_path), []
    fit = DynaCalKV.fit
    monkeypatch.setattr(DynaCalKV, "fit", lambda self, source: (fits.append(1), fit(self, source))[1])
    monkeypatch.setattr(workers, "_WORKER", [])
    workers._begin(workers._Start(loaded, file.name, tmp_path, folder.path, plan.code, 1, os.getppid()))
    try:
        done = [workers._compute(unit) for unit in plan.units]
    finally:
        workers._WORKER[0].fits.close()
    assert fits == [1] and len(done) == 2
    rows = [row for one in done for row in read_results(folder.unit(one.key))]
    mine = [row for row in rows if row.arm.startswith("dynacalkv")]
    assert len(mine) == 2 and all(row.retained_fraction_scope < 0.7 for row in mine)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ('raise PolicyError("no score today")', "^no score today$"),
        ("return 1 / 0", r"^policy 'bad', score of layer 0: ZeroDivisionError: division by zero \(.*bad\.py:13\)$"),
    ],
)
def test_an_error_in_a_worker_is_the_runs_error(plan: MAKER, tmp_path: Path, score: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        run(plan(score=score), tmp_path / "run", jobs=2)


def test_a_worker_that_dies_is_said_and_the_run_can_go_on(plan: MAKER, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"worker process died.*--jobs 1"):
        run(plan(score="os._exit(9)"), tmp_path / "run", jobs=2)
    mended = plan(score="return layer.positions.float()", name="good.py")
    assert run(mended, tmp_path / "run", jobs=1).sets[0].cells


@pytest.mark.parametrize(
    ("cores", "gib", "contexts", "jobs"), [(2, 24, 4, 2), (2, 24, 1, 1), (16, 24, 9, 5), (64, 512, 9, 8), (4, 4, 4, 1)]
)
def test_jobs_by_cores_memory_and_units(
    plan: MAKER, cores: int, gib: int, contexts: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(workers.psutil, "virtual_memory", lambda: SimpleNamespace(total=gib << 30))
    need = SimpleNamespace(total=(3 << 30) + (400 << 20))
    monkeypatch.setattr(workers, "memory_plan", lambda plan: [need])
    assert workers.suggested_jobs(plan(contexts)) == jobs
    assert workers.threads_for(jobs) == cores // jobs


def test_jobs_are_as_many_as_the_memory_plan_lets_pass(plan: MAKER, monkeypatch: pytest.MonkeyPatch) -> None:
    """One estimate for both, so that a run is never refused for the number of jobs that it chose itself."""
    made = plan(8)
    (one,) = memory_plan(made)
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 8)
    for fit in (1, 2, 3):
        total = int(fit * one.total / 0.8) + 8
        monkeypatch.setattr(
            workers.psutil, "virtual_memory", lambda total=total: SimpleNamespace(total=total, available=total)
        )
        jobs = workers.suggested_jobs(made)
        assert jobs == fit
        assert all(need.total <= total for need in memory_plan(made, jobs))


def test_a_model_that_is_not_here_is_taken_for_a_small_one(plan: MAKER, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(workers, "memory_plan", lambda plan: [])
    monkeypatch.setattr(workers.psutil, "virtual_memory", lambda: SimpleNamespace(total=24 << 30))
    assert workers.suggested_jobs(plan(8)) == 2


def test_a_worker_that_reads_other_code_than_was_planned_computes_nothing(
    plan: MAKER, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(1)
    worker = SimpleNamespace(plan=made, start=SimpleNamespace(code="0" * 64))
    monkeypatch.setattr(workers, "_WORKER", [worker])
    with pytest.raises(ExperimentError, match="the code of a policy changed while the run was starting"):
        workers._compute(made.units[0])
