"""Rotary embedding of cached keys, forward and back, at their true positions.

As `apply_rotary_pos_emb` in transformers: the first `dims` elements rotate in pairs, element i with element
i + dims/2 (Llama, Gemma) or with its neighbour (`interleaved`: GLM, Cohere). Angles are float32 products, as
engines compute them, so that taking a rotation back takes back exactly what they turned.
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
    angle = positions.float()[..., None] * inverse_frequencies(rope)
    cos, sin = angle.cos().to(x.dtype), (sign * angle.sin()).to(x.dtype)
    turning, rest = x[..., : rope.dims], x[..., rope.dims :]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if rope.interleaved else turning.chunk(2, -1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, -1).flatten(-2) if rope.interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1)


def inverse_frequencies(rope: Rope) -> Tensor:
    """float32 [dims / 2] angle per position; `LayoutError` for a scaling that is not known here."""
    base = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2).float() / rope.dims)
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
