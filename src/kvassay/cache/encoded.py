"""The tensors of an encoded segment, decoded once and kept while the segment lives.

The decoded copy is this harness's convenience, not the method's storage: sizes are read off the codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvassay.cache.codec import ChannelGroups, Code, Coefficients, Float8, Mixed, Raw, Size, TokenGroups
from kvassay.cache.edits import LowRank, Quantize
from kvassay.cache.rope import rotate, unrotate
from kvassay.errors import IllegalEdit
from kvassay.layout.model import Rope


@dataclass
class Encoded:
    """Keys and values of one segment: `positions` int64 [kv_heads, n], -1 where padded."""

    positions: Tensor
    key: Code
    value: Code
    rope: Rope | None = None
    """Set when keys are stored before rotation and rotate again when read."""
    _keys: Tensor | None = field(default=None, repr=False)
    _values: Tensor | None = field(default=None, repr=False)

    def keys(self) -> Tensor:
        """float [kv_heads, n, k_dim], post-RoPE."""
        if self._keys is None:
            decoded = self.key.decode()
            self._keys = rotate(decoded, self.positions.clamp(min=0), self.rope) if self.rope else decoded
        return self._keys

    def values(self) -> Tensor:
        """float [kv_heads, n, v_dim]."""
        if self._values is None:
            self._values = self.value.decode()
        return self._values

    @property
    def size(self) -> Size:
        """Both sides, as held."""
        return self.key.size + self.value.size


def quantized(edit: Quantize, k: Tensor, v: Tensor, positions: Tensor) -> Encoded:
    """Encode k, v [kv_heads, n, dim] of tokens at `positions` [kv_heads, n] (-1 = not there).

    `edit`'s widths are already cut to these n tokens.
    """
    present = positions >= 0
    if edit.number == "fp8_e4m3":
        if (edit.key_bits, edit.value_bits) != (8, 8):
            raise IllegalEdit(f"fp8_e4m3 has 8 bits, not key {edit.key_bits} and value {edit.value_bits}")
        return Encoded(positions, Float8.encode(k), Float8.encode(v))
    return Encoded(
        positions,
        _key_side(edit, k, present),
        _token_side(v, edit.value_bits, present, edit.group),
    )


def low_rank(edit: LowRank, k: Tensor, v: Tensor, positions: Tensor, rope: Rope | None) -> Encoded:
    """Encode k, v [kv_heads, n, dim] as coefficients; all heads must hold the same tokens."""
    if not bool((positions >= 0).all()):
        raise IllegalEdit("low rank needs the same tokens in every KV head of a head group")
    before = edit.domain == "pre_rope" and edit.key_encode is not None
    keys = unrotate(k, positions, rope) if before else k
    return Encoded(
        positions,
        _project(keys, edit.head_groups, edit.key_encode, edit.key_decode),
        _project(v, edit.head_groups, edit.value_encode, edit.value_decode),
        rope if before else None,
    )


def _project(
    x: Tensor,
    head_groups: tuple[tuple[int, ...], ...],
    encode: tuple[Tensor, ...] | None,
    decode: tuple[Tensor, ...] | None,
) -> Code:
    if encode is None or decode is None:
        return Raw(x)
    return Coefficients.encode(x, head_groups, encode, decode)


def _key_side(edit: Quantize, k: Tensor, present: Tensor) -> Code:
    if edit.key_axis == "token":
        return _token_side(k, edit.key_bits, present, edit.group)
    if isinstance(edit.key_bits, int) and bool(present.all()):
        return Raw(k) if edit.key_bits == 16 else ChannelGroups.encode(k, edit.key_bits, edit.group)
    bits = _as_tensor(edit.key_bits, (k.shape[0], k.shape[2]))
    return Mixed.encode(k, bits, 1, present)


def _token_side(x: Tensor, bits: int | Tensor, present: Tensor, group: int | None) -> Code:
    if isinstance(bits, int) and bool(present.all()):
        return Raw(x) if bits == 16 else TokenGroups.encode(x, bits, group)
    return Mixed.encode(x, _as_tensor(bits, (x.shape[0], x.shape[1])), 0, present)


def _as_tensor(bits: int | Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.full(shape, bits) if isinstance(bits, int) else bits
