"""The arithmetic that every CPU attention kernel shares: dots, online softmax, weighted sums, partial results.

Logits are kept in units of log2, so that a weight is `2 ** x`. What must be fast is in `vectors`.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvassay.kernels.pieces import LOG2E
from kvassay.kernels.vectors import greatest, row_dots, row_mix

LANES = 16
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, but infinities must stay: an empty row has a greatest logit of minus infinity."""

# Least-squares fit of 2**f on [-1/2, 1/2], degree 6, relative error 1.9e-9.
C1, C2, C3, C4, C5, C6 = (
    np.float32(c) for c in (0.69314718, 0.24022646, 0.05550329, 0.009618520, 0.001339986, 0.00015337578)
)
ONE, HALF, TWO, ZERO = (np.float32(x) for x in (1, 0.5, 2, 0))
LOW = np.float32(-126.0)
FLAT = np.float32(40.0)
"""2 ** 40 + 1 is 2 ** 40 in float32, and tanh is 1 long before."""


@njit(fastmath=FAST, cache=True, inline="always")
def exp2(x):  # type: ignore[no-untyped-def] # pragma: no cover
    """2**x for x <= 127 in float32: relative error below 2**-23; 0 below 2**-126, NaN for NaN. No branch."""
    y = LOW if x < LOW else x
    whole = np.floor(y + HALF)
    f = y - whole
    p = (((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f + ONE
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
    return ZERO if x < LOW else p * power.view(np.float32)


@njit(cache=True)
def scratch(count, a, b, c):  # type: ignore[no-untyped-def] # pragma: no cover
    """Three float32 arrays [count, a], [count, b] and [count, c], each from a cache line's edge on.

    A vector across two lines costs twice. They lie behind each other, so that no two of them lie at the same distance
    from a page's edge by chance: with three of the allocator's own, times differed by a quarter between processes.
    """
    second = (count * a + LANES - 1) // LANES * LANES
    third = second + (count * b + LANES - 1) // LANES * LANES
    room = np.empty(third + count * c + LANES, dtype=np.float32)
    room = room[-(room.ctypes.data // 4) % LANES :]
    return (
        room[: count * a].reshape(count, a),
        room[second : second + count * b].reshape(count, b),
        room[third : third + count * c].reshape(count, c),
    )


@njit(cache=True)
def ask(q, row, head, factor, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """Fill out [group, k_dim] with the queries of a KV head times a factor; q [count, q_heads, queries, k_dim].

    row: number of query among all lanes' together
    """
    group = out.shape[0]
    for g in range(group):
        mine = q[row // q.shape[2], head * group + g, row % q.shape[2]]
        for d in range(q.shape[3]):
            out[g, d] = mine[d] * factor


@njit(cache=True)
def dots(q, rows, at, n, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """`vectors.row_dots` of rows at[0] that are in the cache, compiled once for all who call it."""
    row_dots(q, rows, at, 0, -1, n, out)


@njit(cache=True)
def mix(weights, n, rows, at, acc):  # type: ignore[no-untyped-def] # pragma: no cover
    """`vectors.row_mix` of rows at[0] that are in the cache, compiled once for all who call it."""
    row_mix(weights, n, rows, at, 0, -1, acc)


@njit(fastmath=FAST, cache=True)
def shape_logits(scores, n, softcap, inner, outer):  # type: ignore[no-untyped-def] # pragma: no cover
    """Add the inner bias, soft-cap (0: none), add the outer bias, all of a tile's n tokens and in units of log2.

    inner, outer: [n] or empty.
    """
    for g in range(scores.shape[0]):
        s = scores[g]
        if inner.shape[0]:
            for t in range(n):
                s[t] += inner[t]
        if softcap > 0:
            factor = np.float32(2 * LOG2E) / softcap  # tanh(u) = 1 - 2 / (1 + e**2u)
            for t in range(n):
                u = s[t] * factor
                s[t] = softcap * (ONE - TWO / (ONE + exp2(FLAT if u > FLAT else u)))
        if outer.shape[0]:
            for t in range(n):
                s[t] += outer[t]


@njit(fastmath=FAST, cache=True, forceinline=True)
def weigh(scores, n, top, total, acc):  # type: ignore[no-untyped-def] # pragma: no cover
    """Turn a tile's logits into weights relative to the greatest so far, and bring what is there to that scale.

    top, total: [group], greatest logit and sum of weights so far; acc [group, width] the weighted sum
    """
    padded = (n + LANES - 1) // LANES * LANES
    for g in range(scores.shape[0]):
        s = scores[g]
        for t in range(n, padded):
            s[t] = -np.inf
        best = max(top[g], greatest(scores, g, padded))
        if best == -np.inf:  # nothing seen yet: every weight is 0, and a NaN stays one
            for t in range(n):
                s[t] = ZERO if s[t] == -np.inf else s[t]
                total[g] += s[t]
            continue
        if best != top[g]:
            shrink = exp2(top[g] - best)
            total[g] *= shrink
            o = acc[g]
            for d in range(o.shape[0]):
                o[d] *= shrink
            top[g] = best
        mass = ZERO
        for block in range(0, padded, LANES):
            part = s[block : block + LANES]
            for i in range(LANES):
                w = exp2(part[i] - best)
                part[i] = w
                mass += w
        total[g] += mass


@njit(cache=True)
def merge(owner, top, total, acc, sinks, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """Join partial results: out [owners, group, width] is the softmax over all pieces of an owner and its sink.

    owner: [pieces], which row of `out` a piece belongs to; top, total [pieces, group] and acc [pieces, group,
    width] as `weigh` leaves them; sinks [q_heads] in units of log2, empty for none
    """
    best = np.full(out.shape[:2], -np.inf, dtype=np.float32)
    mass = np.zeros_like(best)
    if sinks.shape[0]:
        for row in range(best.shape[0]):
            for g in range(best.shape[1]):
                best[row, g] = sinks[(row * best.shape[1] + g) % sinks.shape[0]]
    for p in range(len(owner)):
        for g in range(top.shape[1]):
            if total[p, g] != 0 and not best[owner[p], g] >= top[p, g]:
                best[owner[p], g] = top[p, g]
    if sinks.shape[0]:
        for row in range(best.shape[0]):
            for g in range(best.shape[1]):
                sink = sinks[(row * best.shape[1] + g) % sinks.shape[0]]
                if sink > -np.inf:
                    mass[row, g] = np.exp2(sink - best[row, g])
    out[:] = 0
    for p in range(len(owner)):
        row = owner[p]
        for g in range(top.shape[1]):
            if total[p, g] != 0:
                factor = np.exp2(top[p, g] - best[row, g])
                mass[row, g] += factor * total[p, g]
                for d in range(out.shape[2]):
                    out[row, g, d] += factor * acc[p, g, d]
    for row in range(best.shape[0]):
        for g in range(best.shape[1]):
            if mass[row, g] != 0:
                inverse = ONE / mass[row, g]
                for d in range(out.shape[2]):
                    out[row, g, d] *= inverse


Floats = NDArray[np.float32]
NO_FLOATS: Floats = np.empty(0, dtype=np.float32)
