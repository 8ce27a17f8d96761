"""Rotation against transformers' own rotary modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, GlmConfig, LlamaConfig, PhiConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.phi import modeling_phi

from kvassay.cache.rope import inverse_frequencies, rotate, unrotate
from kvassay.errors import LayoutError
from kvassay.layout.model import Rope

POSITIONS = torch.tensor([0, 1, 7, 100, 4095, 100_000])
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def keys(dim: int, heads: int = 2) -> Tensor:
    return torch.randn(heads, len(POSITIONS), dim, generator=torch.Generator().manual_seed(0))


def llama(dim: int, **rope: object) -> LlamaConfig:
    return LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, rope_parameters=rope)


def by_llama(x: Tensor, config: LlamaConfig) -> Tensor:
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(x, POSITIONS[None])
    return modeling_llama.apply_rotary_pos_emb(x[None], x[None], cos, sin)[1][0]


class TestAgainstTransformers:
    @pytest.mark.parametrize("theta, dim", [(10000.0, 64), (500000.0, 128), (1e6, 16)])
    def test_llama(self, theta: float, dim: int) -> None:
        x = keys(dim)
        expected = by_llama(x, llama(dim, rope_type="default", rope_theta=theta))
        torch.testing.assert_close(rotate(x, POSITIONS, Rope(theta, dim)), expected, rtol=0, atol=2e-6)

    def test_linear_scaling(self) -> None:
        x = keys(64)
        expected = by_llama(x, llama(64, rope_type="linear", rope_theta=10000.0, factor=8.0))
        rope = Rope(10000.0, 64, "linear", (("factor", 8.0),))
        torch.testing.assert_close(rotate(x, POSITIONS, rope), expected, rtol=0, atol=2e-6)

    def test_llama3_scaling(self) -> None:
        x = keys(128)
        expected = by_llama(x, llama(128, rope_type="llama3", rope_theta=500000.0, **LLAMA3))
        rope = Rope(500000.0, 128, "llama3", tuple(LLAMA3.items()))
        # The smoothed middle frequencies differ in the last bit, times the largest position.
        torch.testing.assert_close(rotate(x, POSITIONS, rope), expected, rtol=0, atol=2e-3)
        near = POSITIONS < 5000
        torch.testing.assert_close(rotate(x, POSITIONS, rope)[:, near], expected[:, near], rtol=0, atol=1e-4)

    @pytest.mark.parametrize("kind, rope", [("sliding", Rope(10000.0, 32)), ("full", Rope(1e6, 32))])
    def test_gemma3_by_layer_type(self, kind: str, rope: Rope) -> None:
        config = Gemma3TextConfig(
            hidden_size=32,
            num_attention_heads=1,
            head_dim=32,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
        )
        x = keys(32)
        cos, sin = Gemma3RotaryEmbedding(config)(x, POSITIONS[None], f"{kind}_attention")
        expected = modeling_llama.apply_rotary_pos_emb(x[None], x[None], cos, sin)[1][0]
        torch.testing.assert_close(rotate(x, POSITIONS, rope), expected, rtol=0, atol=2e-6)

    def test_partial_rotation(self) -> None:
        """Phi turns the first half of 32 dimensions and leaves the others."""
        config = PhiConfig(
            hidden_size=32,
            num_attention_heads=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
        x = keys(32)
        cos, sin = modeling_phi.PhiRotaryEmbedding(config)(x, POSITIONS[None])
        turned = modeling_phi.apply_rotary_pos_emb(x[None, ..., :16], x[None, ..., :16], cos, sin)[1][0]
        found = rotate(x, POSITIONS, Rope(10000.0, 16))
        torch.testing.assert_close(found[..., :16], turned, rtol=0, atol=2e-6)
        assert torch.equal(found[..., 16:], x[..., 16:])

    def test_interleaved_and_partial(self) -> None:
        """GLM turns neighbouring pairs of the first half."""
        config = GlmConfig(
            hidden_size=32,
            num_attention_heads=1,
            head_dim=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        )
        x = keys(32)
        cos, sin = modeling_glm.GlmRotaryEmbedding(config)(x, POSITIONS[None])
        expected = modeling_glm.apply_rotary_pos_emb(x[None], x[None], cos, sin)[1][0]
        found = rotate(x, POSITIONS, Rope(10000.0, 16, interleaved=True))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("beta_fast, original", [(32.0, 16), (2.0, 4096), (1.0, 4096)])
    def test_yarn_that_leaves_the_length_alone(self, beta_fast: float, original: int) -> None:
        """Mistral Small 4: both scales of cosines and sines cancel out."""
        params: dict[str, Any] = {
            "factor": 128.0,
            "original_max_position_embeddings": original,
            "beta_fast": beta_fast,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        x, config = keys(64), llama(64, rope_type="yarn", rope_theta=10000.0, **params)
        found = rotate(x, POSITIONS, Rope(10000.0, 64, "yarn", tuple(sorted(params.items()))))
        torch.testing.assert_close(found, by_llama(x, config), rtol=0, atol=1e-3)

    def test_yarn_that_scales_is_refused(self) -> None:
        params = (("factor", 32.0), ("original_max_position_embeddings", 4096))
        with pytest.raises(LayoutError, match=r"'yarn' also scales keys by 1.347, which is not taken back"):
            rotate(keys(8), POSITIONS, Rope(1e4, 8, "yarn", params))

    def test_what_comes_first_is_left_alone(self) -> None:
        x = keys(32)
        found = rotate(x, POSITIONS, Rope(10000.0, 8, first=24))
        assert torch.equal(found[..., :24], x[..., :24])
        assert torch.equal(found[..., 24:], rotate(x[..., 24:], POSITIONS, Rope(10000.0, 8)))


class TestUnrotate:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dims", [16, 64])
    def test_takes_the_rotation_back(self, dims: int, interleaved: bool) -> None:
        x, rope = keys(64), Rope(10000.0, dims, interleaved=interleaved)
        turned = rotate(x, POSITIONS, rope)
        assert float((turned - x).abs().max()) > 1
        torch.testing.assert_close(unrotate(turned, POSITIONS, rope), x, rtol=0, atol=2e-6)

    def test_takes_back_what_transformers_turned(self) -> None:
        x = keys(64)
        turned = by_llama(x, llama(64, rope_type="default", rope_theta=10000.0))
        torch.testing.assert_close(unrotate(turned, POSITIONS, Rope(10000.0, 64)), x, rtol=0, atol=2e-6)

    def test_each_head_at_its_own_positions(self) -> None:
        x, rope = keys(8), Rope(100.0, 8)
        positions = torch.stack([POSITIONS, POSITIONS.flip(0)])
        found = rotate(x, positions, rope)
        for head in range(2):
            assert torch.equal(found[head], rotate(x[head], positions[head], rope))

    def test_without_rotation_nothing_is_touched(self) -> None:
        x = keys(8)
        assert rotate(x, POSITIONS, None) is x and unrotate(x, POSITIONS, None) is x

    def test_an_unknown_scaling_is_refused(self) -> None:
        with pytest.raises(
            LayoutError, match=r"RoPE kind 'longrope' cannot be un-rotated here \(known: default, linear"
        ):
            inverse_frequencies(Rope(10000.0, 8, "longrope", (("factor", 4.0),)))
