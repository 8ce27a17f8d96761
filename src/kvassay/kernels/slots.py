"""Decode attention in place over slots: by block table or by a list per KV head, nothing gathered or repeated."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvassay.kernels.cores import FAST, NO_FLOATS, ask, scratch, shape_logits, weigh
from kvassay.kernels.pieces import BEGIN, BIAS, END, HEAD, INNER, LIST, ROW
from kvassay.kernels.vectors import row_dots, row_mix

TILE = 16
"""Tokens whose scores are kept at once, no more than a block's, whose keys and values then are read as they lie; tiles
begin at multiples of it."""
KEYS, VALUES = 0, 2
"""Lines of a tile's places: two for keys and two for values, the current tile's and the next one's in turn."""


@njit(cache=True, error_model="numpy", forceinline=True)
def place(entries, unit, first, end, block_size, strides, head, width, at, line):  # type: ignore[no-untyped-def] # pragma: no cover
    """Fill at[line] with the element of a flat pool where each row of the tile from token `first` begins.

    entries: from the list's first unit; returns how many tokens the tile has. Rows after its last one repeat it.
    """
    n = max(min(end - first, TILE - first % TILE), 0)
    base = head * strides[1]
    t = 0
    while t < n:
        token = first + t
        if unit == 1:
            slot = np.int64(entries[token])
            at[line, t] = slot // block_size * strides[0] + base + slot % block_size * width
            t += 1
            continue
        offset = token % unit
        begin = entries[token // unit] * strides[0] + base + offset * width
        many = min(unit - offset, n - t)
        for i in range(many):
            at[line, t + i] = begin + i * width
        t += many
    for t in range(n, min(n + 3, TILE)):
        at[line, t] = at[line, max(n - 1, 0)]
    return n


@njit(cache=True, error_model="numpy", forceinline=True)
def lies_behind(entries, unit, first):  # type: ignore[no-untyped-def] # pragma: no cover
    """Whether the row of a list's token `first`, not its first one, lies behind that of the token before it."""
    within = first % unit
    return within > 0 or entries[first // unit] == entries[first // unit - 1] + 1


@njit(parallel=True, fastmath=FAST, cache=True, error_model="numpy")
def attend_slots(  # type: ignore[no-untyped-def] # pragma: no cover
    keys, key_strides, values, value_strides, block_size, entries, unit, pieces, biases,
    q, factor, softcap, top, total, acc
):  # fmt: skip
    """Attention of every piece, left as `weigh` leaves it in top, total [pieces, group], acc [pieces, group, v_dim].

    keys, values: flat pools; strides: elements from a block to the next and from a head to the next
    q: [count, q_heads, queries, k_dim]; factor: scales it to units of log2
    """
    k_dim, v_dim, group = q.shape[3], acc.shape[2], acc.shape[1]
    for p in prange(len(pieces)):
        piece = pieces[p]
        head, end = piece[HEAD], piece[END]
        mine, most, mass = entries[piece[LIST] :], top[p], total[p]
        query, mixed, scores = scratch(group, k_dim, v_dim, TILE)
        ask(q, piece[ROW], head, factor, query)
        most[:], mass[:], mixed[:] = -np.inf, 0, 0
        at = np.zeros((4, TILE), dtype=np.int64)
        shaped = softcap > 0 or piece[INNER] >= 0 or piece[BIAS] >= 0
        now, then = 0, 1
        first = piece[BEGIN]
        n = place(mine, unit, first, end, block_size, key_strides, head, k_dim, at, KEYS + now)
        place(mine, unit, first, end, block_size, value_strides, head, v_dim, at, VALUES + now)
        while n:
            after = first + n
            coming = place(mine, unit, after, end, block_size, key_strides, head, k_dim, at, KEYS + then)
            place(mine, unit, after, end, block_size, value_strides, head, v_dim, at, VALUES + then)
            fetched = coming > 0 and (group > 1 or unit == 1 or not lies_behind(mine, unit, after))
            row_dots(query, keys, at, KEYS + now, KEYS + then if fetched else -1, n, scores)
            if shaped:  # else there is nothing to do, and slices have their price
                inner = outer = NO_FLOATS
                if piece[INNER] >= 0:
                    inner = biases[piece[INNER] + first : piece[INNER] + after]
                if piece[BIAS] >= 0:
                    outer = biases[piece[BIAS] + first : piece[BIAS] + after]
                shape_logits(scores, n, softcap, inner, outer)
            weigh(scores, n, most, mass, mixed)
            row_mix(scores, n, values, at, VALUES + now, VALUES + then if fetched else -1, mixed)
            first, n = after, coming
            now, then = then, now
        acc[p] = mixed
