"""A whole run on a model that selects, and on one that compresses: what is compared, timed and left out by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvassay.experiment import timing
from kvassay.experiment.plan import make_plan
from kvassay.experiment.results import Results
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from tests.experiment.tiny import EXPERIMENT
from tests.record import tiny

LEFT_OUT = {
    "minimax_m3": {"quest": "redundant: the trained index already selects blocks per KV head"},
    "deepseek_v4": {
        "knorm": "blocked: an entry stands for several tokens",
        "quest": "blocked: an entry stands for several tokens",
    },
}


@pytest.fixture(params=LEFT_OUT)
def finished(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """A run of one short context under two policies and dense, timed."""
    roofs = SimpleNamespace(bandwidth=1e9, matrix_rate=1e10, threads=1)
    monkeypatch.setattr(timing, "measure_roofs", lambda device: roofs)
    model = tiny.save(tmp_path / request.param, request.param)
    text = EXPERIMENT.format(model=model, contexts=1).replace("384", "128").replace("questions = 2", "questions = 1")
    text = text.replace('["knorm"]', '["dense", "knorm", "quest"]\nalways_on = false')
    file = tmp_path / "run.toml"
    file.write_text(text.replace("enabled = false", "rounds = 3"), encoding="utf-8")
    plan = make_plan(load_experiment(file), file.name, tmp_path)
    return run(plan, tmp_path / "run", jobs=1)


def test_a_run_says_what_has_no_place_and_times_the_rest(finished: Results) -> None:
    (table,) = finished.sets
    family = table.model
    left_out = {arm.split()[0]: reason for arm, reason in table.not_applicable.items()}
    assert set(left_out) == set(LEFT_OUT[family])
    for name, reason in LEFT_OUT[family].items():
        assert left_out[name].startswith(reason)
    judged = {cell.arm.split()[0] for cell in table.cells}
    assert judged == {"dense", "knorm", "quest"} - set(left_out)
    timed = {row.arm.split()[0] for row in finished.latency}
    assert timed == (judged if family == "minimax_m3" else set())
