"""Prompts in the closed loop, beside transformers itself; no harness is needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kvassay.errors import BudgetError, ExperimentError
from kvassay.lm_eval.prompts import Prompt, Prompts, divide
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import parse
from kvassay.record.calling import cache_keyword
from kvassay.record.load import LoadedModel, load
from kvassay.replay.arms import Arm
from tests.lm_eval.tiny import save_model
from tests.record.tiny import token_ids

PROMPT, SAID = token_ids(120, seed=5), token_ids(6, seed=6)
PROTECTED = Protection(2, 8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def prompts(loaded: LoadedModel, request: Any) -> Iterator[Prompts]:
    policy, budget = request.param
    arm = Arm(parse(policy), None if budget is None else Budget.parse(budget), PROTECTED)
    made = Prompts(loaded, arm)
    yield made
    made.close()


def whole(ids: Sequence[int], rest: int = 1) -> Prompt:
    return Prompt(tuple(ids[:-rest]), tuple(ids[-rest:]))


def answer_over(model: Any, kept: Sequence[int], rest: int) -> tuple[float, list[int]]:
    """Log-likelihood of SAID, and four greedy tokens, where only `kept` positions of the context are still there."""
    context = PROMPT[:-rest]
    with torch.inference_mode():
        cache = model(torch.tensor([context]), use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, list(kept)], layer.values[:, :, list(kept)]
        fed = [*PROMPT[-rest:], *SAID[:-1]]
        logits = continued(model, copy.deepcopy(cache), fed, len(context))
        score = torch.log_softmax(logits[-len(SAID) :].double(), -1).gather(1, torch.tensor(SAID)[:, None]).sum()
        greedy, ids = [], PROMPT[-rest:]
        place = len(context)
        for _ in range(4):
            greedy.append(int(continued(model, cache, ids, place)[-1].argmax()))
            place, ids = place + len(ids), greedy[-1:]
    return float(score), greedy


def continued(model: Any, cache: Any, ids: Sequence[int], place: int) -> torch.Tensor:
    """Logits of tokens fed at their true positions, on top of a cache that may have lost some."""
    positions = torch.arange(place, place + len(ids))[None]
    out: torch.Tensor = model(
        torch.tensor([list(ids)]), position_ids=positions, **{cache_keyword(model): cache}
    ).logits[0]
    return out


@pytest.mark.parametrize(
    "prompts", [("dense", None), ("snapkv(window=8)", "keep=1.0"), ("h2o", "keep=1.0")], indirect=True
)
def test_nothing_dropped_is_the_model_itself(prompts: Prompts) -> None:
    score, greedy = answer_over(prompts.loaded.model, range(len(PROMPT) - 1), 1)
    with prompts.asked(whole(PROMPT), len(SAID)) as asked:
        assert asked.score(SAID)[0] == pytest.approx(score, abs=1e-4)
        assert asked.generate(4, lambda ids: False) == greedy
        assert asked.score(greedy)[1] and not asked.score([*greedy[:-1], 0])[1]


@pytest.mark.parametrize("prompts", [("recency", "keep=40")], indirect=True)
@pytest.mark.parametrize("rest", [1, 9])
def test_what_is_evicted_is_gone_and_the_rest_is_fed_after(prompts: Prompts, rest: int) -> None:
    context = len(PROMPT) - rest
    kept = [0, 1, *range(context - 38, context)]
    score, greedy = answer_over(prompts.loaded.model, kept, rest)
    with prompts.asked(whole(PROMPT, rest), len(SAID)) as asked:
        assert asked.score(SAID)[0] == pytest.approx(score, abs=1e-4)
        assert asked.generate(4, lambda ids: False) == greedy
    assert prompts.tally.retained_fraction == pytest.approx(40 / context)


@pytest.mark.parametrize("prompts", [("dense", None)], indirect=True)
def test_a_reply_ends_where_it_is_stopped(prompts: Prompts) -> None:
    with prompts.asked(whole(PROMPT), 8) as asked:
        said = asked.generate(8, lambda ids: False)
        assert len(said) == 8
        assert asked.generate(8, lambda ids: len(ids) == 3) == said[:3]


@pytest.mark.parametrize("prompts", [("recency", "keep=0.05")], indirect=True)
def test_a_prompt_too_short_for_the_budget(prompts: Prompts) -> None:
    with pytest.raises(BudgetError, match=r"gives 5 of 119 tokens, not more than the 10 protected.*short=dense"):  # noqa: SIM117
        with prompts.asked(whole(PROMPT), 1):
            pass
    with pytest.raises(BudgetError, match="a prompt of 1 tokens leaves none to compress"):  # noqa: SIM117
        with prompts.asked(Prompt((), (5,)), 1):
            pass
    prompts.short = "dense"
    score, _ = answer_over(prompts.loaded.model, range(len(PROMPT) - 1), 1)
    with prompts.asked(whole(PROMPT), len(SAID)) as asked:
        assert asked.score(SAID)[0] == pytest.approx(score, abs=1e-4)
    assert (prompts.tally.prompts, prompts.tally.dense_prompts) == (1, 1)


def test_a_policys_own_rule_may_find_a_prompt_too_short(loaded: LoadedModel) -> None:
    made = Prompts(loaded, Arm(parse("snapkv(window=60)"), Budget.parse("keep=0.5"), PROTECTED), short="dense")
    score, _ = answer_over(loaded.model, range(len(PROMPT) - 1), 1)
    with made.asked(whole(PROMPT), len(SAID)) as asked:
        assert asked.score(SAID)[0] == pytest.approx(score, abs=1e-4)
    assert (made.tally.prompts, made.tally.dense_prompts) == (1, 1)
    made.close()


def test_a_policy_that_needs_the_future_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ExperimentError, match="'hindsight' needs the queries of what comes after"):
        Prompts(loaded, Arm(parse("hindsight"), Budget.parse("keep=0.5"), PROTECTED))


def test_an_offline_policy_is_fitted_on_other_text(loaded: LoadedModel) -> None:
    made = Prompts(loaded, Arm(parse("svd(rank=0.5)"), None, PROTECTED))
    with made.asked(whole(PROMPT), len(SAID)) as asked:
        found = asked.score(SAID)[0]
    assert abs(found - answer_over(loaded.model, range(len(PROMPT) - 1), 1)[0]) > 1e-3
    assert 0.4 < (made.tally.retained_fraction or 0) < 1
    made.close()


def test_dividing_keeps_the_opening_and_cuts_the_left() -> None:
    ids = [1, 10, 11, 12, 13, 14, 15]
    assert divide(ids, 5, 3, 10, [1]) == (Prompt((1, 10, 11, 12, 13), (14, 15)), False)
    assert divide(ids, 5, 3, 8, [1]) == (Prompt((1, 12, 13), (14, 15)), True)
    assert divide(ids, 5, 3, 8, []) == (Prompt((11, 12, 13), (14, 15)), True)
    with pytest.raises(ExperimentError, match="2 tokens after the context and 3 of the continuation do not fit 5"):
        divide(ids, 5, 3, 5, [1])
