"""Policies that learn offline get one text per model, set apart from every test, and are fitted on it once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from kvassay.experiment import unit as module
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.policy.base import Artefact, Calibration
from kvassay.policy.svd import Svd
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.workload.haystack import load
from tests.experiment.test_run import FakeReplay, comparable
from tests.experiment.tiny import write_experiment

MAKER = Callable[..., Plan]
TABLE = "\n[calibration]\nlength = 300\nseed = {seed}\n"


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> MAKER:
    def make(policies: str = '["svd"]', table: str = TABLE.format(seed=1), contexts: int = 2) -> Plan:
        file = write_experiment(tmp_path, tiny_model, contexts)
        text = file.read_text(encoding="utf-8").replace('["knorm"]', policies)
        file.write_text(text + table, encoding="utf-8")
        return make_plan(load_experiment(file), file.name, tmp_path)

    return make


def calibrations(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "traces").glob("*-calibration-*"))


def test_each_unit_is_handed_the_one_calibration_trace(plan: MAKER, tmp_path: Path) -> None:
    replay = FakeReplay()
    run(plan(), tmp_path / "run", replay=replay)
    assert len(replay.calls) == 2 and replay.calibrations[0] is replay.calibrations[1]
    trace = replay.calibrations[0]
    assert trace is not None
    assert [trace.path.name] == calibrations(tmp_path / "run")
    assert (
        trace.path.name.startswith("tiny-llama-calibration-prose-numbered-300-") and trace.path.name not in replay.calls
    )
    recipe = trace.header.recipe
    assert (recipe.name, recipe.seed, trace.prefix.tokens) == ("prose_numbered", 1, 300)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["calibrations"] == [{"model": "tiny-llama", "trace": trace.path.name}]


def test_its_text_is_of_the_split_set_apart(plan: MAKER, tmp_path: Path, tiny_model: Path) -> None:
    replay = FakeReplay()
    run(plan(contexts=1), tmp_path / "run", replay=replay)
    trace = replay.calibrations[0]
    assert trace is not None
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tiny_model)
    text = tokenizer.decode(trace.prefix.token_ids.tolist())
    windows = [text[at : at + 60] for at in range(len(text) - 60)]
    own, test = (
        "\n".join(paragraph for _, document in load(split).documents for paragraph in document)
        for split in ("calibration", "test")
    )
    assert sum(window in own for window in windows) > len(windows) / 2
    assert not any(window in test for window in windows)


def test_without_an_offline_policy_none_is_recorded(plan: MAKER, tmp_path: Path) -> None:
    replay = FakeReplay()
    run(plan('["knorm"]'), tmp_path / "run", replay=replay)
    assert replay.calibrations == [None, None] and calibrations(tmp_path / "run") == []
    again = FakeReplay()
    run(plan('["knorm"]', TABLE.format(seed=2)), tmp_path / "run", replay=again)
    assert again.calls == []


def test_another_calibration_is_other_cells_on_the_same_traces(
    plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plan(), tmp_path / "run", replay=FakeReplay())
    recorded: list[str] = []

    def spy(loaded: object, sample: object, path: Path, *rest: object) -> Trace:
        recorded.append(path.name)
        return record_sample(loaded, sample, path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "record_sample", spy)
    same, other = FakeReplay(), FakeReplay()
    run(plan(), tmp_path / "run", replay=same)
    assert same.calls == [] and recorded == []
    run(plan(table=TABLE.format(seed=2)), tmp_path / "run", replay=other)
    assert len(other.calls) == 2
    assert len(recorded) == 1 and "-calibration-" in recorded[0]
    assert len(calibrations(tmp_path / "run")) == 2


def test_it_is_shortened_to_the_native_context(plan: MAKER, tmp_path: Path) -> None:
    replay = FakeReplay()
    run(plan(table="", contexts=1), tmp_path / "run", replay=replay)
    trace = replay.calibrations[0]
    assert trace is not None
    assert trace.prefix.tokens + trace.branches[0].tokens == trace.layout.native_context == 1024


def test_a_run_fits_once_and_what_it_learns_decides(
    plan: MAKER, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[str] = []
    fit = Svd.fit

    def spy(policy: Svd, source: Calibration) -> Artefact:
        fitted.append(policy.label)
        return fit(policy, source)

    monkeypatch.setattr(Svd, "fit", spy)
    policies = '["svd", "svd(rank=0.25)"]'
    run(plan(policies), tmp_path / "first", jobs=1)
    assert fitted == ["svd", "svd(rank=0.25)"]
    run(plan(policies), tmp_path / "again", jobs=1)
    assert len(fitted) == 4  # another run keeps nothing of the first
    run(plan(policies, TABLE.format(seed=2)), tmp_path / "other", jobs=1)
    first, again, other = (comparable(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    changed = {b["arm"] for a, b in zip(first, other, strict=True) if a["nll"] != b["nll"]}
    assert changed == {"svd", "svd(rank=0.25)"}
