"""Encoded keys or values as flat buffers and a table of parts, the form in which a kernel reads codes.

`flatten` lays the tensors of a `Code` behind each other: nothing is decoded, no bit is added. Channels that share a
scale over a group of tokens are laid group by group, so that a kernel reads memory in order. Parts
say, per KV head, what lies where; their columns are the constants below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvassay.cache.codec import ChannelGroups, Code, Coefficients, Float8, Mixed, Packed, Raw, TokenGroups
from kvassay.errors import KernelError
from kvassay.layout.model import Rope

ROWS, FLOAT8, TOKENS, CHANNELS = range(4)
"""Kinds of part: float32 rows; e4m3 rows; packed rows with a scale per token and group of channels; packed
channels with a scale per channel and group of tokens."""

KIND, COUNT, WIDTH, BITS, GROUP, DATA, SCALE, ROW_INDEX, FIRST_ROW, COLUMN_INDEX, BASIS = range(11)
"""Columns of the table. COUNT rows by WIDTH elements (channels); BITS per code; GROUP elements that share a scale;
DATA, SCALE: where in `floats` or `codes`, and in `scales`, the part begins; ROW_INDEX, COLUMN_INDEX: where in
`index` its rows and channels are listed, ascending, -1 for FIRST_ROW onwards and for all channels; BASIS: where in
`bases` the [WIDTH, dim] matrix begins that maps its rows back, -1 for none."""

FIELDS = 11
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class PackedSide:
    """Keys or values of one segment, or of several in a row: `rows` tokens of `dim` elements per KV head.

    parts: int64 [parts, FIELDS], by head; `first` int32 [kv_heads + 1], head h has parts first[h] to first[h + 1]
    codes: uint8, packed codes or e4m3; floats: float32 rows; scales: float16 as uint16, [scales, 2] scale and zero
    index: int32 rows and channels of parts that are not the whole; bases: float32, shared by all segments of a layer
    rope: set when the rows are keys before rotation
    origin: the codes it was laid out from
    """

    dim: int
    rows: int
    parts: NDArray[np.int64]
    first: NDArray[np.int32]
    codes: NDArray[np.uint8]
    floats: NDArray[np.float32]
    scales: NDArray[np.uint16]
    index: NDArray[np.int32]
    bases: NDArray[np.float32]
    rope: Rope | None
    origin: tuple[Code, ...]

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return len(self.first) - 1

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads of it as held here: float32 rows at 4 bytes, the table and the bases left out."""
        return self.codes.nbytes + self.floats.nbytes + self.scales.nbytes + self.index.nbytes


def flatten(codes: Sequence[Code], rope: Rope | None = None) -> PackedSide:
    """One side of segments laid one after the other, each [kv_heads, rows, dim] when decoded.

    rope: set when these are keys that rotate when read
    Low-rank codes stand alone: `KernelError` if there are others beside one.
    """
    shapes = [_shape(code) for code in codes]
    if len(codes) > 1 and any(isinstance(code, Coefficients) for code in codes):
        raise KernelError(f"{len(codes)} segments cannot be read as one: low-rank codes among them")
    flat, first = _Flat(), [0]
    for head in range(shapes[0][0]):
        done = 0
        for code, (_, rows, _) in zip(codes, shapes, strict=True):
            for part in _parts(code, head):
                flat.add(part, done)
            done += rows
        first.append(len(flat.parts))
    return flat.side(shapes[0][2], sum(rows for _, rows, _ in shapes), first, rope, tuple(codes))


@dataclass(frozen=True)
class _Part:
    """One code of one head, without a head axis; `index` None where it is all rows (or channels) in order."""

    code: Code
    rows: Tensor | None = None
    columns: Tensor | None = None
    basis: Tensor | None = None
    """float32 [width, dim]; then `code` is the rows' coefficients."""


def _shape(code: Code) -> tuple[int, int, int]:
    match code:
        case Mixed(present=present, dim=dim):
            return present.shape[0], present.shape[1], dim
        case Raw(x=x) | Float8(x=x):
            return x.shape[0], x.shape[1], x.shape[2]
        case TokenGroups(packed=packed):
            heads, rows, groups = packed.scale.shape
            return heads, rows, groups * packed.length
        case ChannelGroups(full=full, rest=rest):
            some = full if full is not None else rest
            assert some is not None  # a code holds at least one token
            whole = 0 if full is None else full.scale.shape[2] * full.length
            return some.scale.shape[0], whole + (0 if rest is None else rest.length), some.scale.shape[1]
        case Coefficients(coefficients=coefficients, decoders=decoders, head_groups=groups):
            heads = sum(map(len, groups))
            return heads, coefficients[0].shape[0], decoders[0].shape[1] // len(groups[0])
    raise KernelError(f"no kernel reads codes of type {type(code).__name__}")


def _parts(code: Code, head: int) -> Iterator[_Part]:
    """What one head's rows are held in."""
    match code:
        case Mixed():
            yield from _classes(code, head)
        case Coefficients(coefficients=coefficients, decoders=decoders, head_groups=groups):
            number, group = next((i, g) for i, g in enumerate(groups) if head in g)
            basis = decoders[number].unflatten(1, (len(group), -1))[:, group.index(head)]
            yield _Part(Raw(coefficients[number]), basis=basis)
        case _:
            yield _Part(_of_head(code, head))


