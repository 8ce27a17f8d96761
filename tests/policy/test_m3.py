"""MiniMax-M3's selection with stated scorers: exact mass, and index projections distilled from attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import Artefact, Memory
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.distill import fit_index
from kvassay.policy.indexers import m3_blocks
from kvassay.policy.m3 import M3ExactMass
from kvassay.policy.m3_distilled import M3Distilled
from kvassay.policy.views import BlockView, Meter
from kvassay.replay.arms import Arm
from kvassay.replay.open import open_loop
from tests.policy.build import DIM, KV_HEADS, allowance, dense, layer, memory, random_kv, random_q, view
from tests.replay import synthetic

BLOCK = 4


class TestExactMass:
    def read(self, policy: M3ExactMass, data: LayerData, q: Tensor, blocks: int) -> list[list[list[int]]]:
        shown = view(policy, data, of=layer(3))
        chosen = policy.read(shown, q, memory(), allowance(blocks * BLOCK, 999, unit="read_tokens"), None)
        assert chosen is not None and chosen.unit == BLOCK
        return [[sorted(row) for row in heads] for heads in chosen.index.tolist()]

    @pytest.mark.parametrize("pool", ["max", "sum"])
    def test_blocks_of_largest_mass_per_kv_head_beside_the_local_one(self, pool: str) -> None:
        data, q = dense(10 * BLOCK + 2), random_q(1) * 3
        found = self.read(M3ExactMass(block=BLOCK, pool=pool), data, q, 4)  # type: ignore[arg-type]
        for head in range(KV_HEADS):
            logits = np.einsum("gd,td->gt", q[2 * head : 2 * head + 2, 0].numpy(), data.k[head].numpy()) * DIM**-0.5
            share = np.exp(logits - logits.max(1, keepdims=True))
            share = (share / share.sum(1, keepdims=True)).mean(0)[: 10 * BLOCK].reshape(10, BLOCK)
            rank = share.max(1) if pool == "max" else share.sum(1)
            assert found[0][head] == sorted([10, *np.argsort(-rank)[:3].tolist()])

    def test_pools_differ_where_mass_is_spread(self) -> None:
        keys = torch.zeros(1, 4 * BLOCK, 2)
        keys[0, 1] = torch.tensor([4.0, 0])  # block 0: one strong token
        keys[0, BLOCK : 2 * BLOCK] = torch.tensor([3.0, 0])  # block 1: four of half its weight
        data, q = LayerData.dense(keys, keys), torch.tensor([[[1.0, 0.0]]])
        for pool, best in (("max", 0), ("sum", 1)):
            policy = M3ExactMass(block=BLOCK, dense_layers=0, pool=pool)  # type: ignore[arg-type]
            shown = view(policy, data, of=layer(q_heads=1, kv_heads=1, dim=2))
            chosen = policy.read(shown, q, memory(), allowance(2 * BLOCK, 99, unit="read_tokens"), None)
            assert chosen is not None and sorted(chosen.index.flatten().tolist()) == [best, 3]

    def test_init_and_local_blocks_count_inside(self) -> None:
        policy = M3ExactMass(block=BLOCK, init_blocks=2, local_blocks=2)
        for row in self.read(policy, dense(12 * BLOCK), random_q(1), 5)[0]:
            assert {0, 1, 10, 11} <= set(row) and len(set(row)) == 5
        with pytest.raises(BudgetError, match=r"3 blocks of 4.*up to 4"):
            self.read(policy, dense(12 * BLOCK), random_q(1), 3)

    def test_where_the_budget_holds_less_than_is_always_read_the_arm_is_left_out(self) -> None:
        policy = M3ExactMass(block=BLOCK, init_blocks=2, local_blocks=2)
        wants = {blocks: policy.not_applicable(999, 1010, self.budget(blocks)) for blocks in (3, 4, 5)}
        assert "12 tokens are 3 blocks of 4" in str(wants[3])
        assert wants[4] is None
        assert wants[5] is None

    @staticmethod
    def budget(blocks: int) -> Allowance:
        return allowance(blocks * BLOCK, 999, unit="read_tokens")

    def test_the_first_three_layers_read_everything(self) -> None:
        policy, budget = M3ExactMass(block=BLOCK), allowance(3 * BLOCK, 999, unit="read_tokens")
        read = [
            policy.read(view(policy, dense(10 * BLOCK), of=layer(i)), random_q(1), memory(), budget, None)
            for i in range(5)
        ]
        assert [chosen is None for chosen in read] == [True, True, True, False, False]

    def test_all_keys_are_charged(self) -> None:
        meter, policy = Meter(2.0), M3ExactMass(block=BLOCK)
        shown = view(policy, dense(40), of=layer(3), meter=meter)
        policy.read(shown, random_q(1), memory(), allowance(12, 999, unit="read_tokens"), None)
        assert meter.touched == {"keys": KV_HEADS * 40 * DIM * 2.0}


def identity_memory(dim: int, index: int = 5) -> Memory:
    """Index query: the head's own; index key: the first KV head's."""
    key = torch.cat([torch.eye(dim), torch.zeros(dim, dim)], 1)
    return Memory(artefact=Artefact({f"layer{index}.query": torch.eye(dim).repeat(2, 1, 1), f"layer{index}.key": key}))


class TestDistilled:
    @pytest.mark.parametrize("size", [BLOCK, 2])
    @pytest.mark.parametrize("tokens", [37, 40, 41])
    def test_reads_the_blocks_that_m3s_rule_names(self, size: int, tokens: int) -> None:
        keys = random_kv(tokens)[0][:1].float().to(torch.bfloat16).float().repeat(2, 1, 1)
        data, q = LayerData.dense(keys, keys), random_q(1, q_heads=2).float()
        policy, mine = M3Distilled(block=BLOCK, index_dim=DIM), identity_memory(DIM)
        full, of = (tokens - 1) // size, layer(5, q_heads=2)
        blocks = keys[:, : full * size].unflatten(1, (full, size)).transpose(0, 1)
        assert mine.artefact is not None
        side = policy.summarize(BlockView(of, blocks, blocks, mine.artefact.tensors))
        shown = view(policy, data, of=of, side=side, block_size=size)
        chosen = policy.read(shown, q, mine, allowance(4 * BLOCK, 999, unit="read_tokens"), None)
        expected = m3_blocks(q, keys[0], torch.tensor([tokens - 1]), block=BLOCK, topk=4)
        assert chosen is not None
        assert chosen.index.sort(-1).values.tolist() == expected.sort(-1).values.tolist()

    def test_one_bfloat16_index_key_per_token_is_held_and_scanned(self) -> None:
        policy, mine, meter, of = M3Distilled(block=BLOCK, index_dim=DIM), identity_memory(DIM), Meter(2.0), layer(5)
        blocks = dense(40).k.unflatten(1, (10, BLOCK)).transpose(0, 1)
        assert mine.artefact is not None
        side = policy.summarize(BlockView(of, blocks, blocks, mine.artefact.tensors))
        assert {n: t.nbytes for n, t in side.items()} == {"index_key": 40 * DIM * 2}
        wide = {"layer5.query": torch.ones(2, DIM, 2 * DIM)}
        shown = view(policy, dense(40), of=of, side=side, block_size=BLOCK, meter=meter)
        policy.read(shown, random_q(1), Memory(artefact=Artefact(wide)), allowance(12, 999, unit="read_tokens"), None)
        assert meter.touched == {"side:index_key": 40 * DIM * 2.0}

    def test_nothing_is_kept_for_dense_layers(self) -> None:
        side = M3Distilled().summarize(BlockView(layer(2), torch.ones(3, 2, 16, 8), torch.ones(3, 2, 16, 8)))
        assert side["index_key"].nbytes == 0 and len(side["index_key"]) == 3

    def test_unfitted_it_says_so(self) -> None:
        with pytest.raises(PolicyError, match=r"'layer7\.key'.*calibration trace first"):
            M3Distilled().summarize(BlockView(layer(7), torch.ones(3, 2, 16, 8), torch.ones(3, 2, 16, 8)))

    def test_fitted_on_one_trace_and_replayed_on_another(self, tmp_path: Path) -> None:
        test, other = (
            synthetic.make(tmp_path / str(seed), tokens=200, branches=(20,), windows=(None,) * 4, q_tail=64, seed=seed)
            for seed in (0, 1)
        )
        # Of the same model, the recipes tell them apart.
        other.prefix.token_ids.fill_(2)
        rows = open_loop(
            test,
            [
                Arm(policy, Budget("read_tokens", 96), Protection(0, 0))
                for policy in (M3Distilled(block=16, index_dim=16), M3ExactMass(block=16, pool="sum"))
            ],
            calibration=other,
        )
        for row in rows:
            assert (row.output_error == 0) is (row.layer < 3)


def fitted(keys: Tensor, q: Tensor, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Index scores [kv_heads, queries, tokens] and the heads' mean attention scores, both without their mean."""
    kv_heads, _, k_dim = keys.shape
    scale = k_dim**-0.5
    index = fit_index(q, keys, scale, dim)
    group = q.unflatten(0, (kv_heads, -1)).double().numpy()
    true = np.einsum("hgqd,htd->hqt", group, keys.double().numpy()) * scale / group.shape[1]
    flat = keys.transpose(0, 1).flatten(1).double().numpy()
    rows = np.einsum(
        "hcw,hqw->hqc", index.query.double().numpy(), group.transpose(0, 2, 1, 3).reshape(kv_heads, q.shape[1], -1)
    )
    mine = rows @ (flat @ index.key.double().numpy().T).T
    return mine - mine.mean(-1, keepdims=True), true - true.mean(-1, keepdims=True)


