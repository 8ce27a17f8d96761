"""The speculation stage of a run: what is asked for, what is computed once, what is shown."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from kvassay.errors import ExperimentError
from kvassay.experiment import speculating
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.results import Results, as_data
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.experiment.toml import resolved_toml
from kvassay.report.acceptance import AcceptanceTable
from kvassay.report.table import console_for
from tests.experiment.test_run import FakeReplay
from tests.experiment.tiny import write_experiment

TABLE = """
[speculation]
drafters = ["compressed", "ngram"]
arms = ["knorm"]
k = 3
tokens = 2
ngram_min = 1
"""
MAKER = Callable[..., Plan]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    numba.set_num_threads(1)


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> MAKER:
    def make(table: str = TABLE, contexts: int = 2) -> Plan:
        file = write_experiment(tmp_path, tiny_model, contexts)
        file.write_text(file.read_text(encoding="utf-8") + table, encoding="utf-8")
        return make_plan(load_experiment(file), file.name, tmp_path)

    return make


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the traces that are speculated on, as it happens."""
    found: list[str] = []
    real = speculating.replay_speculation

    def counted(loaded: Any, trace: Any, *rest: Any, **more: Any) -> Any:
        found.append(trace.path.name)
        return real(loaded, trace, *rest, **more)

    monkeypatch.setattr(speculating, "replay_speculation", counted)
    return found


def shown(results: Results) -> str:
    console = console_for(io.StringIO())
    console.print(AcceptanceTable(results))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_run_measures_what_is_asked_for(plan: MAKER, tmp_path: Path, calls: list[str]) -> None:
    made = plan()
    results = run(made, tmp_path / "run", replay=FakeReplay())
    assert len(calls) == 2
    rows = results.speculation
    assert len(rows) == 2 * 2 * 2 * 2 * (3 + 1)  # contexts, questions, drafters, arms, k teacher-forced and free
    assert {row.arm for row in rows} == {"dense", "knorm keep=0.5"}
    assert {row.trace for row in rows} == {unit["trace"] for unit in results.manifest["units"]}
    assert {row.rounds for row in rows if row.mode == "teacher_forced"} == {2}
    assert all(isinstance(row.overlap_per_pos, tuple) and len(row.overlap_per_pos) == row.k for row in rows)
    dense = [row for row in rows if (row.arm, row.drafter) == ("dense", "compressed")]
    assert len(dense) == 16 and all(row.acceptance_rate == 1 for row in dense)
    assert len(as_data(results)["speculation"]) == len(rows)


def test_each_context_is_drafted_on_once(
    plan: MAKER, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    stopped = speculating.replay_speculation

    def once(*given: Any, **more: Any) -> Any:
        if len(calls) == 1:
            raise KeyboardInterrupt
        return stopped(*given, **more)

    monkeypatch.setattr(speculating, "replay_speculation", once)
    with pytest.raises(KeyboardInterrupt):
        run(plan(), folder, replay=FakeReplay())
    first = {p: p.stat().st_mtime_ns for p in (folder / "speculation").iterdir()}
    assert len(first) == 1 and not (folder / "speculation.parquet").exists()
    monkeypatch.setattr(speculating, "replay_speculation", stopped)
    again = FakeReplay()
    whole = run(plan(), folder, replay=again)
    assert len(calls) == 2 and again.calls == [] and len(set(calls)) == 2
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in first.items())
    assert run(plan(), folder, replay=again).speculation == whole.speculation
    assert len(calls) == 2
    # Other settings are other rows of the same cells.
    fewer = run(plan(TABLE.replace("k = 3", "k = 2")), folder, replay=again)
    assert len(calls) == 4 and again.calls == [] and {row.k for row in fewer.speculation} == {1, 2}
    # And a file that was torn is computed again.
    for path in (folder / "speculation").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert len(run(plan(), folder, replay=again).speculation) == len(whole.speculation)
    assert len(calls) == 6
    # Without the table nothing is left that the run did not measure.
    assert run(plan(""), folder, replay=again).speculation == ()
    assert not (folder / "speculation.parquet").exists() and len(calls) == 6


def test_the_table_says_what_was_measured_and_over_what(plan: MAKER, tmp_path: Path) -> None:
    results = run(plan(contexts=1), tmp_path / "run", replay=FakeReplay())
    text = shown(results)
    assert "Speculative acceptance (measured" in text and "accepted tokens / drafts" in text
    line = next(line.split() for line in text.splitlines() if line.startswith("dense") and " compressed " in line)
    # first token, expected, rate; accepted at k = 1, 2, 3; free-running rate, accepted, emitted
    assert line[2:] == ["1.00", "1.00", "1.00", "1.00", "2.00", "3.00", "1.00", "3.00", "4.00"]
    assert shown(run(plan("", 1), tmp_path / "run", replay=FakeReplay())).strip() == ""


def test_a_second_model_by_its_folder(plan: MAKER, tmp_path: Path, tiny_model: Path) -> None:
    made = plan(f'[speculation]\ndrafters = ["{tiny_model}"]\narms = ["dense"]\nk = 2\ntokens = 2\n', 1)
    rows = run(made, tmp_path / "run", replay=FakeReplay()).speculation
    assert {(row.drafter, row.target) for row in rows} == {("tiny-llama", "dense"), ("tiny-llama", "dense'")}
    assert all(row.acceptance_rate == 1 for row in rows)  # the same weights
    with pytest.raises(ExperimentError, match=r"\[speculation\] drafters: './nowhere/at-all' is no folder"):
        plan('[speculation]\ndrafters = ["./nowhere/at-all"]\n', 1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'drafters = ["compresed"]',
            "[speculation] drafters: no drafter is called 'compresed' (did you mean 'compressed'?)",
        ),
        ('drafters = ["ngram", "ngram"]', "[speculation] drafters: 'ngram' is listed twice"),
        ('drafters = ["smollm2-135"]', "no drafter is called 'smollm2-135' (did you mean 'smollm2-135m'?)"),
        ('drafters = ["ngram"]\narms = ["knrom"]', "[speculation] arms: no arm is 'knrom' (did you mean 'knorm'?)"),
        ('drafters = ["ngram"]\nk = 0', "[speculation] k: Input should be greater than or equal to 1, got 0"),
        ('drafters = ["ngram"]\nngram_min = 5', "ngram_min is 5, ngram_max 4: at most as long"),
        ("", "[speculation] missing key 'drafters'"),
        ("drafters = []\nk = 4", "k is set, but drafters names nobody, so nothing would be measured"),
        ('drafter = ["ngram"]', "[speculation] unknown key 'drafter' (did you mean 'drafters'?)"),
    ],
)
def test_mistakes_are_one_line(plan: MAKER, table: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        plan(f"[speculation]\n{table}\n")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_off_by_default_and_written_out_whole(plan: MAKER, tmp_path: Path) -> None:
    for table in ("", TABLE):
        experiment = plan(table).experiment
        file = tmp_path / "resolved.toml"
        file.write_text(resolved_toml(experiment), encoding="utf-8")
        assert load_experiment(file) == experiment
    assert plan("").experiment.speculation.drafters == ()
