"""Bytes of published models at long contexts, exact to the byte, against hand sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import LayoutError
from kvassay.layout.bytes import ByteCount, Growth, bytes_at, bytes_per_token
from kvassay.layout.config import from_config
from tests.layout.configs import PUBLISHED

K128, M1 = 131_072, 1_048_576
GIB, MIB, KIB = 2**30, 2**20, 2**10

# GiB of one request in bf16 at 128K and at 1M: growing state (full + latent + pooled), index, sliding.
GIB_128K_1M = {
    "llama-3.1-8b": ((16, 0, 0), (128, 0, 0)),
    "mistral-nemo-12b": ((20, 0, 0), (160, 0, 0)),
    "qwen3-8b": ((18, 0, 0), (144, 0, 0)),
    "granite-4.1-3b": ((10, 0, 0), (80, 0, 0)),
    "hy3": ((40, 0, 0), (320, 0, 0)),
    "gemma-3-12b": ((8, 0, 320 / 1024), (64, 0, 320 / 1024)),
    "gemma-3-27b": ((10, 0, 416 / 1024), (80, 0, 416 / 1024)),
    "gemma-4-e2b": ((0.75, 0, 6 / 1024), (6, 0, 6 / 1024)),
    "gemma-4-e4b": ((2, 0, 20 / 1024), (16, 0, 20 / 1024)),
    "gemma-4-12b": ((2, 0, 320 / 1024), (16, 0, 320 / 1024)),
    "gemma-4-26b-a4b": ((2.5, 0, 200 / 1024), (20, 0, 200 / 1024)),
    "gemma-4-31b": ((10, 0, 800 / 1024), (80, 0, 800 / 1024)),
    "gpt-oss-20b": ((3, 0, 3 / 1024), (24, 0, 3 / 1024)),
    "laguna-s-2.1": ((6, 0, 72 / 1024), (48, 0, 72 / 1024)),
    "step-3.7-flash": ((6, 0, 66 / 1024), (48, 0, 66 / 1024)),
    "north-mini-code-1.0": ((3.25, 0, 288 / 1024), (26, 0, 288 / 1024)),
    "mimo-v2-flash": ((2.8125, 0, 24.375 / 1024), (22.5, 0, 24.375 / 1024)),
    "mistral-small-4": ((2.8125, 0, 0), (22.5, 0, 0)),
    "deepseek-v3.2": ((8.578125, 1.90625, 0), (68.625, 15.25, 0)),
    "glm-5.2": ((10.96875, 0.65625, 0), (87.75, 5.25, 0)),
    "deepseek-v4-flash": ((0.67578125, 0.1640625, 5.375 / 1024), (5.40625, 1.3125, 5.375 / 1024)),
    "minimax-m3": ((15, 1.78125, 0), (120, 14.25, 0)),
}


@pytest.mark.parametrize("name", GIB_128K_1M)
def test_published_models(name: str) -> None:
    layout = from_config(PUBLISHED[name])
    for context, (growing, index, sliding) in zip((K128, M1), GIB_128K_1M[name], strict=True):
        count = bytes_at(layout, context)
        got = (count.full + count.latent + count.pooled, count.index, count.sliding)
        assert got == (growing * GIB, index * GIB, sliding * GIB)
        assert count.total == sum(got)


def test_embedded_models() -> None:
    assert bytes_at(from_config("smollm2-135m"), 8192) == ByteCount(full=30 * 3 * 128 * 2 * 8192)
    gemma = from_config("gemma-3-270m")
    assert bytes_at(gemma, 512) == ByteCount(full=3 * KIB * 512, sliding=15 * KIB * 512)
    assert bytes_at(gemma, 513) == ByteCount(full=3 * KIB * 513, sliding=15 * KIB * 512)
    assert bytes_per_token(gemma) == Growth(full=3 * KIB, sliding=15 * KIB)


def test_kinds_are_kept_apart() -> None:
    v4 = bytes_at(from_config(PUBLISHED["deepseek-v4-flash"]), 1000)
    assert v4.sliding == 43 * 128 * 512 * 2
    assert v4.pooled == (21 * (1000 // 4) + 20 * (1000 // 128)) * 512 * 2
    assert v4.index == 21 * (1000 // 4) * 128 * 2
    assert (v4.full, v4.latent) == (0, 0)
    assert v4.pending == (20 * 128 * 1024 + 21 * 8 * 2560) * 4  # 20 x 0.5 MiB, and 21 x 80 KiB
    assert v4.total == v4.sliding + v4.pooled + v4.index


def test_growth_of_compressed_state_is_fractional() -> None:
    growth = bytes_per_token(from_config(PUBLISHED["deepseek-v4-flash"]))
    assert growth == Growth(pooled=21 * 256 + 20 * 8, index=21 * 64, sliding=43 * KIB)
    assert growth.growing == 6880


@pytest.mark.parametrize(
    ("name", "gib"),
    [("gemma-4-31b", 880), ("mimo-v2-flash", 217.5), ("gpt-oss-20b", 48), ("deepseek-v4-flash", 49.71875)],
)
def test_without_a_hybrid_manager_sliding_layers_keep_everything(name: str, gib: float) -> None:
    assert bytes_at(from_config(PUBLISHED[name]), M1, hybrid_manager=False).total == gib * GIB


def test_dtype() -> None:
    layout = from_config(PUBLISHED["llama-3.1-8b"])
    assert bytes_at(layout, 10, "fp8_e4m3").total * 2 == bytes_at(layout, 10).total
    assert bytes_at(from_config(PUBLISHED["llama-3.1-8b"], kv_dtype="float32"), 10).total == 10 * 262_144
    with pytest.raises(LayoutError, match=r"unknown cache dtype 'bf16'.*bfloat16"):
        bytes_at(layout, 10, "bf16")
    with pytest.raises(LayoutError, match="context is -1"):
        bytes_at(layout, -1)


@given(st.sampled_from(sorted(PUBLISHED)), st.integers(0, 3 * M1))
def test_one_more_token_costs_at_most_the_growth_plus_one_entry(name: str, context: int) -> None:
    layout, rate = from_config(PUBLISHED[name]), bytes_per_token(from_config(PUBLISHED[name]))
    now, then = bytes_at(layout, context), bytes_at(layout, context + 1)
    assert then.full - now.full == rate.full and then.latent - now.latent == rate.latent
    assert then.sliding - now.sliding in (0, rate.sliding)
    assert then.pooled - now.pooled in ([0] if not rate.pooled else [0, 21 * 1024, 41 * 1024])
    assert bytes_at(layout, 0).total == 0
