"""Rotary embedding of cached keys, forward and back, at their true positions.

As `apply_rotary_pos_emb` in transformers: `dims` elements from the first on (MLA: after the latent) rotate in pairs,
element i with element i + dims/2 (Llama, Gemma) or with its neighbour (`interleaved`: GLM, Cohere). Angles are float32
products, as engines compute them, so that taking a rotation back takes back exactly what they turned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvassay.errors import LayoutError
from kvassay.layout.model import Rope

KINDS = ("default", "linear", "llama3", "yarn")
YARN = ("factor", "original_max_position_embeddings")
"""What YaRN cannot do without."""


def rotate(x: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x [..., tokens, dim] to integer `positions` [..., tokens]; None leaves it as it is (NoPE)."""
    return _turn(x, positions, rope, 1.0)


def unrotate(x: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """Take the rotation of `positions` back: `unrotate(rotate(x, p), p) == x` to rounding."""
    return _turn(x, positions, rope, -1.0)


def _turn(x: Tensor, positions: Tensor, rope: Rope | None, sign: float) -> Tensor:
    if rope is None:
        return x
    angle = positions.float()[..., None] * inverse_frequencies(rope)
    cos, sin = angle.cos().to(x.dtype), (sign * angle.sin()).to(x.dtype)
    end = rope.first + rope.dims
    before, turning, rest = x[..., : rope.first], x[..., rope.first : end], x[..., end:]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if rope.interleaved else turning.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, -1).flatten(-2) if rope.interleaved else torch.cat(pairs, -1)
    return torch.cat([before, turned, rest], -1)


def not_undone(rope: Rope | None) -> str | None:
    """Why a rotation cannot be taken back here; None if it can."""
    if rope is None:
        return None
    if rope.kind not in KINDS:
        return f"RoPE kind '{rope.kind}' cannot be un-rotated here (known: {', '.join(KINDS)})"
    params = dict(rope.params)
    lacking = [key for key in YARN if params.get(key) is None] if rope.kind == "yarn" else []
    if lacking:
        return f"RoPE kind 'yarn' cannot be un-rotated here without its '{lacking[0]}'"
    stretch = _stretch(params) if rope.kind == "yarn" else 1.0
    return (
        None if stretch == 1.0 else f"RoPE kind 'yarn' also scales keys by {stretch:.4g}, which is not taken back here"
    )


def inverse_frequencies(rope: Rope) -> Tensor:
    """float32 [dims / 2] angle per position; `LayoutError` for a scaling that is not known here."""
    if reason := not_undone(rope):
        raise LayoutError(reason)
    base = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2).float() / rope.dims)
    params = dict(rope.params)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / params["factor"]
    return _yarn(base, rope, params) if rope.kind == "yarn" else _llama3(base, params)


def _llama3(base: Tensor, params: dict[str, float]) -> Tensor:
    """Llama 3.1's piecewise scaling (transformers `modeling_rope_utils._compute_llama3_parameters`)."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    original = params["original_max_position_embeddings"]
    wavelength = 2 * math.pi / base
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return base / factor * (1 - smooth) + base * smooth


def _stretch(params: dict[str, float]) -> float:
    """What YaRN multiplies cosines and sines by."""

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(params["factor"]) + 1.0 if params["factor"] > 1 else 1.0

    if params.get("attention_factor") is not None:
        return params["attention_factor"]
    mscale, whole = params.get("mscale"), params.get("mscale_all_dim")
    return growth(mscale) / growth(whole) if mscale and whole else growth(1.0)


def _yarn(base: Tensor, rope: Rope, params: dict[str, float]) -> Tensor:
    """YaRN's ramp between kept and divided frequencies (transformers `_compute_yarn_parameters`)."""

    def dimension(turns: float) -> float:
        length = params["original_max_position_embeddings"]
        return rope.dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    high += 0.001 if low == high else 0
    divided = ((torch.arange(rope.dims // 2).float() - low) / (high - low)).clamp(0, 1)
    return base / params["factor"] * divided + base * (1 - divided)
