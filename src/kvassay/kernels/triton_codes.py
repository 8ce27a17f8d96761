"""Decode attention over encoded segments on a GPU: codes are dequantised, and low-rank rows rebuilt, in registers.

A tile of keys or values is put together from the parts that hold its rows (`packed`, in the form of `device_side`):
every element's code, scale and zero are loaded where they lie and summed under masks, so that one program reads any
mixture of widths, and what the segment does not use is compiled away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvassay.kernels import packed as table
from kvassay.kernels import pieces as columns
from kvassay.kernels.packed import PackedSide
from kvassay.kernels.triton_core import NOTHING, ROWS, leave, nothing_read, own_query, shaped, softmax_step

PLAIN, FLOAT8, PACKED, LOW_RANK, LISTED = (1 << bit for bit in range(5))
"""What a side holds, as bits of its `kinds`: float32 rows, e4m3, packed codes, coefficients; parts with a list."""
HAS_PLAIN, HAS_FLOAT8, HAS_PACKED, HAS_LOW_RANK, HAS_LISTED = (
    tl.constexpr(bit) for bit in (PLAIN, FLOAT8, PACKED, LOW_RANK, LISTED)
)
KIND, WIDTH, BITS, GROUP, DATA, SCALE, LOW, HIGH, ROW_MAP, COLUMN_MAP, BASIS = (tl.constexpr(at) for at in range(11))
"""Columns of a part on the device. LOW, HIGH: the segment's rows it lies within; ROW_MAP, COLUMN_MAP: where in `maps`
it says which of the part's rows (from LOW on) and channels each of the segment's is, -1 for all in order."""
PART_FIELDS = tl.constexpr(11)
KIND_ROWS, KIND_FLOAT8, KIND_TOKENS, KIND_CHANNELS = (
    tl.constexpr(kind) for kind in (table.ROWS, table.FLOAT8, table.TOKENS, table.CHANNELS)
)
FIELDS = tl.constexpr(columns.CODE_FIELDS)
ROW, HEAD = tl.constexpr(columns.ROW), tl.constexpr(columns.HEAD)
BEGIN, END, SEEN = (tl.constexpr(at) for at in (columns.CODE_BEGIN, columns.CODE_END, columns.CODE_SEEN))
RANKS = tl.constexpr(16)
"""Coefficients that are multiplied at once."""


@dataclass(frozen=True)
class SideArrays:
    """A `PackedSide` as the GPU kernel takes it: rows and channels are looked up forwards, not searched for.

    parts: int64 [parts, PART_FIELDS]; first int32 [kv_heads + 1]; codes uint8; floats, bases float32
    scales: float16, scale and zero by turns; maps: int32
    kinds: the bits above
    """

    parts: NDArray[np.int64]
    first: NDArray[np.int32]
    codes: NDArray[np.uint8]
    floats: NDArray[np.float32]
    scales: NDArray[np.float16]
    maps: NDArray[np.int32]
    bases: NDArray[np.float32]
    kinds: int

    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """In the order of the kernel's arguments."""
        return self.parts, self.first, self.codes, self.floats, self.scales, self.maps, self.bases


def device_side(side: PackedSide) -> SideArrays:
    """Lay a side out for the GPU; codes, rows and scales are taken as they are."""
    maps: list[NDArray[np.int32]] = []
    parts = np.empty((len(side.parts), PART_FIELDS.value), dtype=np.int64)
    kinds = done = 0
    for part, row in zip(side.parts, parts, strict=True):
        low, high, row_map, column_map = part[table.FIRST_ROW], part[table.FIRST_ROW] + part[table.COUNT], -1, -1
        if part[table.ROW_INDEX] >= 0:
            index = side.index[part[table.ROW_INDEX] :][: part[table.COUNT]]
            low, high = (int(index[0]), int(index[-1]) + 1) if len(index) else (0, 0)
            row_map, done = done, done + _put(maps, index - low, high - low)
        if part[table.COLUMN_INDEX] >= 0:
            index = side.index[part[table.COLUMN_INDEX] :][: part[table.WIDTH]]
            column_map, done = done, done + _put(maps, index, side.dim)
        kinds |= _kinds(part) | (LISTED if max(row_map, column_map) >= 0 else 0)
        same = (part[at] for at in (table.KIND, table.WIDTH, table.BITS, table.GROUP, table.DATA, table.SCALE))
        row[:] = (*same, low, high, row_map, column_map, part[table.BASIS])
    listed = np.concatenate(maps) if maps else np.empty(0, dtype=np.int32)
    scales = side.scales.view(np.float16)
    return SideArrays(parts, side.first, side.codes, side.floats, scales, listed, side.bases, kinds)


