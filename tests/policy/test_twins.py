"""Control twins: same evidence and budget, another order of tokens."""

from __future__ import annotations

import pickle

import pytest
import torch

from kvassay.cache.data import LayerData
from kvassay.errors import PolicyError
from kvassay.policy import registry
from kvassay.policy.knorm import KeyNorm
from kvassay.policy.quest import Quest
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.twins import merge_off, shuffled, sign_flipped, twin
from kvassay.policy.views import Meter
from tests.policy.build import dense, kept, memory, ragged, random_q, view


def norms(*values: float) -> LayerData:
    keys = torch.tensor(values)[None, :, None] * torch.ones(1, 1, 4)
    return LayerData.dense(keys, keys)


def test_flipped_keeps_what_the_policy_evicts_under_the_same_protection() -> None:
    data, policy = norms(3, 1, 4, 1.5, 9, 2), sign_flipped(KeyNorm())
    assert kept(policy, view(policy, data), 3) == [[0, 2, 4]]
    assert kept(policy, view(policy, data, sink=2), 3) == [[0, 1, 4]]


def test_shuffled_deals_out_the_same_scores_per_head() -> None:
    data, policy = dense(200), shuffled(KeyNorm())
    true = KeyNorm().score(view(KeyNorm(), data), memory())
    drawn = policy.score(view(policy, data), memory(1))
    assert torch.equal(drawn.sort(1).values, true.sort(1).values)
    for head in range(2):
        assert abs(float(torch.corrcoef(torch.stack([drawn[head], true[head]]))[0, 1])) < 0.25
    assert not torch.equal(drawn, policy.score(view(policy, data), memory(2)))
    assert torch.equal(drawn, policy.score(view(policy, data), memory(1)))


def test_shuffled_leaves_padding_where_it_is() -> None:
    data = ragged(dense(12), [[0, 1, 3, 4, 6, 9], [0, 5, 9]])
    policy = shuffled(KeyNorm())
    for seed in range(20):
        score = policy.score(view(policy, data, length=12), memory(seed))
        assert torch.isfinite(score[0]).all() and torch.isfinite(score[1, :3]).all()
        assert score[1, 3:].isnan().all()


def test_a_twin_costs_the_same_scan_and_has_the_same_parameters() -> None:
    meter, twin_meter = Meter(2.0), Meter(2.0)
    policy = sign_flipped(SnapKV(window=3, kernel=1))
    SnapKV(3, 1).score(view(SnapKV(), dense(12), queries=random_q(3), meter=meter), memory())
    policy.score(view(policy, dense(12), queries=random_q(3), meter=twin_meter), memory())
    assert meter.touched == twin_meter.touched != {}
    assert policy.parameters == {"window": 3, "kernel": 1}
    assert policy.label == "snapkv~flipped(window=3, kernel=1)"
    assert policy.writes_score and policy.writes_decide and not policy.writes_read


def test_a_twin_is_found_by_name_and_survives_another_process() -> None:
    policy = registry.parse("snapkv~flipped(window=3)")
    assert policy == sign_flipped(SnapKV(window=3)) and type(policy) is twin(SnapKV, "flipped")
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and type(again) is type(policy)
    assert registry.parse(policy.label) == policy


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sign_flipped(Quest()), "'quest' has no score to flip"),
        (lambda: shuffled(Quest()), "'quest' has no score to shuffle"),
        (lambda: merge_off(KeyNorm()), "'knorm' merges nothing"),
        (lambda: registry.get("knorm~fliped"), r"no twin 'fliped' \(did you mean 'flipped'\?\)"),
    ],
)
def test_twins_that_make_no_sense_are_refused(make: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()  # type: ignore[operator]
