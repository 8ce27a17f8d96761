"""RDKV: weights against their formulas, budgets in bits, what is stored, and its ablations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.codec import WIDTHS, ChannelGroups, Packed
from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.policy.allocation import keep_best
from kvassay.policy.base import Artefact, Memory
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.distortion import PUBLISHED, measure
from kvassay.policy.rdkv import RDKV
from kvassay.policy.rdkv_calibrated import RDKVCalibrated
from kvassay.policy.views import LayerView
from tests.policy.build import DIM, KV_HEADS, Q_HEADS, attention_oracle, cache, dense, layer, memory, random_q, view
from tests.policy.paged import Run

N, W, GROUP = 48, 8, Q_HEADS // KV_HEADS


def shown(policy: RDKV, tokens: int = N, **more: int) -> LayerView:
    return view(policy, dense(tokens), queries=random_q(tokens), **more)


def bytes_of(tokens: int, context: int, sink: int = 0, recent: int = 0) -> Allowance:
    return Allowance(Budget("bytes", tokens / context), tokens, context, Protection(sink, recent))


def edit(policy: RDKV, tokens: int, context: int = N, **protect: int):  # type: ignore[no-untyped-def]
    seen = shown(policy, context, **protect)
    scores = {0: policy.score(seen, memory())}
    decision = policy.decide(cache(seen), scores, memory(), bytes_of(tokens, context, **protect))
    return decision.edits[0][0]


class TestWeights:
    def test_tokens(self) -> None:
        """Equation 2, divided by the queries that see a token, smoothed over 5 with reflected edges."""
        policy, data, q = RDKV(window=W), dense(N), random_q(N)
        at = list(range(N - W, N))
        score = policy.score(view(policy, data, queries=q), memory()).numpy()
        expected = np.zeros((KV_HEADS, N))
        for h in range(Q_HEADS):
            rows = attention_oracle(q[h, N - W :], data.k[h // GROUP], at, list(range(N)), DIM**-0.5)
            expected[h // GROUP] += rows.sum(axis=0)
        expected /= np.array([min(W, N - t) for t in range(N)])
        padded = np.pad(expected, ((0, 0), (2, 2)), mode="reflect")
        smooth = np.stack([padded[:, t : t + 5].mean(axis=1) for t in range(N)], axis=1)
        np.testing.assert_allclose(score, smooth, rtol=1e-6)

    def test_without_the_tail_rule_late_tokens_weigh_less(self) -> None:
        with_rule = RDKV(window=W, kernel=1).score(shown(RDKV(window=W)), memory())
        without = RDKV(window=W, kernel=1, tail=False).score(shown(RDKV(window=W)), memory())
        torch.testing.assert_close(without[:, -1] * 1.0, with_rule[:, -1])
        torch.testing.assert_close(without[:, : N - W], with_rule[:, : N - W] * W)

    def test_channels(self) -> None:
        policy, data, q = RDKV(window=W), dense(N), random_q(N)
        seen = view(policy, data, queries=q)
        expected = np.zeros((KV_HEADS, DIM))
        for head in range(KV_HEADS):
            window = q[head * GROUP : (head + 1) * GROUP, N - W :].numpy()
            expected[head] = (window**2).mean(axis=(0, 1)) * (data.k[head].numpy() ** 2).mean(axis=0)
        np.testing.assert_allclose(policy.channel_weights(seen).numpy(), expected, rtol=1e-6)
        linear = RDKV(window=W, channel_weight="linear").channel_weights(seen).numpy()
        np.testing.assert_allclose(linear, np.sqrt(expected), rtol=1e-6)

    def test_a_record_shorter_than_the_window_is_refused(self) -> None:
        with pytest.raises(EvidenceMissing, match="last 32 queries of layer 0, there are 8"):
            RDKV().score(view(RDKV(), dense(N), queries=random_q(8)), memory())


class TestBudget:
    @pytest.mark.parametrize("tokens", [6, 12, 24, 40])
    def test_each_side_stays_within_its_half(self, tokens: int) -> None:
        found = edit(RDKV(window=W), tokens)
        kept = (found.value_bits > 0).sum(1)
        assert bool((found.value_bits.sum(1) <= 16 * tokens).all())
        assert bool((found.value_bits.sum(1) > 16 * tokens - 8).all() or bool((found.value_bits == 16).all()))
        key_bits_held = found.key_bits.sum(1) * kept / DIM
        assert bool((key_bits_held <= 16 * tokens).all())
        assert bool((kept <= 8 * tokens).all()) and int(found.key_bits.max()) <= 8

    def test_protected_tokens_stay_whole(self) -> None:
        found = edit(RDKV(window=W), 12, sink=4, recent=4)
        assert found.value_bits[:, [0, 1, 2, 3, -4, -3, -2, -1]].unique().tolist() == [16]

    def test_a_budget_below_the_protected_tokens_is_refused(self) -> None:
        with pytest.raises(BudgetError, match="budget 3 tokens drops 4 protected"):
            edit(RDKV(window=W, actions="evict"), 3, sink=2, recent=3)

    @pytest.mark.parametrize(
        "actions, widths", [("evict", {0, 16}), ("three", {0, 4, 16}), ("quantise", {2, 4, 8, 16})]
    )
    def test_ablations_use_their_own_widths(self, actions: str, widths: set[int]) -> None:
        found = edit(RDKV(window=W, actions=actions), 20)  # type: ignore[arg-type]
        assert set(found.value_bits.unique().tolist()) <= widths and len(found.value_bits.unique()) > 1
        assert set(found.key_bits.unique().tolist()) <= widths

    def test_quantising_alone_needs_two_bits_for_everything(self) -> None:
        with pytest.raises(BudgetError, match="48 units of at least 2 bits take 96 bits, 80 may be used"):
            edit(RDKV(window=W, actions="quantise"), 5)


class TestLeast:
    """The guard: a head whose bits are too few for a token or a channel keeps its best one, at the least width."""

    def test_the_best_token_of_each_head(self) -> None:
        policy = RDKV(window=W, key_share=0.97)  # of 32 bits a head, one token of budget, values get 0
        found, best = edit(policy, 1), policy.score(shown(policy), memory()).argmax(1)
        expected = torch.zeros(KV_HEADS, N, dtype=torch.int64)
        expected[range(KV_HEADS), best] = 2
        assert torch.equal(found.value_bits, expected)
        assert bool((found.key_bits.sum(1) <= 0.97 * 32 * DIM).all()) and int(found.key_bits.min()) > 0

    def test_at_the_least_width_of_the_actions(self) -> None:
        found = edit(RDKV(window=W, key_share=0.97, actions="evict"), 1)
        assert (found.value_bits > 0).sum(1).tolist() == [1] * KV_HEADS and int(found.value_bits.max()) == 16

    def test_the_best_channel_of_each_head(self) -> None:
        policy = RDKV(window=W, key_share=1e-3)
        found, best = edit(policy, 1), policy.channel_weights(shown(policy)).argmax(1)
        expected = torch.zeros(KV_HEADS, DIM, dtype=torch.int64)
        expected[range(KV_HEADS), best] = 2
        assert torch.equal(found.key_bits, expected)

    def test_only_where_nothing_would_be_left(self) -> None:
        bits = torch.tensor([[0, 0, 0], [0, 4, 0]])
        kept = keep_best(bits, torch.tensor([[1.0, 3.0, 2.0], [9.0, 1.0, 1.0]]), {0: 1.0, 4: 0.1, 16: 0.0})
        assert kept.tolist() == [[0, 4, 0], [0, 4, 0]]


class TestStored:
    def run(self, policy: RDKV, tokens: int) -> tuple[Run, Tensor, Tensor]:
        rng = torch.Generator().manual_seed(3)
        k, v = (torch.randn(2, 160, 32, generator=rng) for _ in range(2))
        run = Run(policy, layer(dim=32), k, v, queries=random_q(160, dim=32).float(), tokens=tokens)
        run.prefill(160)
        return run, k, v

    def test_errors_are_those_of_the_widths_and_bytes_those_of_the_codes(self) -> None:
        run, _, v = self.run(RDKV(window=W), 40)
        found, data = run.decisions[0].edits[0][0], run.data
        for head in range(2):
            at = data.positions[head][data.positions[head] >= 0]
            assert at.tolist() == found.value_bits[head].nonzero().flatten().tolist()
            bits = found.value_bits[head, at]
            lost = (data.v[head, : len(at)] - v[head, at]).abs().amax(-1)
            step = (v[head, at].amax(-1) - v[head, at].amin(-1)) / (2.0**bits - 1)
            assert bool((lost <= 0.51 * step + 2e-3)[bits < 16].all()) and bool((lost[bits == 16] == 0).all())
            dropped = found.key_bits[head] == 0
            assert bool((data.k[head, : len(at)][:, dropped] == 0).all())
        nominal = 2 * 40 * 2 * 32 * 2.0
        payload = float((found.value_bits.sum(1) * 32 / 8).sum()) + float(
            (found.key_bits.sum(1) * (found.value_bits > 0).sum(1) / 8).sum()
        )
        assert payload <= nominal < run.coded_bytes(2.0)  # scales and indices come on top of the paper's budget

    def test_the_clamped_zero_point_ruins_a_channel_far_from_zero(self) -> None:
        """A unit-variance channel of mean 6 at 8 bits: error 1.6e-2 of its variance clamped, 7.5e-5 not."""
        x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0)) + 6
        plain, clamped = (float((Packed.encode(x, 8, c).decode() - x).square().mean()) for c in (False, True))
        assert 2e-5 < plain < 2e-4 and 3e-3 < clamped < 1e-1
        around = x - 6
        alike = [Packed.encode(around, 8, c).decode() for c in (False, True)]
        assert float((alike[0] - alike[1]).abs().max()) < float(around.max() - around.min()) / 255


class TestTables:
    def test_calibration_is_the_normalised_error_of_the_codes(self) -> None:
        class Text:
            sha256 = "c" * 64

            def layers(self):  # type: ignore[no-untyped-def]
                for index in range(2):
                    yield index, view(RDKVCalibrated(), dense(64, seed=index), of=layer(index))

        found = measure(Text())
        errors = []
        for index in range(2):
            k = dense(64, seed=index).k.float()
            lost = (ChannelGroups.encode(k, 4, None).decode() - k).square().mean(1)
            errors.append(float((lost / k.var(dim=1, correction=0).mean(0)).mean()))
        assert float(found.tensors["key"][WIDTHS.index(4)]) == pytest.approx(math.fsum(errors) / 2)
        for side in ("key", "value"):
            two, four, eight = found.tensors[side].tolist()
            assert 1 > two > 10 * four > 100 * eight > 0
        keys, values = RDKVCalibrated().tables(Memory(artefact=found))
        assert keys[2] == float(found.tensors["key"][0]) and values[16] == 0 and keys[0] == 1

    def test_normal_data_comes_near_the_published_tables(self) -> None:
        class Text:
            sha256 = ""

            def layers(self):  # type: ignore[no-untyped-def]
                yield 0, view(RDKVCalibrated(), dense(2048, dim=128), of=layer(dim=128))

        value = measure(Text()).tensors["value"].tolist()
        for mine, published in zip(value, PUBLISHED["default"][1], strict=True):
            assert mine == pytest.approx(published, rel=0.35)

    def test_an_unfitted_policy_says_so(self) -> None:
        with pytest.raises(PolicyError, match="no artefact"):
            RDKVCalibrated().tables(Memory())

    def test_an_artefact_of_tables_is_used(self) -> None:
        flat = Artefact({"key": torch.tensor([0.5, 0.3, 0.1]), "value": torch.tensor([0.9, 0.8, 0.1])})
        keys, values = RDKVCalibrated().tables(Memory(artefact=flat))
        assert keys[4] == pytest.approx(0.3) and values[8] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"kernel": 4}, "kernel=4, must be odd"),
        ({"key_share": 1.0}, "key_share=1.0"),
        ({"actions": "all"}, "actions='all', must be one of 'full', 'three'"),
        ({"table": "gpt"}, "table='gpt', must be one of 'default', 'llama-3.1-8b'"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        RDKV(**parameters)  # type: ignore[arg-type]
