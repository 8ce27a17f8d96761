"""Encoded keys and values: real packed bits with float16 scales, and low-rank coefficients.

Every encoder returns tensors as an engine would hold them; their size is read off the tensors, never
declared. Widths are 2, 4 and 8 bits, least significant code first in each byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

WIDTHS = (2, 4, 8)


@dataclass(frozen=True)
class Size:
    """Bytes by kind; `raw_elements` are unencoded and billed at the layout's `kv_dtype`."""

    payload: int = 0
    metadata: int = 0
    padding: int = 0
    raw_elements: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.payload + other.payload,
            self.metadata + other.metadata,
            self.padding + other.padding,
            self.raw_elements + other.raw_elements,
        )

    def total(self, element_bytes: float) -> float:
        """All bytes, with unencoded elements at `element_bytes` each."""
        return self.payload + self.metadata + self.padding + self.raw_elements * element_bytes


class Code(Protocol):
    """One side (keys or values) of an encoded run of tokens."""

    @property
    def size(self) -> Size:
        """Bytes as held."""

    def decode(self) -> Tensor:
        """float32 [kv_heads, tokens, dim]; rows of dropped tokens are zero."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [..., length] into uint8 [..., ceil(length * bits / 8)]; the tail is zero."""
    per = 8 // bits
    pad = -codes.shape[-1] % per
    grouped = torch.nn.functional.pad(codes.to(torch.uint8), (0, pad)).unflatten(-1, (-1, per))
    shifts = torch.arange(per, dtype=torch.uint8) * bits
    return (grouped << shifts).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """Inverse of `pack`: uint8 codes [..., length]."""
    per = 8 // bits
    shifts = torch.arange(per, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :length]


@dataclass(frozen=True)
class Packed:
    """Rows of elements that share a scale: asymmetric min/max codes, float16 scale and zero per row."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    length: int

    @classmethod
    def encode(cls, x: Tensor, bits: int) -> Packed:
        """Encode x [..., length]; one scale and zero for each row of `length` elements."""
        low, high = x.amin(-1), x.amax(-1)
        zero = low.to(torch.float16)
        span = (high - zero.float()).clamp(min=0)
        scale = (span / (2**bits - 1)).to(torch.float16)
        step = scale.float()[..., None]
        level = torch.where(step > 0, (x - zero.float()[..., None]) / step, torch.zeros_like(x))
        return cls(pack(level.round().clamp(0, 2**bits - 1), bits), scale, zero, bits, x.shape[-1])

    def decode(self) -> Tensor:
        """float32 [..., length]."""
        codes = unpack(self.codes, self.bits, self.length).float()
        return codes * self.scale.float()[..., None] + self.zero.float()[..., None]

    @property
    def size(self) -> Size:
        """Payload bits rounded up to whole bytes per row, scales and zeros as metadata."""
        rows = self.scale.numel()
        payload = rows * self.length * self.bits // 8
        return Size(payload, 2 * (self.scale.numel() + self.zero.numel()), self.codes.numel() - payload)


@dataclass(frozen=True)
class Raw:
    """Elements kept as the model wrote them."""

    x: Tensor

    def decode(self) -> Tensor:
        """The elements."""
        return self.x

    @property
    def size(self) -> Size:
        """Unencoded elements."""
        return Size(raw_elements=self.x.numel())


@dataclass(frozen=True)
class Float8:
    """e4m3 without a scale, as an engine's `fp8` cache with scale 1.0."""

    x: Tensor

    @classmethod
    def encode(cls, x: Tensor) -> Float8:
        """Saturate at +-448 and round to e4m3."""
        return cls(x.clamp(-448, 448).to(torch.float8_e4m3fn))

    def decode(self) -> Tensor:
        """float32 of the same shape."""
        return self.x.float()

    @property
    def size(self) -> Size:
        """One byte per element."""
        return Size(payload=self.x.numel())


@dataclass(frozen=True)
class TokenGroups:
    """A scale per token over groups of `group` channels; the same width for all."""

    packed: Packed

    @classmethod
    def encode(cls, x: Tensor, bits: int, group: int | None) -> TokenGroups:
        """Encode x [heads, tokens, dim]; `group` must divide dim (None = the whole head dimension)."""
        size = group or x.shape[-1]
        return cls(Packed.encode(x.unflatten(-1, (-1, size)), bits))

    def decode(self) -> Tensor:
        """float32 [heads, tokens, dim]."""
        return self.packed.decode().flatten(-2)

    @property
    def size(self) -> Size:
        """As packed."""
        return self.packed.size


