"""Encoded keys and values: real packed bits with float16 scales, and low-rank coefficients.

Every encoder returns tensors as an engine would hold them; their size is read off the tensors, never
declared. Widths are 2, 4 and 8 bits, least significant code first in each byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

WIDTHS = (2, 4, 8)
Axis = Literal["token", "channel"]


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
        """float32 of the shape that was encoded; dropped tokens and channels are zero."""


Encoder = Callable[[Tensor, int], Code]
"""Encodes [..., tokens, dim] at a width in bits; decodes to the same shape."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [..., length] into uint8 [..., ceil(length * bits / 8)]; the tail is zero."""
    per = 8 // bits
    pad = -codes.shape[-1] % per
    grouped = torch.nn.functional.pad(codes.to(torch.uint8), (0, pad)).unflatten(-1, (-1, per))
    shifts = torch.arange(per, dtype=torch.uint8) * bits
    return (grouped << shifts).sum(-1, dtype=torch.uint8)


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
    def encode(cls, x: Tensor, bits: int, clamp_zero: bool = False) -> Packed:
        """Encode x [..., length]; one scale and zero for each row of `length` elements.

        clamp_zero: keep the zero point within the codes, so that a row far from 0 saturates (as some methods do)
        """
        low, high = x.amin(-1), x.amax(-1)
        if clamp_zero:
            most = 2**bits - 1
            unit = ((high - low) / most).clamp(min=1e-12)
            low = -(-low / unit).clamp(0, most).round() * unit
            high = low + most * unit
        zero = low.to(torch.float16)
        span = (high - zero.float()).clamp(min=0)
        scale = (span / (2**bits - 1)).to(torch.float16)
        step = scale.float()[..., None]
        level = (x - zero.float()[..., None]).div_(step).masked_fill_(~(step > 0), 0)
        return cls(pack(level.round_().clamp_(0, 2**bits - 1), bits), scale, zero, bits, x.shape[-1])

    def decode(self) -> Tensor:
        """float32 [..., length]."""
        codes = unpack(self.codes, self.bits, self.length).float()
        return codes.mul_(self.scale.float()[..., None]).add_(self.zero.float()[..., None])

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
    def encode(cls, x: Tensor, bits: int, group: int | None, clamp_zero: bool = False) -> TokenGroups:
        """Encode x [..., tokens, dim]; `group` must divide dim (None = the whole head dimension)."""
        size = group or x.shape[-1]
        return cls(Packed.encode(x.unflatten(-1, (-1, size)), bits, clamp_zero))

    def decode(self) -> Tensor:
        """float32 [..., tokens, dim]."""
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
    def encode(cls, x: Tensor, bits: int, group: int | None, clamp_zero: bool = False) -> ChannelGroups:
        """Encode x [..., tokens, dim]; the last group may be shorter (None = all tokens in one)."""
        tokens = x.shape[-2]
        size = group or tokens
        whole = tokens // size * size
        channels = x.transpose(-1, -2)
        return cls(
            Packed.encode(channels[..., :whole].unflatten(-1, (-1, size)), bits, clamp_zero) if whole else None,
            Packed.encode(channels[..., whole:], bits, clamp_zero) if whole < tokens else None,
        )

    def decode(self) -> Tensor:
        """float32 [..., tokens, dim]."""
        parts = [] if self.full is None else [self.full.decode().flatten(-2)]
        if self.rest is not None:
            parts.append(self.rest.decode())
        return torch.cat(parts, dim=-1).transpose(-1, -2)

    @property
    def size(self) -> Size:
        """As packed."""
        return sum((p.size for p in (self.full, self.rest) if p is not None), Size())


@dataclass(frozen=True)
class Part:
    """One class of one head in a `Mixed`: the tokens or channels `index` that `code` decodes to."""

    head: int
    index: Tensor
    code: Code


@dataclass(frozen=True)
class Mixed:
    """Classes of tokens or channels at different widths, per head; what is in no class is dropped (0 bits)."""

    dim: int
    axis: Axis
    present: Tensor
    """bool [heads, tokens]: the tokens that are stored at all."""
    parts: tuple[Part, ...]

    @classmethod
    def encode(cls, x: Tensor, bits: Tensor, axis: Axis, present: Tensor, encoder: Encoder) -> Mixed:
        """Encode x [heads, tokens, dim] with widths bits [heads, tokens] or [heads, dim], as `axis` says.

        present: bool [heads, tokens]; other rows are not stored at all
        encoder: encodes each head's class, [tokens, dim] of its tokens (or channels) alone, at one width
        """
        parts: list[Part] = []
        for head, rows in enumerate(present):
            units = bits[head] if axis == "channel" else bits[head].masked_fill(~rows, 0)
            for width in (*WIDTHS, 16):
                index = (units == width).nonzero().flatten()
                block = x[head, rows][:, index] if axis == "channel" else x[head, index]
                if block.numel():
                    parts.append(Part(head, index, encoder(block, width)))
        return cls(x.shape[2], axis, present, tuple(parts))

    def decode(self) -> Tensor:
        """float32 [heads, tokens, dim]."""
        out = torch.zeros(*self.present.shape, self.dim)
        for part in self.parts:
            if self.axis == "channel":
                rows = self.present[part.head].nonzero()
                out[part.head, rows, part.index] = part.code.decode()
            else:
                out[part.head, part.index] = part.code.decode()
        return out

    @property
    def size(self) -> Size:
        """All classes, and 4 bytes per token or channel to say which class it is in where one is not the whole."""
        body = sum((part.code.size for part in self.parts), Size())
        listed = [len(part.index) for part in self.parts if len(part.index) < self._units(part.head)]
        return body + Size(metadata=4 * sum(listed))

    def _units(self, head: int) -> int:
        return self.dim if self.axis == "channel" else int(self.present[head].sum())


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
        coefficients = tuple(r @ e.to(r.dtype) for r, e in zip(rows, encoders, strict=True))
        return cls(coefficients, tuple(d.to(x.dtype) for d in decoders), head_groups)

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
