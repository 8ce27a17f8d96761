"""The harness's own scorers over the closed loop, on a tiny task, beside the harness's own `hf` model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvassay.errors import BudgetError, ExperimentError
from tests.lm_eval.tiny import save_model, write_tasks

pytestmark = pytest.mark.lm_eval
SMALL = {"policy": "snapkv(window=8)", "budget": "keep=0.25", "sink": 2, "recent": 8}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm-eval")
    save_model(folder / "model")
    write_tasks(folder / "tasks")
    return folder


def evaluate(place: Path, model: str, task: str, **arguments: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    import kvassay.lm_eval.model  # registers it
    import lm_eval

    assert kvassay.lm_eval.model.KvassayLM
    if model == "hf":
        arguments["dtype"] = "float32"
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(place / "model"), **arguments},
        tasks=[task],
        device="cpu",
        batch_size=1,
        task_manager=TaskManager(include_path=str(place / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    return dict(results)


def likelihoods(results: dict[str, Any]) -> list[float]:
    rows = results["samples"]["tiny_choice"]
    return [float(answer[0]) for row in rows for answer in row["filtered_resps"]]


def replies(results: dict[str, Any]) -> list[str]:
    return [row["filtered_resps"][0] for row in results["samples"]["tiny_reply"]]


def test_dense_and_a_whole_budget_say_what_hf_says(place: Path) -> None:
    hf = likelihoods(evaluate(place, "hf", "tiny_choice"))
    dense = evaluate(place, "kvassay", "tiny_choice")
    whole = evaluate(place, "kvassay", "tiny_choice", policy="snapkv(window=8)", budget="keep=1.0")
    assert len(hf) == 6 and len(set(hf)) == 6
    assert likelihoods(dense) == pytest.approx(hf, abs=1e-4)
    assert likelihoods(whole) == pytest.approx(hf, abs=1e-4)
    assert whole["config"]["retained_fraction"] == 1.0
    assert (
        dense["results"]["tiny_choice"]["acc,none"]
        == evaluate(place, "hf", "tiny_choice")["results"]["tiny_choice"]["acc,none"]
    )


def test_a_small_budget_changes_the_answers_and_says_so(place: Path) -> None:
    dense = likelihoods(evaluate(place, "kvassay", "tiny_choice"))
    small = evaluate(place, "kvassay", "tiny_choice", **SMALL)
    assert all(abs(a - b) > 1e-3 for a, b in zip(likelihoods(small), dense, strict=True))
    config = small["config"]
    assert config["kvassay_arm"] == "snapkv(window=8) keep=0.25"
    assert (config["prompts"], config["prompts_left_dense"], config["query_aware"]) == (3, 0, True)
    assert 0.2 < config["retained_fraction"] <= 0.25


def test_replies_under_dense_are_those_of_hf(place: Path) -> None:
    hf = replies(evaluate(place, "hf", "tiny_reply"))
    assert replies(evaluate(place, "kvassay", "tiny_reply")) == hf
    assert any(hf) and not any("e" in reply for reply in hf)
    assert replies(evaluate(place, "kvassay", "tiny_reply", policy="h2o", budget="keep=1.0")) == hf


def test_a_question_can_be_kept_from_the_policy(place: Path) -> None:
    seen = evaluate(place, "kvassay", "tiny_choice", **SMALL)
    unseen = evaluate(place, "kvassay", "tiny_choice", question_from="Question:", **SMALL)
    assert unseen["config"]["query_aware"] is False
    assert likelihoods(unseen) != pytest.approx(likelihoods(seen), abs=1e-3)


def test_short_prompts_are_refused_or_run_dense_and_counted(place: Path) -> None:
    short = {**SMALL, "budget": "keep=0.05"}
    with pytest.raises(BudgetError, match=r"or let such prompts run dense, which is counted \(short=dense\)"):
        evaluate(place, "kvassay", "tiny_choice", **short)
    found = evaluate(place, "kvassay", "tiny_choice", short="dense", **short)
    assert found["config"]["prompts_left_dense"] == 3
    assert likelihoods(found) == pytest.approx(likelihoods(evaluate(place, "kvassay", "tiny_choice")), abs=1e-6)


def test_what_cannot_be_done_is_refused(place: Path) -> None:
    from kvassay.lm_eval.model import KvassayLM

    with pytest.raises(ExperimentError, match=r"no argument 'polcy' \(did you mean 'policy'\?\)"):
        KvassayLM(str(place / "model"), polcy="snapkv")
    with pytest.raises(ExperimentError, match="'hindsight' needs the queries of what comes after the prompt"):
        KvassayLM(str(place / "model"), policy="hindsight", budget=0.5)
    model = KvassayLM(str(place / "model"))
    with pytest.raises(ExperimentError, match="no prompt to compress"):
        model.loglikelihood_rolling([])
    with pytest.raises(ExperimentError, match="ask for sampling"):
        model._reply("some prompt", {"do_sample": True, "temperature": 1.0, "until": ["x"]})


def test_the_command_line(place: Path, tmp_path: Path) -> None:
    arguments = f"pretrained={place / 'model'},policy=snapkv(window=8,kernel=3),budget=keep=0.25,sink=2,recent=8"
    rest = ["--tasks", "tiny_choice", "--include_path", str(place / "tasks"), "--output_path", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "kvassay.lm_eval", "--model", "kvassay", "--model_args", arguments, *rest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = tmp_path.rglob("results_*.json")
    config = json.loads(file.read_text())["config"]
    assert (config["model"], config["kvassay_arm"]) == ("kvassay", "snapkv(window=8, kernel=3) keep=0.25")
