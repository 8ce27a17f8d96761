"""The tensors of an encoded segment, decoded once and kept while the segment lives.

The decoded copy is this harness's convenience, not the method's storage: sizes are read off the codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvassay.cache.codec import Axis, ChannelGroups, Code, Coefficients, Encoder, Float8, Mixed, Raw, Size, TokenGroups
from kvassay.cache.edits import KeyNorm, LowRank, Quantize
from kvassay.cache.rope import rotate, unrotate
from kvassay.layout.model import Rope


@dataclass
class Encoded:
    """Keys and values of one segment: `positions` int64 [kv_heads, n], -1 where padded."""

    positions: Tensor
    key: Code
    value: Code
    rope: Rope | None = None
    """Set when keys are stored before rotation and rotate again when read."""
    latent: int | None = None
    """Set where values are the first so many elements of the keys (MLA): then `value` is `key`, held once."""
    _keys: Tensor | None = field(default=None, repr=False)
    _values: Tensor | None = field(default=None, repr=False)

    def keys(self) -> Tensor:
        """float [kv_heads, n, k_dim], post-RoPE."""
        if self._keys is None:
            decoded = self.key.decode().contiguous()
            self._keys = rotate(decoded, self.positions.clamp(min=0), self.rope) if self.rope else decoded
        return self._keys

    def values(self) -> Tensor:
        """float [kv_heads, n, v_dim]."""
        if self.latent is not None:
            return self.keys()[..., : self.latent]
        if self._values is None:
            self._values = self.value.decode()
        return self._values

    @property
    def size(self) -> Size:
        """Both sides, as held; a latent once."""
        return self.key.size if self.latent is not None else self.key.size + self.value.size


@dataclass(frozen=True)
class Restored:
    """A code of rows [heads, tokens, dim] without their bias and before their norm, both put back when decoded."""

    code: Code
    bias: Tensor | None
    norm: KeyNorm | None

    def decode(self) -> Tensor:
        """float [heads, tokens, dim]."""
        x = with_bias(self.code.decode(), self.bias)
        if self.norm is None:
            return x
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm.eps)
        return x * scale * self.norm.weight.to(x.dtype)

    @property
    def size(self) -> Size:
        """Of the code: bias and norm are the model's."""
        return self.code.size


def with_bias(x: Tensor, bias: Tensor | None, sign: int = 1) -> Tensor:
    """Rows x [heads, tokens, dim] with bias [heads, dim] added, or taken off."""
    return x if bias is None else x + sign * bias.to(x.dtype)[:, None]


def quantized(edit: Quantize, k: Tensor, v: Tensor, positions: Tensor, *, one_side: bool = False) -> Encoded:
    """Encode k, v [kv_heads, n, dim] of tokens at `positions` [kv_heads, n] (-1 = not there).

    `edit`'s widths are already cut to these n tokens. one_side: v is the beginning of k, which is encoded once
    """
    present = positions >= 0
    key = _side(k, edit.key_bits, edit.key_axis, present, _encoder(edit, edit.key_axis))
    if one_side:
        return Encoded(positions, key, key, latent=v.shape[-1])
    return Encoded(
        positions,
        key,
        _side(v, edit.value_bits, "token", present, _encoder(edit, "token")),
    )


def low_rank(edit: LowRank, k: Tensor, v: Tensor, positions: Tensor, rope: Rope | None) -> Encoded:
    """Encode k, v [kv_heads, n, dim] as coefficients; all heads must hold the same tokens."""
    before = edit.domain == "pre_rope" and edit.key_encode is not None
    keys = unrotate(k, positions, rope) if before else k
    return Encoded(
        positions,
        low_rank_keys(edit, keys if edit.key_norm is None else edit.key_norm.rows.to(k.dtype)),
        low_rank_values(edit, v),
        rope if before else None,
    )


def low_rank_keys(edit: LowRank, keys: Tensor) -> Code:
    """Coefficients of keys [kv_heads, n, dim] in the edit's domain, before the norm if it has one."""
    code = _project(with_bias(keys, edit.key_bias, -1), edit.head_groups, edit.key_encode, edit.key_decode)
    return _restored(code, edit.key_bias, edit.key_norm)


def low_rank_values(edit: LowRank, values: Tensor) -> Code:
    """Coefficients of values [kv_heads, n, dim]."""
    groups = edit.value_groups or edit.head_groups
    code = _project(with_bias(values, edit.value_bias, -1), groups, edit.value_encode, edit.value_decode)
    return _restored(code, edit.value_bias, None)


def _restored(code: Code, bias: Tensor | None, norm: KeyNorm | None) -> Code:
    return code if bias is None and norm is None else Restored(code, bias, norm)


def _project(
    x: Tensor,
    head_groups: tuple[tuple[int, ...], ...],
    encode: tuple[Tensor, ...] | None,
    decode: tuple[Tensor, ...] | None,
) -> Code:
    if encode is None or decode is None:
        return Raw(x)
    return Coefficients.encode(x, head_groups, encode, decode)


def _encoder(edit: Quantize, axis: Axis) -> Encoder:
    def encode(x: Tensor, bits: int) -> Code:
        if edit.number == "fp8_e4m3":
            return Float8.encode(x)
        if bits == 16:
            return Raw(x)
        return (ChannelGroups if axis == "channel" else TokenGroups).encode(x, bits, edit.group, edit.clamp_zero)

    return encode


def _side(x: Tensor, bits: int | Tensor, axis: Axis, present: Tensor, encode: Encoder) -> Code:
    """One width and no holes in one piece, anything else head by head."""
    if isinstance(bits, Tensor):
        return Mixed.encode(x, bits, axis, present, encode)
    if bool(present.all()):
        return encode(x, bits)
    return Mixed.encode(x, torch.full((x.shape[0], x.shape[1 if axis == "token" else 2]), bits), axis, present, encode)