def _put(maps: list[NDArray[np.int32]], index: NDArray[np.int32], length: int) -> int:
    """Add which entry of `index` each of `length` is, -1 for none; returns the length."""
    found = np.full(length, -1, dtype=np.int32)
    found[index] = np.arange(len(index))
    maps.append(found)
    return length


def _kinds(part: NDArray[np.int64]) -> int:
    if part[table.BASIS] >= 0:
        return LOW_RANK
    return {table.ROWS: PLAIN, table.FLOAT8: FLOAT8}.get(int(part[table.KIND]), PACKED)


@triton.jit
def from_float8(code):  # pragma: no cover
    """e4m3 codes in float32, NaN included."""
    bits = code.to(tl.int32)
    size = bits & 0x7F
    normal = ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True)  # 120 << 23: the other exponent's bias
    x = tl.where(size >= 8, normal, size.to(tl.float32) * 0.001953125)  # below 8 in steps of 2 ** -9
    x = tl.where(size == 0x7F, float("nan"), x)
    return tl.where(bits >= 0x80, -x, x)


@triton.jit
def unpacked(part, codes, scales, row, column, mask):  # pragma: no cover
    """Elements of a part with packed codes [TILE, WIDE], 0 where masked: a scale per token, or per channel."""
    by_channel = tl.load(part + KIND) == KIND_CHANNELS
    width, bits, size = tl.load(part + WIDTH), tl.load(part + BITS), tl.maximum(tl.load(part + GROUP), 1)
    long = (size * bits + 7) // 8
    # Which group, and which code of it: along the tokens or along the channels.
    row_group, row_code = row // size, row % size
    column_group, column_code = column // size, column % size
    group_row = tl.where(by_channel, row_group * width, row * (width // size))
    group_column = tl.where(by_channel, column, column_group)
    bit_row = tl.where(by_channel, row_code, 0) * bits
    bit_column = tl.where(by_channel, 0, column_code) * bits
    group = group_row[:, None] + group_column[None, :]
    bit = bit_row[:, None] + bit_column[None, :]
    byte = tl.load(codes + tl.load(part + DATA) + group * long + (bit >> 3), mask=mask, other=0).to(tl.int32)
    code = (byte >> (bit & 7).to(tl.int32)) & ((1 << bits.to(tl.int32)) - 1)
    pair = scales + 2 * (tl.load(part + SCALE) + group)
    scale = tl.load(pair, mask=mask, other=0.0).to(tl.float32)
    return code.to(tl.float32) * scale + tl.load(pair + 1, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rebuilt(x, part, floats, bases, row, inside, d, dim):  # pragma: no cover
    """x [TILE, WIDE] plus a part's coefficients times its basis."""
    rank, data, basis = tl.load(part + WIDTH), tl.load(part + DATA), tl.load(part + BASIS)
    for first in range(0, rank, RANKS):
        j = first + tl.arange(0, RANKS)
        place = floats + data + row[:, None] * rank + j[None, :]
        coefficient = tl.load(place, mask=inside[:, None] & (j < rank)[None, :], other=0.0)
        place = bases + basis + j[:, None] * dim + d[None, :]
        base = tl.load(place, mask=(j < rank)[:, None] & ((d >= 0) & (d < dim))[None, :], other=0.0)
        x = tl.dot(coefficient, base, x, input_precision="ieee")
    return x


@triton.jit
def decoded(  # pragma: no cover
    parts, first, codes, floats, scales, maps, bases, head, start, live, d, dim,
    KINDS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Channels d [WIDE] of the rows from `start` on, where `live` [TILE]: float32 [TILE, WIDE], 0 if in no part."""
    token = start + tl.arange(0, TILE)
    x = tl.zeros([TILE, WIDE], tl.float32)
    for at in range(tl.load(first + head), tl.load(first + head + 1)):
        part = parts + at * PART_FIELDS
        low, high = tl.load(part + LOW), tl.load(part + HIGH)
        if (low < start + TILE) & (high > start):
            inside = live & (token >= low) & (token < high)
            row, column = token - low, tl.where((d >= 0) & (d < dim), d, -1).to(tl.int64)
            if (HAS_LISTED & KINDS) != 0:
                row_map, column_map = tl.load(part + ROW_MAP), tl.load(part + COLUMN_MAP)
                if row_map >= 0:
                    row = tl.load(maps + row_map + row, mask=inside, other=-1).to(tl.int64)
                if column_map >= 0:
                    column = tl.load(maps + column_map + column, mask=column >= 0, other=-1).to(tl.int64)
                inside = inside & (row >= 0)
            mask = inside[:, None] & (column >= 0)[None, :]
            kind, width = tl.load(part + KIND), tl.load(part + WIDTH)
            place = tl.load(part + DATA) + row[:, None] * width + column[None, :]
            if (HAS_PLAIN & KINDS) != 0:
                if kind == KIND_ROWS:
                    x += tl.load(floats + place, mask=mask, other=0.0)
            if (HAS_FLOAT8 & KINDS) != 0:
                if kind == KIND_FLOAT8:
                    x += from_float8(tl.load(codes + place, mask=mask, other=0))
            if (HAS_PACKED & KINDS) != 0:
                if kind >= KIND_TOKENS:
                    x += unpacked(part, codes, scales, row, column, mask)
            if (HAS_LOW_RANK & KINDS) != 0:  # of a side with coefficients they are all there is
                x = rebuilt(x, part, floats, bases, row, inside, d, dim)
    return x


@triton.jit
def turned(x, partner, position, frequencies, d, pairs, INTERLEAVED: tl.constexpr):  # pragma: no cover
    """Rows x [TILE, WIDE] rotated to their positions; `partner` holds the other channel of each one's pair."""
    if INTERLEAVED:
        pair, is_first = d // 2, d % 2 == 0
    else:
        pair, is_first = d % pairs, d < pairs
    turning = d < 2 * pairs
    angle = position.to(tl.float32)[:, None] * tl.load(frequencies + pair, mask=turning, other=0.0)[None, :]
    sine = tl.sin(angle)
    other = tl.where(is_first[None, :], -sine, sine) * partner
    return tl.where(turning[None, :], x * tl.cos(angle) + other, x)


@triton.jit
def attend_codes(  # pragma: no cover
    q, pieces, top, total, acc,
    k_parts, k_first, k_codes, k_floats, k_scales, k_maps, k_bases,
    v_parts, v_first, v_codes, v_floats, v_scales, v_maps, v_bases,
    positions, frequencies, seen, inner, outer,
    q_strides, kv_heads, rows, group, queries, k_dim, v_dim, pairs, scale, softcap,
    K_KINDS: tl.constexpr, V_KINDS: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    SELECTED: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, CAPPED: tl.constexpr,
    K_CHUNK: tl.constexpr, K_CHUNKS: tl.constexpr, V_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One piece: attention over a segment's rows `begin` to `end`, left as `leave` does.

    k_..., v_...: `SideArrays`; positions int32, inner, outer float32 [kv_heads, rows]; frequencies float32 [pairs]
    seen: uint8 [queries or 1, kv_heads, rows]; pieces: int64 [pieces, FIELDS], see `pieces.CodeJob`
    """
    piece = tl.program_id(0)
    mine = pieces + piece * FIELDS
    row, head, begin, end = tl.load(mine + ROW), tl.load(mine + HEAD), tl.load(mine + BEGIN), tl.load(mine + END)
    best, mass, mixed = nothing_read(V_WIDTH)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        live = token < end
        if SELECTED:
            shown = tl.load(seen + (tl.load(mine + SEEN) * kv_heads + head) * rows + token, mask=live, other=0)
            live = live & (shown != 0)
        s = tl.zeros([ROWS, TILE], tl.float32)
        for chunk in tl.static_range(K_CHUNKS):
            d = chunk * K_CHUNK + tl.arange(0, K_CHUNK)
            k = decoded(
                k_parts, k_first, k_codes, k_floats, k_scales, k_maps, k_bases, head, start, live, d, k_dim,
                K_KINDS, TILE, K_CHUNK,
            )  # fmt: skip
            if TURNED:
                if INTERLEAVED:
                    other = d ^ 1
                else:
                    other = tl.where(d < pairs, d + pairs, d - pairs)
                partner = decoded(
                    k_parts, k_first, k_codes, k_floats, k_scales, k_maps, k_bases, head, start, live, other, k_dim,
                    K_KINDS, TILE, K_CHUNK,
                )  # fmt: skip
                position = tl.load(positions + head * rows + token, mask=live, other=0)
                k = turned(k, partner, position, frequencies, d, pairs, INTERLEAVED)
            asked = own_query(q, q_strides, row, head, group, queries, k_dim, chunk * K_CHUNK, K_CHUNK)
            s = tl.dot(asked.to(tl.float32), tl.trans(k), s, input_precision="ieee")
        before, after = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
        if INNER:
            before = tl.load(inner + head * rows + token, mask=live, other=0.0)
        if OUTER:
            after = tl.load(outer + head * rows + token, mask=live, other=0.0)
        s = shaped(s * scale, before, after, softcap, CAPPED)
        s = tl.where(live[None, :], s, NOTHING)
        weights, best, mass, shrink = softmax_step(s, best, mass)
        v = decoded(
            v_parts, v_first, v_codes, v_floats, v_scales, v_maps, v_bases, head, start, live,
            tl.arange(0, V_WIDTH), v_dim, V_KINDS, TILE, V_WIDTH,
        )  # fmt: skip
        mixed = tl.dot(weights, v, mixed * shrink[:, None], input_precision="ieee")
    leave(top, total, acc, best, mass, mixed, piece, group, v_dim, V_WIDTH)
