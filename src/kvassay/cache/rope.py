"""Rotary embedding of cached keys, forward and back, at their true positions.

Half-split form, as `apply_rotary_pos_emb` of the Llama and Gemma files in transformers: the first `dims`
elements rotate, element i with element i + dims/2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvassay.errors import LayoutError
from kvassay.layout.model import Rope

KINDS = ("default", "linear", "llama3")


def rotate(x: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """Rotate x [..., tokens, dim] to integer `positions` [..., tokens]; None leaves it as it is (NoPE)."""
    return _turn(x, positions, rope, 1.0)


def unrotate(x: Tensor, positions: Tensor, rope: Rope | None) -> Tensor:
    """Take the rotation of `positions` back: `unrotate(rotate(x, p), p) == x` to rounding."""
    return _turn(x, positions, rope, -1.0)


def _turn(x: Tensor, positions: Tensor, rope: Rope | None, sign: float) -> Tensor:
    if rope is None:
        return x
    angle = positions.to(torch.float64)[..., None] * inverse_frequencies(rope)
    cos, sin = angle.cos().to(x.dtype), (sign * angle.sin()).to(x.dtype)
    half = rope.dims // 2
    a, b, rest = x[..., :half], x[..., half : rope.dims], x[..., rope.dims :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def inverse_frequencies(rope: Rope) -> Tensor:
    """float64 [dims / 2] angle per position; `LayoutError` for a scaling that is not known here."""
    base = rope.theta ** (-torch.arange(0, rope.dims, 2, dtype=torch.float64) / rope.dims)
    params = dict(rope.params)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / params["factor"]
    if rope.kind == "llama3":
        return _llama3(base, params)
    raise LayoutError(f"RoPE kind '{rope.kind}' cannot be un-rotated here (known: {', '.join(KINDS)})")


def _llama3(base: Tensor, params: dict[str, float]) -> Tensor:
    """Llama 3.1's piecewise scaling (transformers `modeling_rope_utils._compute_llama3_parameters`)."""
    factor, low, high = params["factor"], params["low_freq_factor"], params["high_freq_factor"]
    original = params["original_max_position_embeddings"]
    wavelength = 2 * math.pi / base
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return base / factor * (1 - smooth) + base * smooth
