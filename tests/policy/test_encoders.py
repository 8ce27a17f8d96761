"""KIVI, fp8 and SVD over the real paged cache: what is encoded when, to what error, in how many bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.layout.model import Layer, Rope
from kvassay.policy.base import Artefact, Memory
from kvassay.policy.fp8 import Fp8
from kvassay.policy.kivi import Kivi
from kvassay.policy.svd import Svd
from kvassay.policy.views import LayerView
from tests.policy.build import dense, layer, random_kv, view
from tests.policy.paged import Run

DIM, HEADS = 32, 2
LAYER = layer(dim=DIM)


def kv(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    k, v = random_kv(tokens, seed, HEADS, DIM)
    return k.float(), v.float()


def kivi_run(policy: Kivi, tokens: int = 200, dim: int = DIM) -> Run:
    k, v = (x.float() for x in random_kv(tokens, 0, HEADS, dim))
    return Run(policy, layer(dim=dim), k, v)


class TestKivi:
    def test_streamed_groups_are_really_quantised(self) -> None:
        """rajveer43/VeloxQuant-MLX #162: 32 prompt tokens, 168 single steps; groups of one token were bit exact."""
        run = kivi_run(Kivi(group=32, residual=32))
        run.prefill(32)
        for _ in range(168):
            run.step()
        assert run.encoded == list(range(160))
        data = run.data
        for side, true in ((data.k, run.k), (data.v, run.v)):
            error = (side - true)[:, :160].abs().amax(dim=(0, 2))
            assert bool((error > 0.01).all()), "a token whose group is itself alone would be bit exact"
            assert torch.equal(side[:, 160:], true[:, 160:])

    def test_one_call_and_streaming_come_to_the_same_codes(self) -> None:
        streamed, at_once = kivi_run(Kivi(group=32, residual=32)), kivi_run(Kivi(group=32, residual=32))
        streamed.prefill(32)
        for _ in range(168):
            streamed.step()
        at_once.prefill(200)
        assert streamed.encoded == at_once.encoded
        assert torch.equal(streamed.data.k, at_once.data.k) and torch.equal(streamed.data.v, at_once.data.v)
        assert streamed.coded_bytes(2.0) == at_once.coded_bytes(2.0)

    @pytest.mark.parametrize("prompt", [1, 45])
    def test_the_residual_ages_by_total_position(self, prompt: int) -> None:
        """rajveer43/VeloxQuant-MLX #86: aging by the length of the call left decode tokens raw for ever."""
        run = kivi_run(Kivi(group=16, residual=24), 100)
        run.prefill(prompt)
        for _ in range(100 - prompt):
            raw = run.length - len(run.encoded)
            assert raw <= 24 + 16 - 1 and (not run.encoded or raw >= 24)
            run.step()
        assert len(run.encoded) == (100 - 24) // 16 * 16

    def test_a_step_that_fills_no_group_asks_for_nothing(self) -> None:
        run = kivi_run(Kivi(group=32, residual=32))
        run.prefill(70)
        for _ in range(40):
            run.step()
        asked = [at for at, decision in enumerate(run.decisions) if not decision.empty]
        assert asked == [0, 26]  # after prefill, and at 96 tokens

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_errors_stay_within_half_a_step_of_the_group(self, bits: int) -> None:
        run = kivi_run(Kivi(bits, bits, group=16, residual=0), 64)
        run.prefill(64)
        data = run.data
        groups = run.k.unflatten(1, (4, 16))
        step = (groups.amax(2) - groups.amin(2)) / (2**bits - 1)
        error = (data.k - run.k).abs().unflatten(1, (4, 16)).amax(2)
        assert bool((error <= step * 0.51 + 0.01).all())
        channels = run.v.unflatten(2, (2, 16))
        step = (channels.amax(3) - channels.amin(3)) / (2**bits - 1)
        error = (data.v - run.v).abs().unflatten(2, (2, 16)).amax(3)
        assert bool((error <= step * 0.51 + 0.01).all())

    @pytest.mark.parametrize("key_bits, value_bits, length", [(2, 2, 200), (4, 2, 161), (8, 8, 129)])
    def test_bytes_of_the_tensors_equal_the_formula(self, key_bits: int, value_bits: int, length: int) -> None:
        policy = Kivi(key_bits, value_bits, group=32, residual=32)
        run = kivi_run(policy)
        run.prefill(length)
        raw = (length - len(run.encoded)) * HEADS * 2 * DIM * 2.0
        assert run.coded_bytes(2.0) + raw == policy.expected_bytes(run.view(), length, 2.0)

    def test_the_published_ratio_on_llama_2_7b(self) -> None:
        """jy-yuan/KIVI #17: 2.05 GiB of fp16 at 4196 tokens and batch 1; 2 bits with G=32 come to 5-6x on the codes."""
        policy, tokens = Kivi(group=32, residual=128), 4196
        llama = layer(q_heads=32, kv_heads=32, dim=128)
        shown = view(policy, dense(4), of=llama)
        full = 32 * tokens * 2 * 32 * 128 * 2.0
        assert full / 2**30 == pytest.approx(2.05, abs=0.01)
        held = 32 * policy.expected_bytes(shown, tokens, 2.0)
        assert 4.0 < full / held < 5.34
        coded = policy.encoded_up_to(tokens)
        codes_only = 32 * (policy.expected_bytes(shown, tokens, 2.0) - (tokens - coded) * 2 * 32 * 128 * 2.0)
        assert 32 * coded * 2 * 32 * 128 * 2.0 / codes_only == pytest.approx(16 / 3)

    def test_a_group_must_divide_the_value_dimension(self) -> None:
        run = kivi_run(Kivi(group=24, residual=0), 64)
        with pytest.raises(PolicyError, match="group=24 does not divide the value dimension 32 of layer 0"):
            run.prefill(64)

    def test_widths_are_those_of_the_codec(self) -> None:
        with pytest.raises(PolicyError, match="key_bits=3, must be one of 2, 4, 8"):
            Kivi(key_bits=3)


