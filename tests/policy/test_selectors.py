"""Quest and exact mass: bounds, budgets, what is always read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvassay.cache.data import LayerData
from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.policy import quest
from kvassay.policy.base import Policy
from kvassay.policy.exact_mass import ExactMass
from kvassay.policy.knorm import KeyNorm
from kvassay.policy.quest import Quest
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import BlockView, LayerView, Meter
from tests.policy.build import DIM, KV_HEADS, Q_HEADS, allowance, dense, layer, memory, ragged, random_q, view

BLOCK = 4


def summaries(policy: Quest, data: LayerData, block_size: int = BLOCK) -> dict[str, torch.Tensor]:
    full = data.k.shape[1] // block_size
    blocks = data.k[:, : full * block_size].unflatten(1, (full, block_size)).transpose(0, 1)
    return dict(policy.summarize(BlockView(layer(), blocks, blocks)))


def ask(
    policy: Policy, shown: LayerView, query: torch.Tensor, tokens: int, context: int, sink: int = 0, recent: int = 0
) -> ReadSet | None:
    return policy.read(shown, query, memory(), allowance(tokens, context, sink, recent, "read_tokens"), None)


def quest_view(policy: Quest, data: LayerData, index: int = 5, block_size: int = BLOCK, **more: object) -> LayerView:
    side = summaries(policy, data, block_size)
    return view(policy, data, of=layer(index), side=side, block_size=block_size, **more)  # type: ignore[arg-type]


class TestQuest:
    @settings(deadline=None, max_examples=60)
    @given(
        keys=hnp.arrays(np.float64, (KV_HEADS, 12, DIM), elements=st.floats(-300, 300, width=32)),
        query=hnp.arrays(np.float64, (Q_HEADS, 2, DIM), elements=st.floats(-50, 50, width=32)),
    )
    def test_the_bound_is_never_below_a_logit_of_the_page(self, keys: np.ndarray, query: np.ndarray) -> None:
        policy = Quest(block=BLOCK, heads="q")
        data = LayerData.dense(torch.from_numpy(keys), torch.from_numpy(keys))
        bound = policy.bounds(quest_view(policy, data), torch.from_numpy(query).float()).double().numpy()
        logits = np.einsum("hqd,hnd->hqn", query, np.repeat(keys, Q_HEADS // KV_HEADS, axis=0))
        best = logits.reshape(Q_HEADS, 2, 3, BLOCK).max(axis=-1)
        slack = 1e-5 * np.abs(query).sum() * np.abs(keys).max() + 1e-30  # subnormal products vanish in float32
        assert (bound >= best - slack).all()

    @pytest.mark.parametrize("together", [2, 4096])
    def test_bounds_equal_the_definition(self, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quest, "TOGETHER", together)
        policy, data, q = Quest(block=BLOCK, heads="q"), dense(12), random_q(1)
        bound = policy.bounds(quest_view(policy, data), q.float()).numpy()
        for head in range(Q_HEADS):
            for page in range(3):
                keys = data.k[head // 2, page * BLOCK : (page + 1) * BLOCK].numpy()
                products = np.maximum(q[head, 0].numpy() * keys.min(axis=0), q[head, 0].numpy() * keys.max(axis=0))
                assert bound[head, 0, page] == pytest.approx(products.sum(), rel=2e-3)

    def test_side_data_is_float16_rounded_outwards_and_exact_where_it_can_be(self) -> None:
        data = LayerData.dense(torch.tensor([[[1.0], [0.1], [-0.1], [0.5]]]), torch.zeros(1, 4, 1))
        side = summaries(Quest(), data)
        assert side["high"].dtype is torch.float16 and side["high"].item() == 1.0
        assert -0.1001 < side["low"].item() <= -0.1

    @pytest.mark.parametrize("heads, expected", [("max", [0, 3]), ("sum", [1, 3])])
    def test_query_heads_of_a_kv_head_choose_by_max_or_sum(self, heads: str, expected: list[int]) -> None:
        keys = torch.zeros(1, 16, 2)
        keys[0, 0] = torch.tensor([5.0, 0.0])  # page 0: bounds 5 and 0
        keys[0, 4] = torch.tensor([4.0, 4.0])  # page 1: bounds 4 and 4
        policy = Quest(block=BLOCK, heads=heads, dense_layers=0)  # type: ignore[arg-type]
        shown = view(
            policy,
            LayerData.dense(keys, keys),
            of=layer(q_heads=2, kv_heads=1, dim=2),
            side=summaries(policy, LayerData.dense(keys, keys)),
            block_size=BLOCK,
        )
        query = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        chosen = ask(policy, shown, query, 8, 16)
        assert chosen is not None and sorted(chosen.index.flatten().tolist()) == expected  # 3 holds the newest token

    def test_reads_exactly_the_budget_with_sinks_recent_and_the_filling_page_inside(self) -> None:
        policy = Quest(block=BLOCK)
        data = dense(42)  # ten full pages and two tokens of the eleventh
        shown = quest_view(policy, data, sink=2, recent=5)
        chosen = ask(policy, shown, random_q(3).float(), 20, 42, sink=2, recent=5)
        assert chosen is not None and chosen.unit == BLOCK and list(chosen.index.shape) == [3, KV_HEADS, 5]
        for row in chosen.index.flatten(0, 1).tolist():
            assert len(set(row)) == 5 and {0, 9, 10} <= set(row)
        mask = chosen.mask(shown.slots, Q_HEADS)
        assert mask[:, :, :2].all() and mask[:, :, 37:].all()

    def test_picks_the_page_that_holds_the_matching_key(self) -> None:
        data = dense(40)
        keys = data.k.float() * 0.1
        keys[1, 22] = 10.0
        policy = Quest(block=BLOCK)
        shown = quest_view(policy, LayerData.dense(keys, keys))
        chosen = ask(policy, shown, torch.ones(Q_HEADS, 1, DIM), 8, 40)
        assert chosen is not None and sorted(chosen.index[0, 1].tolist()) == [5, 9]

    def test_per_query_head_sets_read_more_than_the_budget_and_have_that_shape(self) -> None:
        policy = Quest(block=BLOCK, heads="q")
        chosen = ask(policy, quest_view(policy, dense(40)), random_q(1).float(), 12, 40)
        assert chosen is not None and list(chosen.index.shape) == [1, Q_HEADS, 3]

    def test_pages_may_be_several_cache_blocks(self) -> None:
        policy, q = Quest(block=8, heads="q"), random_q(1).float()
        data = dense(20)  # five blocks of 4: two whole pages of 8, half a third
        shown = quest_view(policy, data)
        coarse = Quest(block=8, heads="q").bounds(quest_view(policy, data, block_size=8), q)
        torch.testing.assert_close(policy.bounds(shown, q), coarse)
        chosen = ask(policy, shown, q, 16, 20)
        assert chosen is not None and (chosen.index == 2).any(-1).all()

    def test_a_page_must_be_whole_cache_blocks(self) -> None:
        policy = Quest(block=6, dense_layers=0)
        with pytest.raises(PolicyError, match="multiple of the cache's block size 4"):
            ask(policy, quest_view(policy, dense(40)), random_q(1), 18, 40)

    @pytest.mark.parametrize("index, reads_all", [(0, True), (1, True), (2, False)])
    def test_the_first_layers_stay_dense(self, index: int, reads_all: bool) -> None:
        policy = Quest(block=BLOCK)
        chosen = ask(policy, quest_view(policy, dense(40), index=index), random_q(1).float(), 12, 40)
        assert (chosen is None) is reads_all

    @pytest.mark.parametrize("tokens, context", [(40, 40), (50, 50)])
    def test_a_budget_that_covers_the_context_reads_all(self, tokens: int, context: int) -> None:
        policy = Quest(block=BLOCK)
        assert ask(policy, quest_view(policy, dense(40)), random_q(1).float(), tokens, context) is None

    def test_a_budget_that_protection_fills_is_refused_whatever_the_alignment(self) -> None:
        policy = Quest(block=BLOCK)
        for n in range(40, 45):  # recent 5 touches two or three pages, sink one
            with pytest.raises(BudgetError, match=r"3 blocks of 4.*up to 4"):
                ask(policy, quest_view(policy, dense(n), sink=2, recent=6), random_q(1).float(), 12, n, 2, 6)

    def test_scanning_the_bounds_is_charged_in_float16(self) -> None:
        meter, policy = Meter(2.0), Quest(block=BLOCK)
        ask(policy, quest_view(policy, dense(40), meter=meter), random_q(1).float(), 12, 40)
        side = 10 * KV_HEADS * DIM * 2.0
        assert meter.touched == {"side:low": side, "side:high": side}


class TestExactMass:
    def oracle(self, data: LayerData, q: torch.Tensor) -> np.ndarray:
        rows = []
        for head in range(Q_HEADS):
            logits = q[head, 0].numpy() @ data.k[head // 2].numpy().T * DIM**-0.5
            rows.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
        return np.stack(rows)

    def test_takes_the_highest_summed_mass_per_kv_head(self) -> None:
        data, q = dense(20), random_q(1)
        chosen = ask(ExactMass(), view(ExactMass(), data), q, 5, 20)
        mass = self.oracle(data, q).reshape(KV_HEADS, 2, 20).sum(axis=1)
        assert chosen is not None and chosen.unit == 1
        for head in range(KV_HEADS):
            assert sorted(chosen.index[0, head].tolist()) == sorted(np.argsort(-mass[head])[:5].tolist())

    def test_per_query_head_sets(self) -> None:
        data, q = dense(20), random_q(1)
        chosen = ask(ExactMass("q"), view(ExactMass("q"), data), q, 5, 20)
        assert chosen is not None
        for head, mass in enumerate(self.oracle(data, q)):
            assert sorted(chosen.index[0, head].tolist()) == sorted(np.argsort(-mass)[:5].tolist())

    def test_protected_tokens_come_first_and_count(self) -> None:
        chosen = ask(ExactMass(), view(ExactMass(), dense(20), sink=2, recent=3), random_q(1), 6, 20, 2, 3)
        assert chosen is not None
        for row in chosen.index[0].tolist():
            assert len(set(row)) == 6 and {0, 1, 17, 18, 19} <= set(row)

    def test_each_of_several_queries_is_causal(self) -> None:
        data, q = dense(20), random_q(3)
        chosen = ask(ExactMass(), view(ExactMass(), data), q, 18, 20)
        assert chosen is not None
        assert 18 not in chosen.index[0, 0].tolist() or 19 not in chosen.index[0, 0].tolist()
        alone = ask(ExactMass(), view(ExactMass(), data), q[:, 2:], 18, 20)
        assert alone is not None
        assert sorted(chosen.index[2, 0].tolist()) == sorted(alone.index[0, 0].tolist())

    def test_padding_of_ragged_heads_is_never_read(self) -> None:
        rows = [[0, 1, 3, 4, 6, 9, 10, 11], [0, 5, 11]]
        shown = view(ExactMass(), ragged(dense(12), rows), length=12)
        chosen = ask(ExactMass(), shown, random_q(1), 5, 12)
        assert chosen is not None
        assert sorted(chosen.index[0, 1].tolist()) == [-1, -1, 0, 5, 11]
        assert set(chosen.index[0, 0].tolist()) <= set(rows[0])

    def test_reads_all_when_the_budget_covers_it_and_charges_the_scan_otherwise(self) -> None:
        meter = Meter(2.0)
        assert ask(ExactMass(), view(ExactMass(), dense(20), meter=meter), random_q(1), 20, 20) is None
        assert meter.touched == {}
        ask(ExactMass(), view(ExactMass(), dense(20), meter=meter), random_q(1), 5, 20)
        assert meter.touched == {"keys": KV_HEADS * 20 * DIM * 2.0}

    def test_this_steps_query_must_be_declared(self) -> None:
        with pytest.raises(EvidenceMissing, match="query"):
            ask(ExactMass(), view(KeyNorm(), dense(20)), random_q(1), 5, 20)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (torch.full((KV_HEADS, 1, 9), torch.nan), "ranked blocks of layer 5 NaN"),
        (
            torch.zeros(KV_HEADS, 1, 12),
            rf"shape \[{KV_HEADS}, 1, 12\], \[{KV_HEADS} or {Q_HEADS}, 1, at most 10\] needed",
        ),
        (torch.zeros(KV_HEADS, 2, 9), r"1, at most 10\] needed"),
        (torch.zeros(KV_HEADS, 9), r"1, at most 10\] needed"),
        (torch.zeros(KV_HEADS, 1, 9, dtype=torch.long), "ranked layer 5 in torch.int64, floating point needed"),
    ],
)
def test_ranks_are_checked_as_scores_are(ranks: torch.Tensor, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Quest(block=BLOCK)
    monkeypatch.setattr(Quest, "ranks", lambda *_: ranks)
    with pytest.raises(PolicyError, match=message):
        ask(policy, quest_view(policy, dense(40)), random_q(1), 16, 40)
