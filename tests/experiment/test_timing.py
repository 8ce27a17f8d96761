"""The timing stage of a run: who is timed, when it is done again, and what the files say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment import run as running
from kvassay.experiment import timing
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.results import Results, as_data
from kvassay.experiment.schema import load_experiment
from kvassay.replay.arms import Arm
from kvassay.replay.latency import ArmTimes
from kvassay.trace.reader import Trace
from tests.experiment.test_run import FakeReplay
from tests.experiment.tiny import write_experiment

MAKER = Callable[..., Plan]
ROOFS = SimpleNamespace(bandwidth=1e9, matrix_rate=1e10, threads=2)


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> MAKER:
    def make(latency: str = "rounds = 3", contexts: int = 1) -> Plan:
        file = write_experiment(tmp_path, tiny_model, contexts)
        text = file.read_text(encoding="utf-8").replace("enabled = false", latency)
        file.write_text(text.replace('["knorm"]', '["dense", "knorm", "quest"]\nalways_on = false'), encoding="utf-8")
        return make_plan(load_experiment(file), file.name, tmp_path)

    return make


def run(made: Plan, monkeypatch: pytest.MonkeyPatch) -> Results:
    """Run with a replay that costs nothing, taken for the real one."""
    replay = FakeReplay()
    monkeypatch.setattr(running, "replay_trace", replay)
    return running.run(made, made.base / "run", replay=replay, jobs=1)


class FakeTimes:
    """Times by the number of the arm; the second context takes three times as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traces: list[str] = []
        monkeypatch.setattr(timing, "time_arms", self)
        monkeypatch.setattr(timing, "measure_roofs", lambda device: ROOFS)

    def __call__(
        self, loaded: Any, trace: Trace, arms: Sequence[Arm], protocol: Any, rounds: int, calibration: Any
    ) -> list[ArmTimes]:
        self.traces.append(trace.path.name)
        factor = 1.0 + 2.0 * (len(self.traces) - 1)
        return [
            ArmTimes(arm.label, 384, (factor * (n + 1),) * rounds, 0.5, 1e9 * (n + 1), 2e9)
            for n, arm in enumerate(arms)
        ]


def test_one_context_of_each_workload_is_timed(plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, made = FakeTimes(monkeypatch), plan(contexts=2)
    results = run(made, monkeypatch)
    assert len(fake.traces) == 1 and "-0-" in fake.traces[0]
    assert [row.arm for row in results.latency] == [arm.label for arm in made.arms]
    dense, second = results.latency[:2]
    assert (dense.attention_seconds, dense.dense_seconds, dense.fraction, dense.rounds) == (1.0, 1.0, 1.0, 3)
    assert (second.attention_seconds, second.fraction, second.total_fraction) == (2.0, 2.0, 2.5)
    assert (second.gigabytes_per_second, second.bandwidth_fraction, second.matrix_fraction) == (1.0, 1.0, 0.1)
    assert {row.how for row in results.latency} == {"measured"}
    assert {(row.model, row.trace_set) for row in results.latency} == {("tiny-llama", made.trace_sets[0].label)}
    assert {row.how for row in results.cost} == {"modelled"}
    assert {row.hardware for row in results.cost} == {"epyc-2core-avx2", "h100-sxm", "h200", "mi300x"}
    assert len(results.cost) == 4 * len(made.arms)
    data = as_data(results)
    assert (len(data["latency"]), len(data["cost"])) == (len(made.arms), 4 * len(made.arms))


def test_rounds_of_several_contexts_go_together(plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTimes(monkeypatch)
    results = run(plan("rounds = 3\ncontexts = 5", 2), monkeypatch)
    assert len(fake.traces) == 2  # there are no more
    dense = results.latency[0]
    assert (dense.rounds, dense.attention_low, dense.attention_seconds, dense.attention_high) == (6, 1.0, 2.0, 3.0)


def test_a_finished_stage_is_not_timed_again(plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTimes(monkeypatch)
    monkeypatch.setattr("kvassay.experiment.plan.replay_code", lambda policies: "2" * 64)
    monkeypatch.setattr(timing, "code_sha256", lambda modules: "1" * 64)
    run(plan(), monkeypatch)
    file = tmp_path / "run" / "latency.parquet"
    before = file.stat().st_mtime_ns
    again = run(plan(), monkeypatch)
    assert len(fake.traces) == 1 and file.stat().st_mtime_ns == before and len(again.latency) > 0
    run(plan("rounds = 4"), monkeypatch)
    assert len(fake.traces) == 2
    monkeypatch.setattr(timing, "code_sha256", lambda modules: "0" * 64)
    run(plan("rounds = 4"), monkeypatch)
    assert len(fake.traces) == 3
    file.write_bytes(file.read_bytes()[:100])
    run(plan("rounds = 4"), monkeypatch)
    assert len(fake.traces) == 4


def test_it_can_be_left_out_and_then_leaves_no_file(
    plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTimes(monkeypatch)
    run(plan(), monkeypatch)
    without = run(plan("enabled = false"), monkeypatch)
    assert len(fake.traces) == 1 and without.latency == ()
    assert not (tmp_path / "run" / "latency.parquet").exists()
    assert {row.calibration_error for row in without.cost} == {None}


def test_a_replay_of_the_callers_own_is_not_timed(plan: MAKER, tmp_path: Path) -> None:
    results = running.run(plan(), tmp_path / "run", replay=FakeReplay())
    assert results.latency == () and not (tmp_path / "run" / "latency.parquet").exists()
    assert len(results.cost) > 0


def test_a_killed_stage_is_made_up_for(plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTimes(monkeypatch)

    def stop(*_: Any) -> list[ArmTimes]:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "time_arms", stop)
    with pytest.raises(KeyboardInterrupt):
        run(plan(), monkeypatch)
    assert not list((tmp_path / "run").glob("*latency*")) and len(list((tmp_path / "run" / "units").iterdir())) == 1
    FakeTimes(monkeypatch)
    assert len(run(plan(), monkeypatch).latency) == len(plan().arms)


def test_the_table_has_defaults_and_limits(plan: MAKER) -> None:
    defaults = plan("").experiment.latency
    assert (defaults.enabled, defaults.rounds, defaults.contexts) == (True, 7, 1)
    with pytest.raises(ExperimentError, match=r"\[latency\] rounds: Input should be greater than or equal to 3, got 2"):
        plan("rounds = 2")
    with pytest.raises(ExperimentError, match=r"\[latency\] unknown key 'round' \(did you mean 'rounds'\?\)"):
        plan("round = 4")


def test_a_real_run_times_every_arm(plan: MAKER, tmp_path: Path) -> None:
    results = running.run(plan(), tmp_path / "run", jobs=1)
    times = {row.arm: row for row in Results.open(tmp_path / "run").latency}
    assert list(times) == list(results.arms)
    assert times["dense"].fraction == 1 and times["dense"].policy_seconds == 0
    assert times["quest read=0.5"].policy_seconds > 0
    assert times["knorm keep=0.5"].read_bytes < times["dense"].read_bytes
    assert all(0 < row.attention_low <= row.attention_seconds <= row.attention_high for row in times.values())
    assert all(row.bandwidth_fraction > 0 and row.matrix_fraction > 0 for row in times.values())
