"""Decode attention in place over slots: by block table or by a list per KV head, nothing gathered or repeated."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from kvassay.kernels.cores import FAST, NO_FLOATS, dots, mix, shape_logits, weigh

ROW, HEAD, LIST, BEGIN, END, BIAS, INNER = range(7)
"""Columns of a piece: query row, KV head, where its list begins in `entries`, the list's tokens it covers, where
the list's biases begin in `biases` (-1: none)."""


TILE, ENOUGH = 64, 16
"""A tile is the fewest runs that make up ENOUGH tokens, never more than TILE. A block's values mostly follow its keys
in memory, so short tiles read memory in its order, which is worth more than fewer steps."""


@njit(cache=True)
def next_tile(entries, unit, first, end, block_size, slot, length):  # type: ignore[no-untyped-def] # pragma: no cover
    """Runs of the tile that begins at token `first` of a list, each of slots next to each other in one block.

    Fills slot [runs] (physical slot of the first token) and length [runs]; returns how many runs and tokens.
    """
    runs = 0
    t = first
    while t < end and t - first < ENOUGH:
        most = min(TILE - (t - first), end - t)
        if unit == 1:
            start = np.int64(entries[t])
            room = min(most, block_size - start % block_size)
            many = 1
            while many < room and entries[t + many] == start + many:
                many += 1
        else:
            start = np.int64(entries[t // unit]) * unit + t % unit
            many = min(most, unit - t % unit)
        slot[runs] = start
        length[runs] = many
        runs += 1
        t += many
    return runs, t - first


@njit(cache=True)
def place(slot, runs, block_size, strides, head, width, begin):  # type: ignore[no-untyped-def] # pragma: no cover
    """Fill begin [runs]: the element of a flat pool where each run's rows of one head begin."""
    for r in range(runs):
        begin[r] = slot[r] // block_size * strides[0] + head * strides[1] + slot[r] % block_size * width


@njit(parallel=True, fastmath=FAST, cache=True)
def attend_slots(  # type: ignore[no-untyped-def] # pragma: no cover
    q, keys, key_strides, values, value_strides, block_size, entries, unit, pieces, biases, softcap, top, total, acc
):
    """Attention of every piece, left as `weigh` leaves it in top, total [pieces, group], acc [pieces, group, v_dim].

    q: [rows, kv_heads, group, k_dim], scaled to units of log2
    keys, values: flat pools; strides: elements from a block to the next and from a head to the next
    """
    k_dim, v_dim = q.shape[3], acc.shape[2]
    for p in prange(len(pieces)):
        piece = pieces[p]
        query, head = q[piece[ROW], piece[HEAD]], piece[HEAD]
        mine = entries[piece[LIST] :]
        scores = np.empty((query.shape[0], TILE), dtype=np.float32)
        slot, length, key, value = np.empty((4, TILE), dtype=np.int64)
        first = piece[BEGIN]
        while first < piece[END]:
            runs, n = next_tile(mine, unit, first, piece[END], block_size, slot, length)
            place(slot, runs, block_size, key_strides, head, k_dim, key)
            place(slot, runs, block_size, value_strides, head, v_dim, value)
            scores[:, :n] = 0
            at = 0
            for r in range(runs):
                dots(query, keys[key[r] : key[r] + length[r] * k_dim], scores, at)
                at += length[r]
            inner = outer = NO_FLOATS
            if piece[INNER] >= 0:
                inner = biases[piece[INNER] + first : piece[INNER] + first + n]
            if piece[BIAS] >= 0:
                outer = biases[piece[BIAS] + first : piece[BIAS] + first + n]
            shape_logits(scores, n, softcap, inner, outer)
            weigh(scores, n, top[p], total[p], acc[p])
            at = 0
            for r in range(runs):
                mix(scores, at, values[value[r] : value[r] + length[r] * v_dim], acc[p])
                at += length[r]
            first += n
