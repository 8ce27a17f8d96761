"""Decode attention over encoded segments: codes are dequantised, and low-rank rows rebuilt, tile by tile.

A tile never leaves the first caches. Keys that share a scale per channel are not even brought into rows. Coefficients
without a rotation are attended to as they are, through the basis.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvassay.kernels.cores import FAST, NO_FLOATS, ask, dots, mix, scratch, shape_logits, weigh
from kvassay.kernels.packed import (
    BASIS,
    BITS,
    CHANNELS,
    COLUMN_INDEX,
    COUNT,
    DATA,
    FIRST_ROW,
    GROUP,
    KIND,
    ROW_INDEX,
    ROWS,
    SCALE,
    TOKENS,
    WIDTH,
)
from kvassay.kernels.pieces import CODE_BEGIN as BEGIN
from kvassay.kernels.pieces import CODE_END as END
from kvassay.kernels.pieces import CODE_SEEN as SEEN
from kvassay.kernels.pieces import HEAD, ROW
from kvassay.kernels.vectors import UNPACKED, multiply_rows, unpack_vectors

TILE = 32
"""Tokens decoded at once; rows of 128 elements then take 16 KiB."""
SHIFT8, SHIFT16 = np.int32(20), np.int32(13)


@njit(fastmath=FAST, cache=True, inline="always")
def half(bits):  # type: ignore[no-untyped-def] # pragma: no cover
    """A finite float16, given as its bits, in float32."""
    b = np.int32(bits)
    size = b & np.int32(0x7FFF)
    normal = np.int32((size << SHIFT16) + np.int32(112 << 23)).view(np.float32)
    x = normal if size >= np.int32(0x400) else np.float32(size) * np.float32(2.0**-24)
    return x if b < np.int32(0x8000) else -x


@njit(fastmath=FAST, cache=True)
def from_float8(codes, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """e4m3 codes [n] in float32, NaN included; subnormals by their integer, so that no slow float is made."""
    for i in range(codes.shape[0]):
        b = np.int32(codes[i])
        size = b & np.int32(0x7F)
        normal = np.int32((size << SHIFT8) + np.int32(120 << 23)).view(np.float32)
        x = normal if size >= np.int32(8) else np.float32(size) * np.float32(2.0**-9)
        x = np.float32(np.nan) if size == np.int32(0x7F) else x
        out[i] = x if b < np.int32(0x80) else -x


@njit(fastmath=FAST, cache=True)
def unpack(codes, begin, step, bits, count, n, pairs, out, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """`count` groups of n codes, packed from byte `begin` on and every `step` bytes, as code * scale + zero.

    pairs: scale and zero of each group, one after the other; out: from out[at] on
    A byte's least significant code comes first.
    """
    unpack_vectors(codes, begin, step, bits, count, n, pairs, out, at)
    per = 8 // bits
    for i in range(n - n % UNPACKED, n):
        byte, shift = begin + i // per, np.int32(bits * (i % per))
        for k in range(count):
            code = (np.int32(codes[byte + k * step]) >> shift) & np.int32((1 << bits) - 1)
            out[at + k * n + i] = np.float32(code) * pairs[2 * k] + pairs[2 * k + 1]


@njit(fastmath=FAST, cache=True)
def halves(bits, begin, n, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """The n float16 from bits[begin] on in float32, out [>= n]."""
    mine, found = bits[begin : begin + n], out[:n]
    for i in range(n):
        found[i] = half(mine[i])


@njit(fastmath=FAST, cache=True)
def decode_groups(part, codes, scales, first, n, pairs, buffer, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `first` to `first + n` of a TOKENS part, from buffer[at] on; pairs: scratch for two floats per group."""
    group, bits = part[GROUP], part[BITS]
    many = part[WIDTH] // group
    size = (group * bits + 7) // 8
    halves(scales, 2 * (part[SCALE] + first * many), 2 * n * many, pairs)
    unpack(codes, part[DATA] + first * many * size, size, bits, n * many, group, pairs, buffer, at)


