"""LOCKS and its centroid control: packed summaries, guarantees of the paper, pages that must not vanish."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvassay.cache.data import LayerData
from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.centroid import Centroid
from kvassay.policy.locks import Locks, MassSelector
from kvassay.policy.readset import ReadSet
from kvassay.policy.spectral import decompose
from kvassay.policy.views import BlockView, LayerView, Meter
from kvassay.replay.arms import Arm
from kvassay.replay.open import open_loop
from tests.policy.build import DIM, KV_HEADS, Q_HEADS, allowance, dense, layer, memory, random_q, view
from tests.replay import synthetic

PAGE = 16
EXACT = {"rank": 15, "basis_bits": 32, "bits": 32}


def summaries(policy: MassSelector, data: LayerData, size: int = PAGE, full: int | None = None) -> dict:
    full = data.k.shape[1] // size if full is None else full
    blocks = data.k[:, : full * size].unflatten(1, (full, size)).transpose(0, 1)
    return dict(policy.summarize(BlockView(layer(), blocks, blocks)))


def shown(
    policy: MassSelector, data: LayerData, size: int = PAGE, full: int | None = None, **more: object
) -> LayerView:
    side = summaries(policy, data, size, full)
    return view(policy, data, side=side, block_size=size, **more)  # type: ignore[arg-type]


def ask(policy: MassSelector, at: LayerView, query: torch.Tensor, tokens: int, context: int = 4096) -> list[list[int]]:
    sink, recent = at.protection.sink, at.protection.recent
    chosen = policy.read(at, query, memory(), allowance(tokens, context, sink, recent, "read_tokens"), None)
    assert isinstance(chosen, ReadSet) and chosen.unit == policy.block and chosen.index.shape[0] == 1
    return [sorted(row) for row in chosen.index[0].tolist()]


def exact_mass(data: LayerData, query: torch.Tensor, size: int = PAGE) -> np.ndarray:
    """Log-sum-exp of each full page's scaled logits [q_heads, pages], in float64 NumPy."""
    rows = []
    for head, q in enumerate(query[:, 0].double().numpy()):
        logits = data.k[head // (len(query) // len(data.k))].double().numpy() @ q * DIM**-0.5
        pages = logits[: len(logits) // size * size].reshape(-1, size)
        rows.append(np.log(np.exp(pages - pages.max(1, keepdims=True)).sum(1)) + pages.max(1))
    return np.stack(rows)


class TestSummary:
    # Bytes of a page of 16 tokens and 128 channels without scales: the paper's rank and precision grid.
    @pytest.mark.parametrize(
        "rank, bits, payload", [(2, 4, 288), (2, 8, 416), (4, 4, 448), (4, 8, 704), (8, 4, 768), (8, 8, 1280)]
    )
    def test_payload_is_the_papers(self, rank: int, bits: int, payload: int) -> None:
        keys = dense(PAGE, dim=128, kv_heads=1)
        side = summaries(Locks(rank=rank, basis_bits=bits), keys)
        codes = sum(t.nbytes for name, t in side.items() if not name.endswith("_scale"))
        assert codes == payload

    def test_as_published_a_page_holds_a_tenth_of_its_keys_and_values(self) -> None:
        side = summaries(Locks(), dense(PAGE, dim=128, kv_heads=1))
        assert sum(t.nbytes for t in side.values()) == 512 + 128 + 128 + 2 * (8 + 16 + 1) == 818
        assert {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in side.items()} == {
            "mean": ("int8", [1, 1, 128]),
            "mean_scale": ("float16", [1, 1]),
            "basis": ("uint8", [1, 1, 8, 64]),
            "basis_scale": ("float16", [1, 1, 8]),
            "coefficients": ("int8", [1, 1, 16, 8]),
            "coefficients_scale": ("float16", [1, 1, 16]),
        }

    def test_the_centroid_alone_is_a_byte_per_channel(self) -> None:
        side = summaries(Centroid(), dense(PAGE, dim=128, kv_heads=1))
        assert sum(t.nbytes for t in side.values()) == 128 + 2

    def test_worked_example(self) -> None:
        # Four keys on a line: mean (3, 0), direction (1, 0), coefficients -3, -1, 1, 3. Codes: mean 127 at 3/127,
        # basis 7 at 1/7, a token's only coefficient +-127 at |c|/127.
        keys = torch.tensor([[[0.0, 0.0], [2.0, 0.0], [4.0, 0.0], [6.0, 0.0]]])
        side = summaries(Locks(rank=1, block=4), LayerData.dense(keys, keys), size=4)
        assert side["mean"].tolist() == [[[127, 0]]]
        assert side["mean_scale"].item() == pytest.approx(3 / 127, rel=1e-3)
        sign = 1 if side["coefficients"][0, 0, 3, 0] > 0 else -1
        assert (sign * side["coefficients"][0, 0, :, 0]).tolist() == [-127, -127, 127, 127]
        assert side["coefficients_scale"][0, 0].tolist() == pytest.approx(
            [3 / 127, 1 / 127, 1 / 127, 3 / 127], rel=1e-3
        )
        assert side["basis"].item() == (8 + sign * 7) | 8 << 4  # low nibble first: +-7 and 0, offset 8
        assert side["basis_scale"].item() == pytest.approx(1 / 7, rel=1e-3)

    def test_directions_are_the_leading_singular_vectors_and_zero_modes_are_dropped(self) -> None:
        keys = dense(PAGE, dim=32, kv_heads=1).k[0]
        mean, basis, coefficients = decompose(keys[None], 8)
        centred = (keys - keys.mean(0)).numpy()
        u, s, v = np.linalg.svd(centred, full_matrices=False)
        np.testing.assert_allclose(mean[0], keys.mean(0), atol=1e-6)
        np.testing.assert_allclose((basis[0] @ basis[0].T).numpy(), np.eye(8), atol=1e-6)
        np.testing.assert_allclose((coefficients[0] @ basis[0]).numpy(), u[:, :8] * s[:8] @ v[:8], atol=1e-5)
        same = torch.ones(1, PAGE, 8)
        _, basis, coefficients = decompose(same, 3)
        assert not basis.any() and not coefficients.any()
        _, basis, coefficients = decompose(torch.randn(1, 4, 8), 6)  # three directions at most, the rest is empty
        assert list(basis.shape) == [1, 6, 8] and not basis[0, 3:].any() and not coefficients[0, :, 3:].any()


class TestGuarantees:
    @settings(deadline=None, max_examples=40)
    @given(
        keys=hnp.arrays(np.float64, (KV_HEADS, 3 * PAGE, DIM), elements=st.floats(-20, 20, width=32)),
        query=hnp.arrays(np.float64, (Q_HEADS, 1, DIM), elements=st.floats(-5, 5, width=32)),
    )
    def test_full_rank_without_codes_is_exact_mass(self, keys: np.ndarray, query: np.ndarray) -> None:
        data = LayerData.dense(torch.from_numpy(keys), torch.from_numpy(keys))
        policy, q = Locks(**EXACT), torch.from_numpy(query)
        mass = policy.log_mass(shown(policy, data), q)
        np.testing.assert_allclose(mass.flatten(0, 1)[:, 0], exact_mass(data, q), rtol=1e-4, atol=2e-3)

    def test_full_rank_chooses_as_exact_mass_does(self) -> None:
        data, q = dense(40 * PAGE + 5, seed=3), random_q(1) * 3
        share = np.exp(exact_mass(data, q))
        share = (share / share.sum(1, keepdims=True)).reshape(KV_HEADS, 2, -1).mean(1)
        policy = Locks(**EXACT)
        for head, row in enumerate(ask(policy, shown(policy, data), q, 10 * PAGE)):
            best = [page for page in np.argsort(-share[head]) if page != 0][:8]
            assert row == sorted([0, 40, *best])

    @pytest.mark.parametrize("rank", [1, 4, 8])
    def test_the_error_is_bounded_by_the_tail(self, rank: int) -> None:
        data, q = dense(8 * PAGE, dim=DIM * 4), random_q(1, dim=DIM * 4) * 2
        policy = Locks(rank=rank, basis_bits=32, bits=32)
        of = layer(dim=DIM * 4)
        at = view(policy, data, of=of, side=summaries(policy, data), block_size=PAGE)
        found = policy.log_mass(at, q).flatten(0, 1)[:, 0].double().numpy()
        for head in range(Q_HEADS):
            query = q[head, 0].numpy()
            for page in range(8):
                keys = data.k[head // 2, page * PAGE : (page + 1) * PAGE].numpy()
                centred = keys - keys.mean(0)
                _, s, v = np.linalg.svd(centred, full_matrices=False)
                outside = query - v[:rank].T @ (v[:rank] @ query)
                bound = np.linalg.norm(outside) * math.sqrt((s[rank:] ** 2).sum()) * of.scale
                logits = keys @ query * of.scale
                assert abs(found[head, page] - np.log(np.exp(logits).sum())) <= bound + 1e-4

    def test_the_shared_set_keeps_its_share_of_the_coverage(self) -> None:
        # exp(-4 eta) of what exact selection covers, eta the largest score error, over many queries.
        data = dense(32 * PAGE, seed=5)
        policy = Locks(rank=2)
        at = shown(policy, data)
        for seed in range(20):
            q = random_q(1, seed=seed) * 2
            exact = exact_mass(data, q)
            eta = np.abs(policy.log_mass(at, q).flatten(0, 1)[:, 0].double().numpy() - exact).max()
            share = np.exp(exact - exact.max(1, keepdims=True))
            share = (share / share.sum(1, keepdims=True)).reshape(KV_HEADS, 2, -1).mean(1)
            rank = policy.ranks(at, q, memory())[:, 0].numpy()
            for head in range(KV_HEADS):
                mine = share[head][np.argsort(-rank[head])[:6]].sum()
                best = np.sort(share[head, :31])[::-1][:6].sum()
                assert mine >= math.exp(-4 * eta) * best - 1e-9

    def test_the_codes_cost_little(self) -> None:
        data, q = dense(64 * PAGE, dim=64), random_q(1, dim=64)
        of = layer(dim=64)
        exact, coded = (
            p.log_mass(view(p, data, of=of, side=summaries(p, data), block_size=PAGE), q)
            for p in (Locks(basis_bits=32, bits=32), Locks())
        )
        assert 0 < float((exact - coded).abs().median()) < 0.1


@dataclass(frozen=True)
class Watched(Locks):
    """Notes of each query: length, described pages, and what each KV head reads."""

    seen: ClassVar[list[tuple[int, int, list[list[int]]]]] = []

    def read(self, layer: LayerView, query, memory, budget, previous) -> ReadSet | None:  # type: ignore[no-untyped-def]
        chosen = super().read(layer, query, memory, budget, previous)
        assert chosen is not None
        described = layer.side["mean"].shape[0]
        for length, heads in enumerate(chosen.index.tolist(), layer.length + 1 - query.shape[1]):
            self.seen.append((length, described, [sorted(row) for row in heads]))
        return chosen


@pytest.mark.parametrize("context", [5 * PAGE - 1, 5 * PAGE, 5 * PAGE + 1])
def test_in_a_replay_every_page_is_described_or_the_newest(tmp_path: Path, context: int) -> None:
    trace = synthetic.make(tmp_path / "t", tokens=context, branches=(PAGE + 4,), windows=(None,))
    Watched.seen.clear()
    open_loop(trace, [Arm(Watched(), Budget("read_tokens", 3 * PAGE), Protection(0, 0))])
    assert [length for length, _, _ in Watched.seen] == list(range(context + 1, context + PAGE + 5))
    for length, described, heads in Watched.seen:
        newest = (length - 1) // PAGE
        assert described == newest
        for row in heads:
            assert len(set(row)) == 3 and {0, newest} <= set(row)


class TestChoice:
    def two_heads(self) -> tuple[LayerData, torch.Tensor]:
        """One KV head, two query heads, four full pages and one that fills; logits chosen by hand."""
        keys = torch.zeros(1, 5 * PAGE + 1, 2)
        keys[0, 16], keys[0, 32] = torch.tensor([20.0, 0.0]), torch.tensor([16.0, 0.0])
        keys[0, 48] = torch.tensor([0.0, 8.0])
        return LayerData.dense(keys, keys), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])

    def masses(self, policy: MassSelector) -> np.ndarray:
        data, q = self.two_heads()
        at = view(policy, data, of=layer(q_heads=2, kv_heads=1, dim=2), side=summaries(policy, data), block_size=PAGE)
        return policy.ranks(at, q, memory())[0, 0].double().numpy()

    def test_shares_are_normalised_per_head_and_averaged(self) -> None:
        found = self.masses(Locks(**EXACT, combine="share"))
        scale = 2**-0.5
        one = np.array([16, 15 + math.exp(20 * scale), 15 + math.exp(16 * scale), 16, 16])
        two = np.array([16, 16, 16, 15 + math.exp(8 * scale), 16])
        np.testing.assert_allclose(found, (one / one.sum() + two / two.sum()) / 2, rtol=1e-4)

    def test_the_peak_rule_measures_each_head_by_its_largest_page(self) -> None:
        found = self.masses(Locks(**EXACT, combine="peak"))
        scale = 2**-0.5
        one = np.array([16, 15 + math.exp(20 * scale), 15 + math.exp(16 * scale), 16, 16])
        two = np.array([16, 16, 16, 15 + math.exp(8 * scale), 16])
        np.testing.assert_allclose(found, one / one.max() + two / two.max(), rtol=1e-4)

    def test_the_newest_pages_mass_is_in_no_share(self) -> None:
        data, q = dense(6 * PAGE), random_q(1)  # the sixth page is full, described, and holds the newest token
        policy = Locks(**EXACT)
        rank = policy.ranks(shown(policy, data), q, memory())
        assert rank.shape[-1] == 5
        torch.testing.assert_close(rank.sum(-1), torch.ones(KV_HEADS, 1))

    @pytest.mark.parametrize("tokens", [8 * PAGE, 8 * PAGE + 1, 8 * PAGE + 15])
    def test_page_0_and_the_newest_page_are_read_inside_the_budget(self, tokens: int) -> None:
        data = dense(tokens)
        last = (tokens - 1) // PAGE
        policy = Locks()
        # As the replay has it: a page is described after the step that fills it.
        for row in ask(policy, shown(policy, data, full=last), random_q(1), 4 * PAGE):
            assert len(set(row)) == 4 and {0, last} <= set(row)

    def test_a_page_that_nobody_has_described_yet_is_read(self) -> None:
        data = dense(8 * PAGE + 3)
        policy = Locks()
        for row in ask(policy, shown(policy, data, full=7), random_q(1), 4 * PAGE):
            assert {0, 7, 8} <= set(row)

    def test_without_any_description_the_forced_pages_suffice(self) -> None:
        policy = Locks()
        keys = dense(2 * PAGE + 1)
        for row in ask(policy, shown(policy, keys, full=0), random_q(1), 2 * PAGE, context=40):
            assert {0, 2} <= set(row) or len(row) == 2

    def test_fewer_pages_than_the_budget_are_read_whole(self) -> None:
        policy, data = Locks(), dense(5 * PAGE)
        budget = allowance(5 * PAGE, 4096, unit="read_tokens")
        assert policy.read(shown(policy, data), random_q(1), memory(), budget, None) is None

    def test_protected_pages_count_inside_and_too_small_a_budget_is_refused(self) -> None:
        policy, data = Locks(), dense(20 * PAGE)
        at = shown(policy, data, sink=20, recent=18)
        for row in ask(policy, at, random_q(1), 6 * PAGE):
            assert {0, 1, 18, 19} <= set(row) and len(row) == 6
        with pytest.raises(BudgetError, match=r"policy 'locks': 64 tokens are 4 blocks of 16.*up to 5"):
            ask(policy, at, random_q(1), 4 * PAGE)

    def test_a_page_of_several_blocks_sums_their_masses(self) -> None:
        data, q = dense(8 * PAGE), random_q(1)
        policy = Locks(**EXACT, block=2 * PAGE)
        mass = policy.log_mass(shown(policy, data), q).flatten(0, 1)[:, 0]
        np.testing.assert_allclose(mass, exact_mass(data, q, 2 * PAGE), rtol=1e-5, atol=1e-5)

    def test_centroid_takes_every_key_for_the_mean(self) -> None:
        data, q = dense(3 * PAGE), random_q(1)
        policy = Centroid(bits=32)
        mass = policy.log_mass(shown(policy, data), q).flatten(0, 1)[:, 0].numpy()
        for head in range(Q_HEADS):
            means = data.k[head // 2].unflatten(0, (3, PAGE)).mean(1).numpy()
            expected = means @ q[head, 0].numpy() * DIM**-0.5 + math.log(PAGE)
            np.testing.assert_allclose(mass[head], expected, rtol=1e-5, atol=1e-5)

    def test_the_soft_cap_acts_on_the_predicted_logits(self) -> None:
        data, q = dense(2 * PAGE), random_q(1) * 10
        policy, of = Locks(**EXACT), layer(softcap=1.5)
        at = view(policy, data, of=of, side=summaries(policy, data), block_size=PAGE)
        mass = policy.log_mass(at, q).flatten(0, 1)[:, 0].double().numpy()
        for head in range(Q_HEADS):
            logits = 1.5 * np.tanh(data.k[head // 2].numpy() @ q[head, 0].numpy() * DIM**-0.5 / 1.5)
            np.testing.assert_allclose(mass[head], np.log(np.exp(logits.reshape(2, PAGE)).sum(1)), atol=1e-4)

    def test_several_queries_choose_each_for_itself(self) -> None:
        data, q = dense(12 * PAGE), random_q(3)
        policy = Locks()
        at = shown(policy, data)
        budget = allowance(5 * PAGE, 4096, unit="read_tokens")
        together = policy.read(at, q, memory(), budget, None)
        assert together is not None and list(together.index.shape) == [3, KV_HEADS, 5]
        for i in range(3):
            assert [sorted(r) for r in together.index[i].tolist()] == ask(policy, at, q[:, i : i + 1], 5 * PAGE)

    def test_working_in_pieces_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data, q = dense(12 * PAGE), random_q(2)
        policy = Locks()
        whole = policy.log_mass(shown(policy, data), q)
        monkeypatch.setattr("kvassay.policy.spectral.CHUNK", 10 * KV_HEADS * PAGE // 2 * DIM)  # five blocks of keys
        torch.testing.assert_close(policy.log_mass(shown(policy, data), q), whole)

    def test_the_scan_is_charged_as_held(self) -> None:
        meter, policy = Meter(2.0), Locks()
        data = dense(10 * PAGE + 3)
        at = shown(policy, data, meter=meter)
        ask(policy, at, random_q(1), 4 * PAGE)
        assert meter.total == sum(t.nbytes for t in at.side.values()) == 10 * KV_HEADS * (8 * 4 + 128 + 8 + 50)

    def test_parameters_are_checked(self) -> None:
        with pytest.raises(PolicyError, match=r"'locks': basis_bits=3, must be one of 4, 8, 32"):
            Locks(basis_bits=3)
        with pytest.raises(PolicyError, match=r"'locks': rank=0, must be at least 1"):
            Locks(rank=0)
        with pytest.raises(PolicyError, match="combine='mean'"):
            Centroid(combine="mean")  # type: ignore[arg-type]
