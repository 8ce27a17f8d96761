"""H2O, PyramidKV, Ada-SnapKV, expected attention, R-KV, ThinK and int8 against their definitions, written again."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.rope import rotate
from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.layout.model import Layer, Rope
from kvassay.policy.adakv import AdaSnapKV
from kvassay.policy.base import Policy, top_k_mask
from kvassay.policy.checks import LONGEST_QUADRATIC
from kvassay.policy.expected_attention import ExpectedAttention
from kvassay.policy.h2o import H2O
from kvassay.policy.int8 import Int8
from kvassay.policy.pyramidkv import PyramidKV
from kvassay.policy.r_kv import RKV
from kvassay.policy.registry import make
from kvassay.policy.snapkv import SnapKV
from kvassay.policy.think import ThinK
from kvassay.policy.views import LayerView
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
    random_kv,
    random_q,
    view,
)
from tests.policy.paged import Run

N, GROUP = 24, Q_HEADS // KV_HEADS


def rows_of(q: Tensor, data: LayerData, first: int = 0) -> np.ndarray:
    """Attention rows [q_heads, queries, tokens] of queries at `first` and on."""
    at, tokens = list(range(first, first + q.shape[1])), list(range(data.k.shape[1]))
    return np.stack([attention_oracle(q[h], data.k[h // GROUP], at, tokens, DIM**-0.5) for h in range(Q_HEADS)])


class TestH2O:
    def test_the_score_is_the_attention_of_all_queries_summed(self) -> None:
        data, q = dense(N), random_q(N)
        score = H2O().score(view(H2O(), data, queries=q), memory()).numpy()
        expected = rows_of(q, data).sum(1).reshape(KV_HEADS, GROUP, N).sum(1)
        np.testing.assert_allclose(score, expected, rtol=1e-6)

    def test_half_the_budget_is_recent_and_the_rest_heavy(self) -> None:
        data, q = dense(N), random_q(N)
        score = rows_of(q, data).sum(1).reshape(KV_HEADS, GROUP, N).sum(1)
        for head, row in enumerate(kept(H2O(), view(H2O(), data, queries=q), 10)):
            heavy = sorted(np.argsort(-score[head, : N - 5])[:5].tolist())
            assert row == [*heavy, *range(N - 5, N)]

    def test_a_record_of_the_tail_alone_is_refused(self) -> None:
        with pytest.raises(EvidenceMissing, match=r"all 24 tokens of layer 0, the trace holds the last 6.*--q-tail 24"):
            H2O().score(view(H2O(), dense(N), queries=random_q(6)), memory())

    def test_a_context_too_long_to_score_is_refused_with_the_work(self) -> None:
        shown = view(H2O(), dense(N), queries=random_q(N), length=LONGEST_QUADRATIC + 1)
        says = r"other \(about 6\.9e\+10 multiply-adds\), per layer at 65537 tokens; run on up to 65536"
        with pytest.raises(PolicyError, match=says):
            H2O().score(shown, memory())


class TestPyramidKV:
    def test_budgets_fall_evenly_and_average_to_the_budget(self) -> None:
        policy = PyramidKV(window=8, beta=20)
        budgets = [policy.layer_budget(i, 30, 2000, 400, 8) for i in range(30)]
        assert budgets[0] == 780 and budgets[-1] == 20  # 400 * (2 - 1/20), 400 / 20
        assert all(a - b in (26, 27) for a, b in itertools.pairwise(budgets))
        assert sum(budgets) / 30 == pytest.approx(400, abs=0.5)

    def test_the_first_layer_never_gets_more_than_there_is(self) -> None:
        policy = PyramidKV(window=8)
        budgets = [policy.layer_budget(i, 5, 100, 60, 8) for i in range(5)]
        assert budgets == [92, 76, 60, 44, 28]

    @pytest.mark.parametrize("layers, mean", [(1, 60), (5, 12)])
    def test_where_no_pyramid_fits_every_layer_gets_the_mean(self, layers: int, mean: int) -> None:
        assert PyramidKV(window=8).layer_budget(0, layers, 1000, mean, 8) == mean

    def test_a_lower_layer_keeps_more(self) -> None:
        policy, q = PyramidKV(window=2, beta=4), random_q(N)
        views = [view(policy, dense(N, seed=i), of=layer(i), queries=q) for i in (3, 5, 9)]
        scores = {v.index: policy.score(v, memory()) for v in views}
        edits = policy.decide(cache(*views), scores, memory(), allowance(8, N)).edits
        assert [int(edits[i][0].keep.sum(1).max()) for i in (3, 5, 9)] == [14, 8, 2]


class TestAdaSnapKV:
    def test_heads_compete_for_the_layers_budget_above_their_floor(self) -> None:
        policy, data, q = AdaSnapKV(window=2, floor=0.5), dense(N), random_q(N)
        shown = view(policy, data, queries=q)
        score = policy.score(shown, memory()).numpy()
        expected = np.zeros((KV_HEADS, N), dtype=bool)
        for head in range(KV_HEADS):
            expected[head, np.argsort(-score[head], kind="stable")[:4]] = True  # half of 8
        rest = sorted((-score[h, t], h, t) for h in range(KV_HEADS) for t in range(N) if not expected[h, t])
        for _, head, token in rest[: 2 * 8 - 2 * 4]:
            expected[head, token] = True
        assert kept(policy, shown, 8) == [np.flatnonzero(row).tolist() for row in expected]

    def test_with_the_whole_budget_as_floor_it_is_snapkv(self) -> None:
        data, q = dense(N), random_q(N)
        alike = kept(AdaSnapKV(window=2, floor=1.0), view(AdaSnapKV(), data, queries=q), 8)
        assert alike == kept(SnapKV(window=2), view(SnapKV(), data, queries=q), 8)

    def test_a_head_of_flat_attention_gets_more_than_a_peaked_one(self) -> None:
        keys = torch.zeros(2, N, DIM)
        keys[0, 3] = 40.0  # head 0 looks at one token alone
        q = torch.ones(Q_HEADS, 4, DIM)
        policy = AdaSnapKV(window=4, kernel=1)
        rows = kept(policy, view(policy, LayerData.dense(keys, keys), queries=q), 10)
        assert len(rows[0]) < 10 < len(rows[1]) and len(rows[0]) + len(rows[1]) == 20 and 3 in rows[0]


class TestExpectedAttention:
    ROPE = Rope(theta=100.0, dims=DIM)

    def test_the_score_is_that_of_the_averaged_rotation(self) -> None:
        """Against the definition in explicit matrices: R averaged over positions, mean R', R cov R'."""
        future, skip = 6, 2
        policy = ExpectedAttention(future, skip)
        data, raw = dense(N), random_q(N)
        of = Layer(0, Q_HEADS, layer().components, scale=DIM**-0.5, rope=self.ROPE)
        q = rotate(raw, torch.arange(N), self.ROPE)
        score = policy.score(view(policy, data, of=of, queries=q), memory()).numpy()

        half = DIM // 2
        rotation = np.zeros((DIM, DIM))
        for position in range(N, N + future):
            for i in range(half):
                angle = position * 100.0 ** (-2 * i / DIM)
                c, s = math.cos(angle) / future, math.sin(angle) / future
                rotation[i, i] += c
                rotation[i + half, i + half] += c
                rotation[i, i + half] -= s
                rotation[i + half, i] += s
        expected = np.zeros((KV_HEADS, N))
        for head in range(Q_HEADS):
            rows = raw[head, skip:].numpy()
            mean = rotation @ rows.mean(0)
            centred = rows - rows.mean(0)
            covariance = rotation @ (centred.T @ centred / len(rows)) @ rotation.T
            keys = data.k[head // GROUP, skip:].numpy()
            logit = keys @ mean / math.sqrt(DIM) + np.einsum("ni,ij,nj->n", keys, covariance, keys) / DIM / 2
            weight = np.exp(logit - logit.max())
            expected[head // GROUP, skip:] += weight / weight.sum() / GROUP
        expected *= np.linalg.norm(data.v.numpy(), axis=-1)
        np.testing.assert_allclose(score[:, skip:], expected[:, skip:], rtol=1e-4)
        assert (score[:, :skip] > score[:, skip:].max()).all()

    def test_it_needs_every_query_after_the_first_few(self) -> None:
        policy = ExpectedAttention(skip=4)
        policy.score(view(policy, dense(N), queries=random_q(N - 4)), memory())
        with pytest.raises(EvidenceMissing, match="the trace holds the last 19"):
            policy.score(view(policy, dense(N), queries=random_q(N - 5)), memory())


class TestRKV:
    def redundancy(self, keys: np.ndarray, similar: float) -> np.ndarray:
        unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        cosine = unit @ unit.T
        np.fill_diagonal(cosine, 0.0)
        for row in range(len(keys)):
            alike = np.flatnonzero(cosine[row] > similar)
            if len(alike):
                cosine[row, alike[-1]] = 0.0
        mean = cosine.mean(axis=0)
        return np.exp(mean) / np.exp(mean).sum()

    def test_the_score_weighs_importance_against_redundancy(self) -> None:
        policy, data, q = RKV(window=4, kernel=3, balance=0.3, similar=0.4), dense(N), random_q(4)
        score = policy.score(view(policy, data, queries=q), memory()).numpy()
        rows = rows_of(q, data, N - 4).mean(1).reshape(KV_HEADS, GROUP, N).max(1)
        rows[:, N - 4 :] = 0
        pooled = np.stack([rows[:, max(0, t - 1) : t + 2].max(1) for t in range(N)], axis=1)
        redundant = np.stack([self.redundancy(k.numpy(), 0.4) for k in data.k])
        np.testing.assert_allclose(score[:, : N - 4], (0.3 * pooled - 0.7 * redundant)[:, : N - 4], rtol=1e-6)
        assert (score[:, N - 4 :] > score[:, : N - 4].max()).all()

    def test_rows_in_chunks_come_to_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy, shown = RKV(similar=0.2), view(RKV(), dense(N))
        whole = policy.redundancy(shown)
        monkeypatch.setattr("kvassay.policy.r_kv.COSINES", 5 * KV_HEADS * N)
        torch.testing.assert_close(policy.redundancy(shown), whole)

    def test_of_copies_the_last_stays(self) -> None:
        keys = torch.eye(8).repeat(1, 1)[None].repeat(2, 1, 1)
        keys[:, 1] = keys[:, 2] = keys[:, 5] = keys[:, 0]  # 0, 1, 2 and 5 are one key
        policy = RKV(window=1, balance=0.0)
        q = torch.zeros(Q_HEADS, 1, 8)
        assert kept(policy, view(policy, LayerData.dense(keys, keys), queries=q), 5) == [[3, 4, 5, 6, 7]] * 2

    def test_ragged_heads_are_scored_over_what_they_hold(self) -> None:
        data = dense(8)
        policy = RKV(window=1, balance=0.0)
        shown = view(policy, ragged(data, [[0, 2, 5, 7], [2, 3, 7]]), queries=random_q(1), length=8)
        redundant = policy.redundancy(shown).numpy()
        np.testing.assert_allclose(redundant[1, :3], self.redundancy(data.k[1, [2, 3, 7]].numpy(), 0.5), rtol=1e-6)
        assert redundant[1, 3] == 0


class TestThinK:
    def test_the_least_asked_channels_go(self) -> None:
        policy, data, q = ThinK(prune=0.5, window=4, residual=0), dense(N), random_q(4)
        found = policy.kept_channels(view(policy, data, queries=q))
        for head in range(KV_HEADS):
            asked = (q[head * GROUP : (head + 1) * GROUP].numpy() ** 2).mean(axis=(0, 1))
            weight = asked * (data.k[head].numpy() ** 2).mean(axis=0)
            assert set(np.flatnonzero(found[head].numpy())) == set(np.argsort(weight)[DIM // 2 :])

    def test_pruned_channels_are_zero_the_rest_untouched_and_the_bytes_gone(self) -> None:
        k, v = (x.float() for x in random_kv(N, 0, 2, 32))
        policy = ThinK(prune=0.25, window=4, residual=8)
        run = Run(policy, layer(dim=32), k, v, queries=random_q(N, dim=32).float())
        run.prefill(N)
        assert run.encoded == list(range(N - 8))
        channels = policy.kept_channels(view(policy, LayerData.dense(k, v), of=layer(dim=32), queries=run.queries))
        expected = torch.where(channels[:, None], k[:, : N - 8], 0.0)
        torch.testing.assert_close(run.data.k[:, : N - 8], expected)
        assert torch.equal(run.data.k[:, N - 8 :], k[:, N - 8 :]) and torch.equal(run.data.v, v)
        assert run.coded_bytes(2.0) == 2 * ((N - 8) * (24 + 32) * 2 + 4 * 24)  # and an index per kept channel


class TestInt8:
    def test_every_token_has_one_scale_per_head_and_an_error_of_half_a_step(self) -> None:
        k, v = (x.float() for x in random_kv(40, 0, 2, 32))
        run = Run(Int8(), layer(dim=32), k, v)
        run.prefill(39)
        run.step()
        assert run.encoded == list(range(40))
        for side, true in ((run.data.k, k), (run.data.v, v)):
            step = (true.amax(-1) - true.amin(-1)) / 255
            assert bool(((side - true).abs().amax(-1) <= 0.51 * step + 0.002).all())
        assert run.coded_bytes(2.0) == 2 * 40 * 2 * (32 + 4)


@pytest.mark.parametrize(
    "text, message",
    [
        ("h2o", "recent=1.0"),
        ("adakv-snapkv", "floor=1.5"),
        ("r-kv", "balance=2.0"),
        ("think", "prune=1.0"),
        ("pyramidkv", "beta=0, must be at least 1"),
    ],
)
def test_parameters_out_of_range_are_refused(text: str, message: str) -> None:
    key, value = message.split(",")[0].split("=")
    with pytest.raises(PolicyError, match=message):
        make(text, **{key: value})


@pytest.mark.parametrize("policy, least", [(SnapKV(window=16), 16), (ThinK(window=8), 8), (RKV(window=4), 4)])
def test_a_recording_holds_as_many_queries_as_a_policy_says(policy: Policy, least: int) -> None:
    assert policy.queries_needed == least and H2O().queries_needed > LONGEST_QUADRATIC


class TestProtection:
    """A protected token stays under every arm, however the method shares its budget out."""

    SINK, RECENT = 3, 5

    def stays(self, keep: Tensor) -> bool:
        return bool(keep[..., : self.SINK].all()) and bool(keep[..., N - self.RECENT :].all())

    def views(self, policy: Policy, layers: int) -> list[LayerView]:
        q = random_q(N)
        return [
            view(policy, dense(N, seed=i), of=layer(i), queries=q, sink=self.SINK, recent=self.RECENT)
            for i in range(layers)
        ]

    @pytest.mark.parametrize(
        "policy",
        [
            PyramidKV(window=2, beta=20),
            PyramidKV(window=2, beta=2),
            AdaSnapKV(window=2, floor=0.1),
            AdaSnapKV(window=2, floor=1.0),
            H2O(recent=0.99),
            H2O(recent=0.0),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("tokens", [9, 12, 20])
    def test_it_stays_at_every_layer_inside_the_budget(self, policy: Policy, tokens: int) -> None:
        views = self.views(policy, 4)
        scores = {v.index: policy.score(v, memory()) for v in views}
        budget = allowance(tokens, N, self.SINK, self.RECENT)
        edits = policy.decide(cache(*views), scores, memory(), budget).edits
        kept = [edits[v.index][0].keep for v in views]
        assert all(self.stays(mask) for mask in kept)
        assert sum(int(mask.sum()) for mask in kept) <= 4 * KV_HEADS * tokens

    @pytest.mark.parametrize("keep", [0, 1, 7, 20, 39, 40, 60])
    def test_it_is_the_front_of_a_stable_sort_ties_and_dead_tokens_included(self, keep: int) -> None:
        rng = torch.Generator().manual_seed(keep)
        score = torch.randint(-3, 3, (5, 40), generator=rng).float()
        alive = torch.rand(5, 40, generator=rng) < 0.8
        forced = (torch.rand(5, 40, generator=rng) < 0.3) & (torch.arange(40) < keep)
        found = top_k_mask(score, alive, forced, keep)
        for row in range(5):
            live = [token for token in range(40) if alive[row, token]]
            order = sorted(live, key=lambda token: (not forced[row, token], -float(score[row, token]), token))
            assert found[row].nonzero().flatten().tolist() == sorted(order[:keep])

    def test_more_forced_tokens_than_may_be_kept_are_refused_not_dropped(self) -> None:
        score, alive = torch.zeros(2, 6), torch.ones(2, 6, dtype=torch.bool)
        forced = torch.tensor([[True] * 3 + [False] * 3, [False] * 6])
        assert top_k_mask(score, alive, forced, 3).sum(1).tolist() == [3, 3]
        with pytest.raises(BudgetError, match="2 tokens may be kept and 3 must be"):
            top_k_mask(score, alive, forced, 2)