class TestFit:
    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_at_full_width_the_index_score_is_the_heads_mean_score(self, kv_heads: int) -> None:
        keys, q = random_kv(60, kv_heads=kv_heads)[0].float(), random_q(30, q_heads=2 * kv_heads).float()
        mine, true = fitted(keys + 5.0, q, kv_heads * DIM)  # what all keys share moves no order
        np.testing.assert_allclose(mine, true, atol=1e-4)
        mine, _ = fitted(keys, q, 2)
        assert np.abs(mine - true).max() > 0.1

    def test_the_width_that_keys_really_have_is_enough(self) -> None:
        rng = torch.Generator().manual_seed(3)
        keys = torch.randn(1, 60, 3, generator=rng) @ torch.randn(3, DIM, generator=rng)
        mine, true = fitted(keys, random_q(30, q_heads=1).float(), 3)
        np.testing.assert_allclose(mine, true, atol=1e-4)

    def test_no_other_projection_of_that_width_fits_better(self) -> None:
        # One head: the best rank-3 approximation of the score matrix is its truncated SVD (Eckart-Young).
        rng = torch.Generator().manual_seed(0)
        q = torch.randn(1, 50, DIM, generator=rng) * torch.linspace(3, 0.1, DIM)
        keys = torch.randn(1, 80, DIM, generator=rng) * torch.linspace(1, 2, DIM)
        mine, true = fitted(keys, q, 3)
        left = np.linalg.svd(true[0], compute_uv=False)[3:]
        assert np.linalg.norm(mine - true) == pytest.approx(np.sqrt((left**2).sum()), rel=1e-3)
