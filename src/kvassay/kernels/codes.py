"""Decode attention over encoded segments: codes are dequantised, and low-rank rows rebuilt, tile by tile.

A tile never leaves the first caches. Keys that share a scale per channel are not even brought into rows: their
scales go into the query. Coefficients without a rotation are attended to as they are, through the basis.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvassay.kernels.cores import FAST, NO_FLOATS, dots, mix, shape_logits, weigh
from kvassay.kernels.packed import (
    BASIS,
    BITS,
    CHANNELS,
    COLUMN_INDEX,
    COUNT,
    DATA,
    FIRST_ROW,
    FLOAT8,
    GROUP,
    KIND,
    ROW_INDEX,
    ROWS,
    SCALE,
    TOKENS,
    WIDTH,
)

TILE = 64
"""Tokens decoded at once; rows of 256 elements then take 64 KiB."""
ROW, HEAD, BEGIN, END, SEEN = range(5)
"""Columns of a piece: query row, KV head, the segment's rows it covers, row of `seen`."""
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
def unpack(codes, bits, scale, zero, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """Packed codes [bytes] as code * scale + zero, out [bytes * 8 // bits]; least significant code first."""
    n = codes.shape[0]
    if bits == 8:
        for i in range(n):
            out[i] = np.float32(codes[i]) * scale + zero
    elif bits == 4:
        for i in range(n):
            c = np.int32(codes[i])
            out[2 * i] = np.float32(c & np.int32(15)) * scale + zero
            out[2 * i + 1] = np.float32(c >> np.int32(4)) * scale + zero
    else:
        for i in range(n):
            c = np.int32(codes[i])
            out[4 * i] = np.float32(c & np.int32(3)) * scale + zero
            out[4 * i + 1] = np.float32((c >> np.int32(2)) & np.int32(3)) * scale + zero
            out[4 * i + 2] = np.float32((c >> np.int32(4)) & np.int32(3)) * scale + zero
            out[4 * i + 3] = np.float32(c >> np.int32(6)) * scale + zero


@njit(fastmath=FAST, cache=True)
def decode_whole(part, codes, scales, first, n, buffer):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `first` to `first + n` of a TOKENS part whose groups fill their bytes, unpacked at one go."""
    width, group, bits = part[WIDTH], part[GROUP], part[BITS]
    begin = part[DATA] + first * width * bits // 8
    out = buffer[: n * width]
    unpack(codes[begin : begin + n * width * bits // 8], bits, np.float32(1), np.float32(0), out)
    pair = 2 * (part[SCALE] + first * (width // group))
    for k in range(n * width // group):
        scale, zero = half(scales[pair + 2 * k]), half(scales[pair + 2 * k + 1])
        target = out[k * group : (k + 1) * group]
        for i in range(group):
            target[i] = target[i] * scale + zero


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
def decode_row(part, row, codes, floats, scales, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """One row of a part of any kind but CHANNELS, out [WIDTH]."""
    width = part[WIDTH]
    if part[KIND] == ROWS:
        begin = part[DATA] + row * width
        source = floats[begin : begin + width]
        for d in range(width):
            out[d] = source[d]
    elif part[KIND] == FLOAT8:
        begin = part[DATA] + row * width
        from_float8(codes[begin : begin + width], out)
    else:
        group = part[GROUP]
        size = (group * part[BITS] + 7) // 8
        per = 8 // part[BITS]
        for k in range(width // group):
            pair = 2 * (part[SCALE] + row * (width // group) + k)
            begin = part[DATA] + (row * (width // group) + k) * size
            scale, zero = half(scales[pair]), half(scales[pair + 1])
            whole = group // per
            unpack(codes[begin : begin + whole], part[BITS], scale, zero, out[k * group : (k + 1) * group])
            for i in range(whole * per, group):  # a last byte that is not full
                code = (codes[begin + whole] >> (part[BITS] * (i % per))) & ((1 << part[BITS]) - 1)
                out[k * group + i] = np.float32(code) * scale + zero


@njit(cache=True)
def decode_rows(parts, index, codes, floats, scales, dim, rows, first, n, buffer, line):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `first` to `first + n` of one head from every part but CHANNELS, buffer [>= n * dim].

    What no part holds is 0. line: [>= dim] scratch
    """
    plain = len(parts) == 1 and is_whole(parts[0], dim, rows)
    if plain and parts[0][KIND] == TOKENS and parts[0][GROUP] * parts[0][BITS] % 8 == 0:
        decode_whole(parts[0], codes, scales, first, n, buffer)
        return
    if not plain:
        buffer[: n * dim] = 0
    for part in parts:
        if part[KIND] == CHANNELS:
            continue
        low, high = span(part, index, first, first + n)
        for row in range(low, high):
            at = row + part[FIRST_ROW] if part[ROW_INDEX] < 0 else index[part[ROW_INDEX] + row]
            target = buffer[(at - first) * dim : (at - first + 1) * dim]
            if part[COLUMN_INDEX] < 0:
                decode_row(part, row, codes, floats, scales, target)
            else:
                decode_row(part, row, codes, floats, scales, line)
                for d in range(part[WIDTH]):
                    target[index[part[COLUMN_INDEX] + d]] = line[d]


@njit(cache=True)
def channel_dots(part, index, codes, scales, query, first, n, scores, wide, folded, sums):  # type: ignore[no-untyped-def] # pragma: no cover
    """scores[g, row - first] += query . row for a CHANNELS part: scales go into the query, codes stay integers.

    wide: [>= WIDTH * TILE], folded [group, >= WIDTH], sums [group, >= TILE]: scratch
    """
    low, high = span(part, index, first, first + n)
    group, width, bits = part[GROUP], part[WIDTH], part[BITS]
    per, size, groups = 8 // bits, (group * bits + 7) // 8, part[COUNT] // group
    heads = query.shape[0]
    row = low
    while row < high:
        k = row // group
        end = min(high, (k + 1) * group)
        skip = (row - k * group) % per
        head_byte = (row - k * group) // per
        many = (end - k * group + per - 1) // per - head_byte
        long = many * per
        zeros = np.zeros(heads, dtype=np.float32)
        for d in range(width):
            at = d if part[COLUMN_INDEX] < 0 else index[part[COLUMN_INDEX] + d]
            pair = 2 * (part[SCALE] + d * groups + k)
            scale, zero = half(scales[pair]), half(scales[pair + 1])
            for g in range(heads):
                folded[g, d] = query[g, at] * scale
                zeros[g] += query[g, at] * zero
            begin = part[DATA] + (d * groups + k) * size + head_byte
            one = np.float32(1)
            unpack(codes[begin : begin + many], bits, one, np.float32(0), wide[d * long : (d + 1) * long])
        sums[:, :long] = 0
        mix(folded[:, :width], 0, wide[: width * long], sums[:, :long])
        for i in range(row, end):
            at = i + part[FIRST_ROW] if part[ROW_INDEX] < 0 else index[part[ROW_INDEX] + i]
            for g in range(heads):
                scores[g, at - first] += sums[g, i - row + skip] + zeros[g]
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
def rebuild(part, floats, bases, dim, first, n, buffer):  # type: ignore[no-untyped-def] # pragma: no cover
    """Rows `first` to `first + n` from their coefficients, buffer [>= n * dim]."""
    rank = part[WIDTH]
    begin = part[DATA] + first * rank
    coefficients = floats[begin : begin + n * rank].reshape(n, rank)
    rows = buffer[: n * dim].reshape(n, dim)
    rows[:] = 0
    basis = bases[part[BASIS] : part[BASIS] + rank * dim]
    mix(coefficients, 0, basis, rows)


@njit(fastmath=FAST, cache=True)
def through_basis(query, part, bases):  # type: ignore[no-untyped-def] # pragma: no cover
    """query [group, dim] as what meets a part's coefficients, [group, rank]."""
    rank, dim = part[WIDTH], query.shape[1]
    short = np.zeros((query.shape[0], rank), dtype=np.float32)
    dots(query, bases[part[BASIS] : part[BASIS] + rank * dim], short, 0)
    return short


@njit(parallel=True, fastmath=FAST, cache=True)
def attend_codes(  # type: ignore[no-untyped-def] # pragma: no cover
    q, key, value, positions, table, interleaved, seen, inner_bias, outer_bias, pieces, softcap, top, total, acc
):
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
        group = q.shape[2]
        mine, theirs = k_parts[k_first[head] : k_first[head + 1]], v_parts[v_first[head] : v_first[head + 1]]
        scores = np.empty((group, TILE), dtype=np.float32)
        buffer = np.empty(TILE * widest, dtype=np.float32)
        line = np.empty(widest, dtype=np.float32)
        wide = np.empty(k_dim * (TILE + 8), dtype=np.float32)
        folded = np.empty((group, k_dim), dtype=np.float32)
        sums = np.empty((group, TILE + 8), dtype=np.float32)
        turned = table.shape[0] > 0
        low_keys = len(mine) == 1 and mine[0, BASIS] >= 0
        low_values = len(theirs) == 1 and theirs[0, BASIS] >= 0
        asked = low_keys and not turned  # then the basis goes into the query, and no row is rebuilt
        query = through_basis(q[piece[ROW], head], mine[0], k_bases) if asked else q[piece[ROW], head]
        rank = theirs[0, WIDTH] if low_values else 0
        mixed = np.zeros((group, rank), dtype=np.float32) if low_values else acc[p]
        for first in range(piece[BEGIN], piece[END], TILE):
            n = min(TILE, piece[END] - first)
            scores[:, :n] = 0
            if asked:
                begin = mine[0, DATA] + first * query.shape[1]
                dots(query, k_floats[begin : begin + n * query.shape[1]], scores, 0)
            else:
                by_row = False
                for part in mine:
                    if part[KIND] == CHANNELS:
                        channel_dots(part, k_index, k_codes, k_scales, query, first, n, scores, wide, folded, sums)
                    else:
                        by_row = True
                if by_row:
                    if low_keys:
                        rebuild(mine[0], k_floats, k_bases, k_dim, first, n, buffer)
                    else:
                        decode_rows(mine, k_index, k_codes, k_floats, k_scales, k_dim, rows, first, n, buffer, line)
                    if turned:
                        rotate_rows(buffer, n, k_dim, positions[head, first:], table, interleaved)
                    dots(query, buffer[: n * k_dim], scores, 0)
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
                begin = theirs[0, DATA] + first * rank
                mix(scores, 0, v_floats[begin : begin + n * rank], mixed)
            else:
                decode_rows(theirs, v_index, v_codes, v_floats, v_scales, v_dim, rows, first, n, buffer, line)
                mix(scores, 0, buffer[: n * v_dim], mixed)
        if low_values:
            basis = v_bases[theirs[0, BASIS] : theirs[0, BASIS] + rank * v_dim]
            mix(mixed, 0, basis, acc[p])