@dataclass(frozen=True)
class ChannelGroups:
    """A scale per channel over groups of `group` tokens; the same width for all."""

    full: Packed | None
    rest: Packed | None

    @classmethod
    def encode(cls, x: Tensor, bits: int, group: int | None) -> ChannelGroups:
        """Encode x [heads, tokens, dim]; the last group may be shorter (None = all tokens in one)."""
        size = group or x.shape[1]
        whole = x.shape[1] // size * size
        full = x[:, :whole].unflatten(1, (-1, size)).transpose(2, 3) if whole else None
        rest = x[:, whole:].transpose(1, 2) if whole < x.shape[1] else None
        return cls(
            Packed.encode(full, bits) if full is not None else None,
            Packed.encode(rest, bits) if rest is not None else None,
        )

    def decode(self) -> Tensor:
        """float32 [heads, tokens, dim]."""
        parts = []
        if self.full is not None:
            parts.append(self.full.decode().transpose(2, 3).flatten(1, 2))
        if self.rest is not None:
            parts.append(self.rest.decode().transpose(1, 2))
        return torch.cat(parts, dim=1)

    @property
    def size(self) -> Size:
        """As packed."""
        return sum((p.size for p in (self.full, self.rest) if p is not None), Size())


@dataclass(frozen=True)
class Mixed:
    """Classes of rows or channels at different widths, per head; what is in no class is dropped (0 bits).

    Each part holds (head, index, axis, code): `index` are the tokens (axis 0) or channels (axis 1) of
    that head's [tokens, dim] that `code` decodes to.
    """

    dim: int
    present: Tensor
    """bool [heads, tokens]: the tokens that are stored at all."""
    parts: tuple[tuple[int, Tensor, int, Packed | Raw], ...]

    @classmethod
    def encode(cls, x: Tensor, bits: Tensor, axis: int, present: Tensor) -> Mixed:
        """Encode x [heads, tokens, dim] with widths bits [heads, tokens] (axis 0) or [heads, dim] (axis 1).

        present: bool [heads, tokens]; rows outside are not stored at all. Axis 0 has a scale per token
        over the head dimension, axis 1 a scale per channel over all present tokens.
        """
        parts: list[tuple[int, Tensor, int, Packed | Raw]] = []
        for head in range(x.shape[0]):
            rows = present[head].nonzero().flatten()
            units = bits[head] if axis == 1 else torch.where(present[head], bits[head], 0)
            for width in (*WIDTHS, 16):
                index = (units == width).nonzero().flatten()
                if len(index) == 0 or len(rows) == 0:
                    continue
                block = x[head][rows][:, index].T if axis == 1 else x[head][index]
                parts.append((head, index, axis, Raw(block) if width == 16 else Packed.encode(block, width)))
        return cls(x.shape[2], present, tuple(parts))

    def decode(self) -> Tensor:
        """float32 [heads, tokens, dim]."""
        out = torch.zeros(*self.present.shape, self.dim)
        for head, index, axis, code in self.parts:
            if axis == 1:
                rows = self.present[head].nonzero().flatten()
                out[head, rows[:, None], index[None]] = code.decode().T
            else:
                out[head, index] = code.decode()
        return out

    @property
    def size(self) -> Size:
        """All classes, plus a 4-byte index per row or channel in each class's order."""
        body = sum((code.size for *_, code in self.parts), Size())
        return body + Size(metadata=sum(4 * len(index) for _, index, _, _ in self.parts))


@dataclass(frozen=True)
class Coefficients:
    """Low-rank coefficients per head group; `decode` maps [rank] back to the group's [heads * dim].

    The decoder bases belong to the artefact (one per model, not per sequence) and are billed there.
    """

    coefficients: tuple[Tensor, ...]
    decoders: tuple[Tensor, ...]
    head_groups: tuple[tuple[int, ...], ...]

    @classmethod
    def encode(
        cls,
        x: Tensor,
        head_groups: tuple[tuple[int, ...], ...],
        encoders: Sequence[Tensor],
        decoders: Sequence[Tensor],
    ) -> Coefficients:
        """Project x [heads, tokens, dim]: each head group's rows [tokens, heads * dim] @ [heads * dim, rank]."""
        rows = [x[list(heads)].transpose(0, 1).flatten(1) for heads in head_groups]
        return cls(tuple(r @ e for r, e in zip(rows, encoders, strict=True)), tuple(decoders), head_groups)

    def decode(self) -> Tensor:
        """float32 [heads, tokens, dim]."""
        heads = sum(len(g) for g in self.head_groups)
        first = self.decoders[0]
        dim = first.shape[1] // len(self.head_groups[0])
        out = first.new_empty(heads, self.coefficients[0].shape[0], dim)
        for group, c, d in zip(self.head_groups, self.coefficients, self.decoders, strict=True):
            out[list(group)] = (c @ d).unflatten(1, (len(group), dim)).transpose(0, 1)
        return out

    @property
    def size(self) -> Size:
        """Coefficients at the layout's `kv_dtype`."""
        return Size(raw_elements=sum(c.numel() for c in self.coefficients))
