"""PagedEviction: whole blocks go, the same ones in every layer and head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Decision
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.paged_eviction import PagedEviction
from kvassay.policy.views import CacheView, LayerView
from tests.policy.build import allowance, cache, dense, layer, memory, ragged, view

BLOCK = 4


def with_ratio(ratio: list[float], heads: int = 2, dim: int = 2) -> LayerData:
    """Keys of norm 1, values whose norm is `ratio` per token, in every head."""
    k = torch.zeros(heads, len(ratio), dim)
    k[..., 0] = 1.0
    v = torch.zeros_like(k)
    v[..., 0] = torch.tensor(ratio)
    return LayerData.dense(k, v)


def layers(*data: LayerData, sink: int = 0, recent: int = 0, length: int | None = None) -> list[LayerView]:
    policy = PagedEviction(BLOCK)
    return [view(policy, d, of=layer(i, dim=2), sink=sink, recent=recent, length=length) for i, d in enumerate(data)]


def decide(policy: PagedEviction, shown: list[LayerView], tokens: int, context: int | None = None) -> Decision:
    over: CacheView = cache(*shown, context=context)
    scores = {v.index: policy.score(v, memory()) for v in shown}
    protection = shown[0].protection
    return policy.decide(over, scores, memory(), allowance(tokens, over.context, protection.sink, protection.recent))


def keep_of(decision: Decision, index: int) -> Tensor:
    return decision.edits[index][0].keep  # type: ignore[union-attr]


def test_the_score_is_the_ratio_of_norms() -> None:
    data = dense(12)
    score = PagedEviction().score(view(PagedEviction(), data), memory()).numpy()
    expected = np.linalg.norm(data.v.numpy(), axis=-1) / np.linalg.norm(data.k.numpy(), axis=-1)
    np.testing.assert_allclose(score, expected, rtol=1e-6)


def test_the_worst_blocks_by_mean_over_layers_and_heads_go_everywhere() -> None:
    one = with_ratio([9] * 4 + [1] * 4 + [4] * 4 + [6] * 4)
    two = with_ratio([1] * 4 + [6] * 4 + [2] * 4 + [6] * 4)  # means 5, 3.5, 3, 6
    decision = decide(PagedEviction(BLOCK), layers(one, two), 8)
    assert not decision.compact
    for index in (0, 1):
        assert keep_of(decision, index).tolist() == [[True] * 4 + [False] * 8 + [True] * 4] * 2


def test_the_mean_is_over_tokens_not_the_best_of_them() -> None:
    shown = layers(with_ratio([0, 0, 0, 9] + [2, 2, 2, 2] + [5] * 4))
    assert (
        keep_of(decide(PagedEviction(BLOCK), shown, 8), 0)[0].tolist()
        == [True] * 0 + [True] * 4 + [False] * 4 + [True] * 4
    )


@pytest.mark.parametrize("tokens, blocks_gone", [(15, 1), (12, 1), (11, 2), (8, 2)])
def test_as_few_blocks_go_as_bring_it_inside_the_budget(tokens: int, blocks_gone: int) -> None:
    decision = decide(PagedEviction(BLOCK), layers(with_ratio([float(i) for i in range(16)])), tokens)
    assert int((~keep_of(decision, 0)[0]).sum()) == blocks_gone * BLOCK


def test_protected_blocks_and_the_one_still_filling_stay() -> None:
    ratio = [0.0] * 4 + [5.0] * 4 + [3.0] * 4 + [0.0] * 4 + [0.0] * 2  # sink in block 0, recent in blocks 3 and 4
    decision = decide(PagedEviction(BLOCK), layers(with_ratio(ratio), sink=1, recent=3), 14)
    assert keep_of(decision, 0)[0].tolist() == [True] * 8 + [False] * 4 + [True] * 6


def test_too_few_free_blocks_for_the_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match="needs 2 blocks of 4 to go, 1 may"):
        decide(PagedEviction(BLOCK), layers(with_ratio([1.0] * 16), sink=1, recent=5), 8)


def test_inside_the_budget_nothing_goes() -> None:
    assert decide(PagedEviction(BLOCK), layers(with_ratio([1.0] * 16)), 16).empty


def test_in_decode_the_blocks_already_gone_do_not_count() -> None:
    full = with_ratio([1, 1, 1, 1, 8, 8, 8, 8, 2, 2, 2, 2, 9, 9, 9, 9])
    left = ragged(full, [[*range(4, 16)]] * 2)  # block 0 is gone; the budget was 8 of a context of 12
    decision = decide(PagedEviction(BLOCK), layers(left, length=16), 8, context=12)
    assert left.positions[0][~keep_of(decision, 0)[0]].tolist() == [8, 9, 10, 11]


def test_token_unit_evicts_the_same_tokens_everywhere_and_compacts_after_prefill_only() -> None:
    policy = PagedEviction(BLOCK, prefill_unit="token")
    shown = layers(with_ratio([5, 1, 5, 2, 5, 5]), with_ratio([5, 1, 5, 2, 5, 5]))
    decision = decide(policy, shown, 4)
    assert decision.compact
    assert keep_of(decision, 1).tolist() == [[True, False, True, False, True, True]] * 2
    later = decide(policy, layers(with_ratio([1.0] * 8 + [2.0] * 4)), 8, context=8)
    assert not later.compact and keep_of(later, 0)[0].tolist() == [False] * 4 + [True] * 8


def test_the_filling_block_never_goes_even_if_worst() -> None:
    decision = decide(PagedEviction(BLOCK), layers(with_ratio([5.0] * 4 + [4.0] * 4 + [0.0] * 3)), 7)
    assert keep_of(decision, 0)[0].tolist() == [True] * 4 + [False] * 4 + [True] * 3


def test_parameters_are_checked() -> None:
    with pytest.raises(PolicyError, match="prefill_unit='page', must be one of 'block', 'token'"):
        PagedEviction(prefill_unit="page")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="block=0"):
        PagedEviction(block=0)