@njit(cache=True)
def span(part, index, first, end):  # type: ignore[no-untyped-def] # pragma: no cover
    """Which of a part's rows are the segment's rows `first` to `end`, as a range; its row list is ascending."""
    if part[ROW_INDEX] < 0:
        low, high = first - part[FIRST_ROW], end - part[FIRST_ROW]
    else:
        rows = index[part[ROW_INDEX] : part[ROW_INDEX] + part[COUNT]]
        low, high = np.searchsorted(rows, first), np.searchsorted(rows, end)
    return max(low, 0), min(high, part[COUNT])


@njit(cache=True)
def is_whole(part, dim, rows):  # type: ignore[no-untyped-def] # pragma: no cover
    """Whether one part is all of a head."""
    return part[ROW_INDEX] < 0 and part[COLUMN_INDEX] < 0 and part[COUNT] == rows and part[WIDTH] == dim


@njit(fastmath=FAST, cache=True)
def decode_part(part, row, n, codes, floats, scales, pairs, out, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `row` to `row + n` of a part of any kind but CHANNELS, from out[at] on."""
    size = n * part[WIDTH]
    begin = part[DATA] + row * part[WIDTH]
    if part[KIND] == TOKENS:
        decode_groups(part, codes, scales, row, n, pairs, out, at)
    elif part[KIND] == ROWS:
        out[at : at + size] = floats[begin : begin + size]
    else:
        from_float8(codes[begin : begin + size], out[at : at + size])


@njit(cache=True)
def decode_rows(parts, index, codes, floats, scales, dim, rows, first, n, pairs, buffer, line):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `first` to `first + n` of one head from every part but CHANNELS, buffer [>= n * dim].

    What no part holds is 0. line: [>= dim] scratch
    """
    if len(parts) == 1 and is_whole(parts[0], dim, rows):
        decode_part(parts[0], first, n, codes, floats, scales, pairs, buffer, 0)
        return
    buffer[: n * dim] = 0
    for part in parts:
        if part[KIND] == CHANNELS:
            continue
        low, high = span(part, index, first, first + n)
        for row in range(low, high):
            at = row + part[FIRST_ROW] if part[ROW_INDEX] < 0 else index[part[ROW_INDEX] + row]
            target = (at - first) * dim
            if part[COLUMN_INDEX] < 0:
                decode_part(part, row, 1, codes, floats, scales, pairs, buffer, target)
            else:
                decode_part(part, row, 1, codes, floats, scales, pairs, line, 0)
                for d in range(part[WIDTH]):
                    buffer[target + index[part[COLUMN_INDEX] + d]] = line[d]


@njit(fastmath=FAST, cache=True)
def channel_dots(part, index, codes, scales, query, first, n, scores, pairs, wide, short, sums):  # type: ignore[no-untyped-def] # pragma: no cover
    """scores[g, row - first] += query . row for a CHANNELS part, decoded as it lies, channel by channel.

    wide: [>= WIDTH * (TILE + 8)], short [group, >= WIDTH], sums [group, >= TILE + 8], pairs: scratch
    """
    low, high = span(part, index, first, first + n)
    group, width, bits = part[GROUP], part[WIDTH], part[BITS]
    per, size = 8 // bits, (group * bits + 7) // 8
    heads = query.shape[0]
    for g in range(heads):
        for d in range(width):
            short[g, d] = query[g, d if part[COLUMN_INDEX] < 0 else index[part[COLUMN_INDEX] + d]]
    row = low
    while row < high:
        k = row // group
        end = min(high, (k + 1) * group)
        skip = (row - k * group) % per
        head_byte = (row - k * group) // per
        long = ((end - k * group + per - 1) // per - head_byte) * per
        halves(scales, 2 * (part[SCALE] + k * width), 2 * width, pairs)
        unpack(codes, part[DATA] + k * width * size + head_byte, size, bits, width, long, pairs, wide, 0)
        multiply_rows(short, width, wide, 0, sums[:, :long])
        for i in range(row, end):
            place = i + part[FIRST_ROW] if part[ROW_INDEX] < 0 else index[part[ROW_INDEX] + i]
            for g in range(heads):
                scores[g, place - first] += sums[g, i - row + skip]
        row = end


@njit(fastmath=FAST, cache=True)
def rotate_rows(rows, n, dim, positions, table, interleaved):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rotate rows [n * dim] in place to their positions; table [positions, 2, dims / 2] holds cos and sin."""
    pairs = table.shape[2]
    for t in range(n):
        cos, sin = table[positions[t], 0], table[positions[t], 1]
        row = rows[t * dim : (t + 1) * dim]
        if interleaved:
            for i in range(pairs):
                a, b = row[2 * i], row[2 * i + 1]
                row[2 * i] = a * cos[i] - b * sin[i]
                row[2 * i + 1] = b * cos[i] + a * sin[i]
        else:
            low, high = row[:pairs], row[pairs : 2 * pairs]
            for i in range(pairs):
                a, b = low[i], high[i]
                low[i] = a * cos[i] - b * sin[i]
                high[i] = b * cos[i] + a * sin[i]


@njit(fastmath=FAST, cache=True)
def basis_rows(part, dim, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """Fill at[0] with where each row of a part's basis begins in `bases`; returns how many it has."""
    for i in range(part[WIDTH]):
        at[0, i] = part[BASIS] + i * dim
    return part[WIDTH]


@njit(fastmath=FAST, cache=True)
def rebuild(part, floats, bases, dim, first, n, buffer):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `first` to `first + n` from their coefficients, buffer [>= n * dim]."""
    rank = part[WIDTH]
    begin = part[DATA] + first * rank
    coefficients = floats[begin : begin + n * rank].reshape(n, rank)
    multiply_rows(coefficients, rank, bases, part[BASIS], buffer[: n * dim].reshape(n, dim))


@njit(fastmath=FAST, cache=True)
def through_basis(query, part, bases, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """query [group, dim] as what meets a part's coefficients, [group, rank]."""
    rank = basis_rows(part, query.shape[1], at)
    for i in range(rank, rank + 3):
        at[0, i] = at[0, max(rank - 1, 0)]
    short = np.zeros((query.shape[0], rank + 3), dtype=np.float32)
    dots(query, bases, at, rank, short)
    return short[:, :rank].copy()


@njit(cache=True)
def tile_rows(begin, width, n, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """Fill at[0] with where n rows begin that lie behind each other from element `begin` on, the last one repeated."""
    for t in range(n):
        at[0, t] = begin + t * width
    for t in range(n, n + 3):
        at[0, t] = at[0, n - 1]


@njit(cache=True)
def narrowed(seen, first, end):  # type: ignore[no-untyped-def] # pragma: no cover
    """The rows from `first` to `end` without those at either end that are not seen [rows]; none: an empty range."""
    while first < end and not seen[first]:
        first += 1
    while first < end and not seen[end - 1]:
        end -= 1
    return first, end


@njit(parallel=True, fastmath=FAST, cache=True)
def attend_codes(  # type: ignore[no-untyped-def] # pragma: no cover
    key, value, positions, table, interleaved, seen, inner_bias, outer_bias, pieces,
    q, factor, softcap, top, total, acc
):  # fmt: skip
    """Attention of every piece over one segment, left as `weigh` leaves it (see `slots.attend_slots`).

    key, value: (dim, rows, parts, first, codes, floats, scales, index, bases) of a `PackedSide`
    positions: int32 [kv_heads, rows]; table: cos and sin by position, [0, 2, 0] if keys are not to be rotated
    seen: bool [queries, kv_heads, rows], inner_bias and outer_bias float32 [kv_heads, rows]; all may be empty
    """
    k_dim, rows, k_parts, k_first, k_codes, k_floats, k_scales, k_index, k_bases = key
    v_dim, _, v_parts, v_first, v_codes, v_floats, v_scales, v_index, v_bases = value
    widest = max(k_dim, v_dim)
    for p in prange(len(pieces)):
        piece = pieces[p]
        head = piece[HEAD]
        group = acc.shape[1]
        mine, theirs = k_parts[k_first[head] : k_first[head + 1]], v_parts[v_first[head] : v_first[head + 1]]
        buffer = np.empty(TILE * widest, dtype=np.float32)
        line = np.empty(widest, dtype=np.float32)
        pairs = np.empty(2 * TILE * widest, dtype=np.float32)
        wide = np.empty(k_dim * (TILE + 8), dtype=np.float32)
        short = np.empty((group, k_dim), dtype=np.float32)
        sums = np.empty((group, TILE + 8), dtype=np.float32)
        turned = table.shape[0] > 0
        low_keys = len(mine) == 1 and mine[0, BASIS] >= 0
        low_values = len(theirs) == 1 and theirs[0, BASIS] >= 0
        k_rank, v_rank = mine[0, WIDTH] if low_keys else 0, theirs[0, WIDTH] if low_values else 0
        at = np.zeros((1, max(TILE, widest, k_rank, v_rank) + 3), dtype=np.int64)
        through = low_keys and not turned  # then the basis goes into the query, and no row is rebuilt
        query, mixed, scores = scratch(group, k_dim, v_rank if low_values else v_dim, TILE)
        ask(q, piece[ROW], head, factor, query)
        if through:
            query = through_basis(query, mine[0], k_bases, at)
        top[p], total[p], mixed[:] = -np.inf, 0, 0
        by_row = False
        for part in mine:
            by_row = by_row or part[KIND] != CHANNELS
        for begin in range(piece[BEGIN], piece[END], TILE):
            first, end = begin, min(begin + TILE, piece[END])
            if seen.shape[0]:  # what is not selected is not decoded
                first, end = narrowed(seen[piece[SEEN], head], first, end)
                if first == end:
                    continue
            n = end - first
            if through:
                tile_rows(mine[0, DATA] + first * k_rank, k_rank, n, at)
                dots(query, k_floats, at, n, scores)
            elif by_row:
                if low_keys:
                    rebuild(mine[0], k_floats, k_bases, k_dim, first, n, buffer)
                else:
                    decode_rows(
                        mine, k_index, k_codes, k_floats, k_scales, k_dim, rows, first, n, pairs, buffer, line
                    )  # fmt: skip
                if turned:
                    rotate_rows(buffer, n, k_dim, positions[head, first:], table, interleaved)
                tile_rows(0, k_dim, n, at)
                dots(query, buffer, at, n, scores)
            else:
                scores[:, :n] = 0
            for part in mine:
                if part[KIND] == CHANNELS:
                    channel_dots(
                        part, k_index, k_codes, k_scales, query, first, n, scores, pairs, wide, short, sums
                    )  # fmt: skip
            inner = inner_bias[head, first : first + n] if inner_bias.shape[0] else NO_FLOATS
            outer = outer_bias[head, first : first + n] if outer_bias.shape[0] else NO_FLOATS
            shape_logits(scores, n, softcap, inner, outer)
            if seen.shape[0]:
                visible = seen[piece[SEEN], head, first : first + n]
                for g in range(group):
                    for t in range(n):
                        if not visible[t]:
                            scores[g, t] = -np.inf
            weigh(scores, n, top[p], total[p], mixed)
            if low_values:
                tile_rows(theirs[0, DATA] + first * v_rank, v_rank, n, at)
                mix(scores, n, v_floats, at, mixed)
            else:
                decode_rows(
                    theirs, v_index, v_codes, v_floats, v_scales, v_dim, rows, first, n, pairs, buffer, line
                )  # fmt: skip
                tile_rows(0, v_dim, n, at)
                mix(scores, n, buffer, at, mixed)
        if low_values:
            acc[p] = 0
            mix(mixed, basis_rows(theirs[0], v_dim, at), v_bases, at, acc[p])
        else:
            acc[p] = mixed
