"""Nearest merge: who is merged into whom, the mean that results, and that identical keys merge exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Bias, Evict, Merge
from kvassay.errors import PolicyError
from kvassay.policy.base import Memory
from kvassay.policy.budget import Protection
from kvassay.policy.knorm import KeyNorm
from kvassay.policy.merge import NearestMerge
from kvassay.policy.twins import merge_off
from tests.policy.build import allowance, cache, dense, layer, memory, ragged, random_q, view
from tests.policy.paged import Run


def hand_made() -> LayerData:
    """Norms 1, 1 (kept) and 2, 3, 4 (evicted): two point like token 0, one like token 1, one away from both."""
    k = torch.tensor([[1.0, 0], [0, 1.0], [2.0, 0.1], [0.1, 3.0], [-4.0, -4.0], [5.0, 0.0]])[None]
    v = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])[None]
    return LayerData.dense(k, v.expand(1, 6, 2))


def edits_of(policy: NearestMerge, data: LayerData, keep: int) -> tuple[Merge, Bias, Evict]:
    shown = view(policy, data, of=layer(q_heads=2, kv_heads=data.k.shape[0], dim=data.k.shape[2]))
    scores = {0: policy.score(shown, memory())}
    return tuple(policy.decide(cache(shown), scores, memory(), allowance(keep, shown.length)).edits[0])  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [1, 2, 1024])
def test_each_evicted_token_goes_to_the_kept_key_of_highest_cosine(chunk: int) -> None:
    merge, bias, evict = edits_of(NearestMerge(chunk=chunk), hand_made(), 2)
    assert evict.keep.tolist() == [[True, True, False, False, False, False]]
    assert merge.into.tolist() == [[-1, -1, 0, 1, -1, 0]]  # token 4 is unlike both: cosine below 0
    assert bias.log_weight.exp()[0].tolist() == pytest.approx([3, 2, 1, 1, 1, 1])
    assert merge.values_only and bool((merge.weight == 1).all())


def test_the_threshold_decides_what_is_just_evicted() -> None:
    merge, bias, _ = edits_of(NearestMerge(similarity=0.9999), hand_made(), 2)
    assert merge.into.tolist() == [[-1, -1, -1, -1, -1, 0]]
    assert bias.log_weight[0].tolist() == pytest.approx([math.log(2), 0, 0, 0, 0, 0])


def test_targets_equal_a_plain_search_on_random_keys() -> None:
    data = dense(30)
    merge, _, evict = edits_of(NearestMerge(similarity=-1.0), data, 7)
    for head, keys in enumerate(data.k.numpy()):
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        kept = np.flatnonzero(evict.keep[head].numpy())
        for token in range(30):
            want = -1 if token in kept else kept[np.argmax(unit[kept] @ unit[token])]
            assert int(merge.into[head, token]) == want


def test_padding_of_ragged_heads_is_neither_source_nor_target() -> None:
    rows = [[0, 1, 3, 4, 6, 9, 10, 11], [0, 5, 9]]
    policy = NearestMerge(similarity=-1.0)
    shown = view(policy, ragged(dense(12), rows), length=12)
    keep = torch.tensor([[True, False] * 4, [True, False, True] + [False] * 5])
    into = policy.targets(shown, keep)
    assert into[1].tolist()[3:] == [-1] * 5 and int(into[1, 1]) in (0, 2)
    assert set(into[0, 1::2].tolist()) <= {0, 2, 4, 6}


def test_values_in_the_cache_become_the_cluster_mean() -> None:
    k = torch.tensor([[1.0, 0], [0, 1.0], [2.0, 0.1], [0.1, 3.0]])[None].repeat(2, 1, 1)
    v = torch.tensor([[1.0, 1.0], [2.0, 2.0], [5.0, 5.0], [8.0, 8.0]])[None].repeat(2, 1, 1)
    run = Run(NearestMerge(), layer(dim=2), k, v, tokens=2)
    run.prefill(4)
    assert run.data.positions.tolist() == [[0, 1]] * 2
    assert run.data.v[0, :, 0].tolist() == [3.0, 5.0]
    assert torch.equal(run.data.k, k[:, :2])


def test_merging_identical_keys_leaves_attention_as_it_was() -> None:
    """With a count bias, tokens that share a key are one token of their mean value: exactly dense."""
    base = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    k = base.repeat(1, 4, 1)  # tokens 0 to 4, which are protected, and three copies of each
    v = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(1)).double()
    run = Run(NearestMerge(), layer(), k.float(), v.float(), tokens=5, protection=Protection(5, 0))
    dense_run = Run(NearestMerge(), layer(), k.float(), v.float(), tokens=20)
    q = random_q(3).float()
    outputs = []
    for each in (run, dense_run):
        each.prefill(20)
        data, out = each.data, []
        for head in range(4):
            logits = q[head] @ data.k[head // 2].T * 8**-0.5
            if data.bias is not None:
                logits = logits + data.bias[head // 2]
            out.append(torch.softmax(logits, -1) @ data.v[head // 2])
        outputs.append(torch.stack(out))
    assert run.data.k.shape[1] == 5
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)


def test_snapkv_may_choose_what_goes() -> None:
    policy = NearestMerge(scorer="snapkv")
    shown = view(policy, dense(80), queries=random_q(64))
    keep = policy.decide(cache(shown), {0: policy.score(shown, memory())}, memory(), allowance(70, 80)).edits[0][2]
    assert isinstance(keep, Evict) and bool(keep.keep[:, 16:].all())


def test_a_budget_that_covers_all_merges_nothing() -> None:
    shown = view(NearestMerge(), dense(10))
    scores = {0: NearestMerge().score(shown, memory())}
    assert NearestMerge().decide(cache(shown), scores, memory(), allowance(10, 10)).empty


def test_the_merge_off_twin_keeps_the_same_tokens_and_is_exact() -> None:
    twin = merge_off(NearestMerge())
    assert twin.card.exact and twin.card.name == "nearest-merge~merge-off"
    k, v = (dense(40).k.float(), dense(40).v.float())
    runs = [
        Run(policy, layer(), k, v, tokens=10, protection=Protection(2, 3), memory=Memory())
        for policy in (twin, KeyNorm(), NearestMerge())
    ]
    for run in runs:
        run.prefill(40)
    off, plain, merged = (run.data for run in runs)
    assert torch.equal(off.positions, plain.positions) and torch.equal(off.positions, merged.positions)
    assert torch.equal(off.v, plain.v) and off.bias is None
    assert not torch.equal(merged.v, plain.v)


def test_parameters_are_checked() -> None:
    with pytest.raises(PolicyError, match="scorer='tova', must be one of 'knorm', 'snapkv'"):
        NearestMerge(scorer="tova")  # type: ignore[arg-type]