def _classes(code: Mixed, head: int) -> Iterator[_Part]:
    present = code.present[head].nonzero().flatten()
    for part in code.parts:
        if part.head != head:
            continue
        if code.axis == "token":
            yield _Part(part.code, rows=_unless_all(part.index, code.present.shape[1]))
        else:
            rows = _unless_all(present, code.present.shape[1])
            yield _Part(part.code, rows=rows, columns=_unless_all(part.index, code.dim))


def _unless_all(index: Tensor, length: int) -> Tensor | None:
    return None if len(index) == length else index


def _of_head(code: Code, head: int) -> Code:
    match code:
        case Raw(x=x):
            return Raw(x[head])
        case Float8(x=x):
            return Float8(x[head])
        case TokenGroups(packed=packed):
            return TokenGroups(_packed_of(packed, head))
        case ChannelGroups(full=full, rest=rest):
            return ChannelGroups(*(None if one is None else _packed_of(one, head) for one in (full, rest)))
    raise KernelError(f"no kernel reads codes of type {type(code).__name__}")


def _packed_of(packed: Packed, head: int) -> Packed:
    return Packed(packed.codes[head], packed.scale[head], packed.zero[head], packed.bits, packed.length)


@dataclass
class _Flat:
    """Buffers under construction."""

    parts: list[list[int]] = field(default_factory=list)
    codes: list[Tensor] = field(default_factory=list)
    floats: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    index: list[Tensor] = field(default_factory=list)
    bases: list[Tensor] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)
    """Where coefficients that several heads share have been put, by their address."""

    def add(self, part: _Part, first: int) -> None:
        """Add a part whose segment begins at row `first`."""
        rows = -1 if part.rows is None else _put(self.index, part.rows.to(torch.int32) + first)
        columns = -1 if part.columns is None else _put(self.index, part.columns.to(torch.int32))
        match part.code:
            case Raw(x=x) if part.basis is not None:
                basis = _put(self.bases, part.basis.float())
                if x.data_ptr() not in self.seen:
                    self.seen[x.data_ptr()] = _put(self.floats, x.float())
                self._row(ROWS, *x.shape, 0, 0, self.seen[x.data_ptr()], 0, rows, first, columns, basis)
            case Raw(x=x):
                self._row(ROWS, *x.shape, 0, 0, _put(self.floats, x.float()), 0, rows, first, columns, -1)
            case Float8(x=x):
                place = _put(self.codes, x.view(torch.uint8))
                self._row(FLOAT8, *x.shape, 8, 0, place, 0, rows, first, columns, -1)
            case TokenGroups(packed=p):
                count, groups = p.scale.shape
                where = self._packed(p)
                self._row(TOKENS, count, groups * p.length, p.bits, p.length, *where, rows, first, columns, -1)
            case ChannelGroups(full=full, rest=rest):
                done = 0
                for one in (full, rest):
                    if one is not None:
                        width, count = one.scale.shape[0], one.length * one.scale[0].numel()
                        begin = rows if rows < 0 else rows + done
                        rest_of = (*self._packed(_group_major(one)), begin, first + done, columns, -1)
                        self._row(CHANNELS, count, width, one.bits, one.length, *rest_of)
                        done += count
            case _:
                raise KernelError(f"no kernel reads codes of type {type(part.code).__name__}")

    def _packed(self, packed: Packed) -> tuple[int, int]:
        pairs = torch.stack([packed.scale, packed.zero], -1).view(torch.uint16)
        return _put(self.codes, packed.codes), _put(self.scales, pairs) // 2

    def _row(self, *row: int) -> None:
        self.parts.append(list(row))

    def side(self, dim: int, rows: int, first: list[int], rope: Rope | None, origin: tuple[Code, ...]) -> PackedSide:
        """What has been added, joined."""
        return PackedSide(
            dim,
            rows,
            np.array(self.parts, dtype=np.int64).reshape(-1, FIELDS),
            np.array(first, dtype=np.int32),
            _joined(self.codes, np.uint8),
            _joined(self.floats, np.float32),
            _joined(self.scales, np.uint16),
            _joined(self.index, np.int32),
            _joined(self.bases, np.float32),
            rope,
            origin,
        )


def _group_major(packed: Packed) -> Packed:
    """Packed channels [width, (groups)], all channels of a group of tokens behind each other."""
    width = packed.scale.shape[0]
    codes, scale, zero = (
        x.reshape(width, -1, last).transpose(0, 1)
        for x, last in ((packed.codes, packed.codes.shape[-1]), (packed.scale, 1), (packed.zero, 1))
    )
    return Packed(codes, scale.squeeze(-1), zero.squeeze(-1), packed.bits, packed.length)


def _put(buffers: list[Tensor], x: Tensor) -> int:
    """Add a tensor to a buffer; returns the element where it begins."""
    place = sum(one.numel() for one in buffers)
    buffers.append(x.contiguous().flatten())
    return place


def _joined(buffers: list[Tensor], dtype: type[_T]) -> NDArray[_T]:
    return np.concatenate([one.numpy() for one in buffers]) if buffers else np.empty(0, dtype=dtype)
