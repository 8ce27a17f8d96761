"""PagedEviction: whole blocks go, the same ones in every layer and head."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Decision
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.paged_eviction import PagedEviction
from kvassay.policy.views import CacheView, LayerView
from tests.policy.build import allowance, cache, dense, layer, memory, ragged, view
from tests.policy.paged import Run

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


def test_the_last_block_stays() -> None:
    with pytest.raises(BudgetError, match="budget 2 of 8 tokens needs 2 blocks of 4 to go, 1 may"):
        decide(PagedEviction(BLOCK), layers(with_ratio([1.0] * 8)), 2)


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


@pytest.mark.parametrize("unit", ["block", "token"])
@pytest.mark.parametrize("interval", [3, BLOCK])
def test_it_is_left_out_exactly_where_it_could_not_keep_to_its_budget(unit: str, interval: int) -> None:
    """Driven over the paged cache at every context, budget and protection: refused in time, or never while it runs."""
    generated, found = 8, set()
    policy = PagedEviction(BLOCK, interval, unit)  # type: ignore[arg-type]
    rows = dense(32, dim=2)
    for context, tokens, sink, recent in itertools.product(range(3, 17), (2, 5, 8, 11), (0, 5), (0, 2, 6)):
        if not sink + recent < tokens < context:
            continue
        run = Run(
            policy, layer(dim=2), rows.k, rows.v, tokens=tokens, protection=Protection(sink, recent), block_size=BLOCK
        )
        allowed = Allowance(Budget("keep_tokens", tokens), tokens, context, Protection(sink, recent))
        reason = policy.not_applicable(context, context + generated - 1, allowed)
        failed = None
        try:
            run.prefill(context)
            for step in range(1, generated + 1):
                run.append(1)
                if step % interval == 0:
                    run.decide()
        except BudgetError as error:
            failed = str(error)
        assert (reason is None) == (failed is None), (context, tokens, sink, recent, reason, failed)
        found.add(reason is None)
    assert found == {True, False}


def test_why_it_is_left_out() -> None:
    reason = PagedEviction().not_applicable(160, 180, allowance(40, 160, 4, 32))
    assert reason is not None and reason.startswith("at most 40 tokens may be held, 48 are in blocks of 16 that stay (")
    assert PagedEviction().not_applicable(160, 180, allowance(48, 160, 4, 32)) is None
    assert PagedEviction().not_applicable(8, 60, Allowance(Budget("keep_tokens", 1.0), 8, 8, Protection(4, 32))) is None