class TestFp8:
    def test_prompt_and_every_new_token_are_e4m3(self) -> None:
        run = Run(Fp8(), LAYER, *kv(40))
        run.prefill(30)
        for _ in range(10):
            run.step()
        assert run.encoded == list(range(40))
        for side, true in ((run.data.k, run.k), (run.data.v, run.v)):
            assert torch.equal(side, true.to(torch.float8_e4m3fn).float())
        assert run.coded_bytes(2.0) == 40 * HEADS * 2 * DIM

    def test_saturates_at_448_and_keeps_the_sign(self) -> None:
        k, v = kv(4)
        k[0, 0, :2], v[1, 3, 0] = torch.tensor([1000.0, -1e6]), 449.0
        run = Run(Fp8(), LAYER, k, v)
        run.prefill(4)
        assert run.data.k[0, 0, :2].tolist() == [448.0, -448.0] and float(run.data.v[1, 3, 0]) == 448.0

    def test_nothing_is_encoded_twice(self) -> None:
        run = Run(Fp8(), LAYER, *kv(12))
        run.prefill(10)
        run.decide()
        assert run.decisions[-1].empty
        run.step()
        assert run.decisions[-1].edits[0][0].tokens.sum(1).tolist() == [1, 1]  # type: ignore[union-attr]


class Text:
    """A calibration source of one layer."""

    sha256 = "a" * 64

    def __init__(self, *views: LayerView) -> None:
        self.views = views

    def layers(self) -> Iterator[tuple[int, LayerView]]:
        return iter([(v.index, v) for v in self.views])


