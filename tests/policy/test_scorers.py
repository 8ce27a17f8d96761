"""Each eviction scorer against its definition, written again in plain NumPy float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvassay.cache.data import LayerData
from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.policy.base import Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.dense import Dense
from kvassay.policy.hindsight import Hindsight
from kvassay.policy.keydiff import KeyDiff
from kvassay.policy.knorm import KeyNorm
from kvassay.policy.random import Random
from kvassay.policy.recency import Recency
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.streaming import Streaming
from kvassay.policy.tova import Tova
from kvassay.policy.views import LayerView, Meter
from tests.policy.build import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    allowance,
    attention_oracle,
    cache,
    dense,
    kept,
    layer,
    memory,
    ragged,
    random_q,
    view,
)

N, GROUP = 24, Q_HEADS // KV_HEADS


def rows_of(q: torch.Tensor, data: LayerData, q_positions: list[int]) -> np.ndarray:
    """Attention rows [q_heads, queries, tokens] from the oracle."""
    return np.stack(
        [
            attention_oracle(q[h], data.k[h // GROUP], q_positions, list(range(data.k.shape[1])), DIM**-0.5)
            for h in range(Q_HEADS)
        ]
    )


def test_snapkv_is_the_pooled_mean_attention_of_the_window() -> None:
    data, q, window, kernel = dense(N), random_q(6), 6, 5
    score = SnapKV(window, kernel).score(view(SnapKV(), data, queries=q), memory()).numpy()

    rows = rows_of(q, data, list(range(N - window, N)))
    mass = rows[:, :, : N - window].mean(axis=1)
    pooled = np.zeros_like(mass)
    for token in range(N - window):
        lo, hi = max(0, token - kernel // 2), min(N - window, token + kernel // 2 + 1)
        pooled[:, token] = mass[:, lo:hi].sum(axis=1) / kernel  # zeros beyond the edge count, as in avg_pool1d
    expected = pooled.reshape(KV_HEADS, GROUP, -1).mean(axis=1)
    np.testing.assert_allclose(score[:, : N - window], expected, rtol=1e-6)
    assert (score[:, N - window :] > score[:, : N - window].max()).all()


def test_snapkv_uses_the_last_queries_of_a_longer_record() -> None:
    data, q = dense(N), random_q(12)
    long = SnapKV(6).score(view(SnapKV(), data, queries=q), memory())
    short = SnapKV(6).score(view(SnapKV(), data, queries=q[:, -6:]), memory())
    torch.testing.assert_close(long, short)


def test_snapkv_keeps_its_window_inside_the_budget() -> None:
    shown = view(SnapKV(), dense(N), queries=random_q(6))
    for row in kept(SnapKV(6), shown, 10):
        assert len(row) == 10 and set(range(N - 6, N)) <= set(row)


@pytest.mark.parametrize("budget", [5, 6])
def test_snapkv_refuses_a_budget_that_its_window_fills(budget: int) -> None:
    shown = view(SnapKV(), dense(N), queries=random_q(6))
    with pytest.raises(BudgetError, match="window=6"):
        kept(SnapKV(6), shown, budget)


def test_snapkv_window_of_the_whole_context_is_refused_unless_all_is_kept() -> None:
    shown = view(SnapKV(), dense(8), queries=random_q(8))
    with pytest.raises(BudgetError, match="nothing is left to choose"):
        kept(SnapKV(64), shown, 4)
    assert kept(SnapKV(64), shown, 8) == [list(range(8))] * 2


def test_snapkv_refuses_a_record_shorter_than_its_window() -> None:
    with pytest.raises(EvidenceMissing, match="last 6 queries of layer 0, there are 3"):
        SnapKV(6).score(view(SnapKV(), dense(N), queries=random_q(3)), memory())


def test_attention_scorers_need_recorded_queries() -> None:
    with pytest.raises(EvidenceMissing, match="snapkv"):
        SnapKV(6).score(view(SnapKV(), dense(N)), memory())


def test_tova_is_the_last_query_mean_over_all_heads_and_one_set_for_all() -> None:
    data, q = dense(N), random_q(1)
    score = Tova().score(view(Tova(), data, queries=q), memory()).numpy()
    expected = rows_of(q, data, [N - 1])[:, 0, : N - 1].mean(axis=0)
    np.testing.assert_allclose(score[:, : N - 1], np.stack([expected] * KV_HEADS), rtol=1e-6)
    assert (score[:, -1] > expected.max()).all()
    first, second = kept(Tova(), view(Tova(), data, queries=q), 7)
    assert first == second and N - 1 in first


def test_tova_agrees_by_position_where_heads_are_ragged() -> None:
    data, q = dense(8), random_q(1)
    shown = view(Tova(), ragged(data, [[0, 2, 5, 7], [2, 3, 7]]), queries=q, length=8)
    score = Tova().score(shown, memory())
    rows = [
        attention_oracle(q[h], data.k[h // GROUP, [[0, 2, 5, 7], [2, 3, 7]][h // GROUP]], [7], [0] * 4, DIM**-0.5)[0]
        for h in range(Q_HEADS)
    ]
    both = (rows[0][1] + rows[1][1] + rows[2][0] + rows[3][0]) / 4
    assert float(score[0, 1]) == pytest.approx(both) and float(score[1, 0]) == pytest.approx(both)
    assert float(score[0, 0]) == pytest.approx((rows[0][0] + rows[1][0]) / 4)


def test_keydiff_is_the_negative_cosine_to_the_mean_direction() -> None:
    data = dense(N)
    score = KeyDiff().score(view(KeyDiff(), data), memory()).numpy()
    for head, keys in enumerate(data.k.numpy()):
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        anchor = unit.mean(axis=0)
        np.testing.assert_allclose(score[head], -(unit @ anchor) / np.linalg.norm(anchor), rtol=1e-6)


def test_keydiff_keeps_the_odd_one_out() -> None:
    keys = torch.tensor([[1.0, 0.0]] * 5 + [[0.0, 1.0]] + [[1.0, 0.1]] * 2)[None]
    shown = view(KeyDiff(), LayerData.dense(keys, keys))
    assert 5 in kept(KeyDiff(), shown, 1)[0]


def test_knorm_keeps_the_smallest_keys() -> None:
    keys = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0, 2.0])[None, :, None] * torch.ones(1, 1, 4)
    shown = view(KeyNorm(), LayerData.dense(keys, keys))
    assert kept(KeyNorm(), shown, 3) == [[1, 3, 5]]
    assert KeyNorm().score(shown, memory())[0].tolist() == [-6.0, -2.0, -8.0, -3.0, -18.0, -4.0]


@pytest.mark.parametrize(
    "n, sink, budget, expected", [(8, 2, 4, [0, 1, 6, 7]), (8, 0, 3, [5, 6, 7]), (6, 4, 5, [0, 1, 2, 3, 5])]
)
def test_streaming_keeps_sinks_and_the_most_recent(n: int, sink: int, budget: int, expected: list[int]) -> None:
    assert kept(Streaming(sink), view(Streaming(), dense(n)), budget) == [expected] * 2


def test_streaming_refuses_a_budget_of_sinks_alone() -> None:
    with pytest.raises(BudgetError, match="sink=4"):
        kept(Streaming(), view(Streaming(), dense(8)), 4)


def test_recency_has_no_sinks_but_the_protected_ones() -> None:
    assert kept(Recency(), view(Recency(), dense(8)), 3) == [[5, 6, 7]] * 2
    assert kept(Recency(), view(Recency(), dense(8), sink=1), 3) == [[0, 6, 7]] * 2


def test_random_is_seeded_and_independent_per_head_and_layer() -> None:
    mem, shown = memory(3), view(Random(), dense(400))
    first, second = Random().score(shown, mem), Random().score(shown, mem)
    torch.testing.assert_close(Random().score(shown, memory(3)), first)
    for a, b in ((first[0], first[1]), (first[0], second[0])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.2


def test_hindsight_sums_the_mass_of_all_future_queries() -> None:
    data, q = dense(N), random_q(5, seed=7)
    future = (q, torch.arange(N, N + 5))
    expected = rows_of(q, data, list(range(N, N + 5))).sum(axis=1).reshape(KV_HEADS, GROUP, N).sum(axis=1)
    score = Hindsight().score(view(Hindsight(), data, future=future), memory())
    np.testing.assert_allclose(score.numpy(), expected, rtol=1e-6)


def test_only_hindsight_may_see_the_future() -> None:
    shown = view(SnapKV(), dense(N), future=(random_q(2), torch.arange(N, N + 2)))
    with pytest.raises(EvidenceMissing, match="future_queries"):
        shown.future_queries()


SCORERS: list[Policy] = [Random(), Recency(), Streaming(2), SnapKV(3, 3), KeyDiff(), KeyNorm(), Tova(), Hindsight()]


def shown_to(policy: Policy, data: LayerData, **more: Any) -> LayerView:
    return view(policy, data, queries=random_q(3), future=(random_q(2), torch.arange(50, 52)), **more)


@pytest.mark.parametrize("policy", SCORERS, ids=lambda p: p.card.name)
class TestEveryScorer:
    def test_keeps_exactly_the_budget_and_all_that_is_protected(self, policy: Policy) -> None:
        for row in kept(policy, shown_to(policy, dense(N), sink=2, recent=4), 9):
            assert len(row) == 9 and {0, 1, 20, 21, 22, 23} <= set(row)

    @pytest.mark.parametrize("budget", [N, N + 5])
    def test_asks_for_nothing_at_or_above_the_length(self, policy: Policy, budget: int) -> None:
        shown = shown_to(policy, dense(N))
        decision = policy.decide(cache(shown), {0: policy.score(shown, memory())}, memory(), allowance(budget, N))
        assert decision.empty

    def test_ignores_poisoned_padding_of_ragged_heads(self, policy: Policy) -> None:
        rows = [[0, 1, 3, 4, 6, 9, 10, 11], [0, 5, 9, 10, 11]]
        shown = shown_to(policy, ragged(dense(12), rows), length=12)
        for row, mine in zip(kept(policy, shown, 6), rows, strict=True):
            assert len(row) == min(6, len(mine)) and set(row) <= set(mine)

    def test_touches_only_what_its_card_declares(self, policy: Policy) -> None:
        meter = Meter(2.0)
        policy.score(shown_to(policy, dense(N), meter=meter), memory())
        scans_keys = bool(policy.card.evidence)
        assert meter.touched == ({"keys": KV_HEADS * N * DIM * 2.0} if scans_keys else {})


def test_dense_edits_and_selects_nothing() -> None:
    assert not (Dense().writes_decide or Dense().writes_read or Dense().card.budgets)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(BudgetError, match="more than 0"):
        Budget("keep_tokens", 0)
    with pytest.raises(BudgetError, match="leaves none"):
        Allowance.resolve(Budget("keep_tokens", 0.1), 5, Protection(0, 0))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SnapKV(window=0), "window=0, must be at least 1"),
        (lambda: SnapKV(kernel=4), "kernel=4, must be odd"),
        (lambda: Streaming(sink=-1), "sink=-1, must be at least 0"),
    ],
)
def test_wrong_parameters_are_refused_when_the_policy_is_made(make: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make()  # type: ignore[operator]


def test_softcap_and_scale_of_the_layer_enter_the_attention() -> None:
    data, q = dense(6), random_q(1)
    capped = layer(softcap=0.5)
    score = Tova().score(view(Tova(), data, of=capped, queries=q), memory()).numpy()
    rows = []
    for head in range(Q_HEADS):
        logits = np.tanh(q[head].numpy() @ data.k[head // GROUP].numpy().T * DIM**-0.5 / 0.5) * 0.5
        rows.append(np.exp(logits[0]) / np.exp(logits[0]).sum())
    np.testing.assert_allclose(score[0, :5], np.mean(rows, axis=0)[:5], rtol=1e-6)