def svd_run(policy: Svd, tokens: int = 48, seed: int = 0, of: Layer = LAYER) -> Run:
    source = Run(policy, of, *kv(300, 9))
    source.append(300)
    artefact = policy.fit(Text(source.view()))
    return Run(policy, of, *kv(tokens, seed), memory=Memory(artefact=artefact))


class TestSvd:
    @pytest.mark.parametrize("domain", ["pre_rope", "post_rope"])
    @pytest.mark.parametrize("heads", [0, 1])
    def test_full_rank_reproduces_to_rounding(self, domain: str, heads: int) -> None:
        rope = layer(dim=DIM, rope=Rope(10000.0, DIM))
        run = svd_run(Svd(1.0, heads, domain), of=rope)  # type: ignore[arg-type]
        run.prefill(48)
        assert run.encoded == list(range(48))
        torch.testing.assert_close(run.data.k, run.k, rtol=0, atol=2e-5)
        torch.testing.assert_close(run.data.v, run.v, rtol=0, atol=2e-5)

    def test_bases_are_the_leading_right_singular_vectors(self) -> None:
        k, v = kv(100, 5)
        v = v * torch.linspace(0.1, 3, DIM)
        run = Run(Svd(0.25), LAYER, k, v)
        run.append(100)
        basis = Svd(0.25).fit(Text(run.view())).tensors["layer0.value.0"]
        rows = v.transpose(0, 1).reshape(100, -1).double()
        right = torch.linalg.svd(rows, full_matrices=False).Vh[: basis.shape[1]]
        assert basis.shape == (2 * DIM, 16)
        torch.testing.assert_close(basis.double() @ basis.double().T, right.T @ right, rtol=0, atol=1e-5)

    def test_rows_of_low_rank_survive_a_low_rank(self) -> None:
        mix = torch.randn(16, HEADS * DIM, generator=torch.Generator().manual_seed(1))
        rows = (torch.randn(300, 16, generator=torch.Generator().manual_seed(2)) @ mix).view(300, HEADS, DIM)
        v = rows.transpose(0, 1).contiguous()
        policy = Svd(0.25, domain="post_rope")
        source = Run(policy, LAYER, v, v)
        source.append(300)
        run = Run(policy, LAYER, v[:, :48], v[:, :48], memory=Memory(artefact=policy.fit(Text(source.view()))))
        run.prefill(48)
        torch.testing.assert_close(run.data.v, v[:, :48], rtol=0, atol=1e-3)
        assert run.coded_bytes(2.0) == 48 * 2 * 16 * 2

    def test_generated_tokens_stay_raw(self) -> None:
        run = svd_run(Svd(0.5))
        run.prefill(40)
        run.step()
        assert run.encoded == list(range(40)) and torch.equal(run.data.k[:, 40], run.k[:, 40])

    def test_artefact_names_and_hash(self) -> None:
        run = Run(Svd(0.5, heads=1), LAYER, *kv(64))
        run.append(64)
        artefact = Svd(0.5, heads=1).fit(Text(run.view()))
        assert set(artefact.tensors) == {f"layer0.{side}.{head}" for side in ("key", "value") for head in (0, 1)}
        assert artefact.source_sha256 == "a" * 64
        assert artefact.nbytes == 4 * DIM * (DIM // 2) * 4

    def test_a_missing_or_foreign_artefact_is_refused(self) -> None:
        with pytest.raises(PolicyError, match="no artefact"):
            Run(Svd(), LAYER, *kv(8)).prefill(8)
        foreign = Memory(artefact=Artefact({"layer7.key.0": torch.ones(1)}))
        with pytest.raises(PolicyError, match=r"no 'layer0.key.0'"):
            Run(Svd(), LAYER, *kv(8), memory=foreign).prefill(8)

    @pytest.mark.parametrize("rank", [0.0, 1.5, -1.0])
    def test_rank_is_a_fraction(self, rank: float) -> None:
        with pytest.raises(PolicyError, match=r"fraction in \(0, 1\]"):
            Svd(rank)
