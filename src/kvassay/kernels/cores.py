"""The arithmetic that every CPU attention kernel shares: dots, online softmax, weighted sums, partial results.

Logits are kept in units of log2, so that a weight is `2 ** x`. Inner loops run from 0 over contiguous slices,
the form in which LLVM vectorises them.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

LANES = 16
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, but infinities must stay: an empty row has a greatest logit of minus infinity."""
LOG2E = 1.4426950408889634

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


@njit(fastmath=FAST, cache=True)
def dots(q, rows, out, at):  # type: ignore[no-untyped-def] # pragma: no cover
    """out[g, at + t] += q[g] . row t, for rows [n * width] laid one after the other, q [group, width].

    One head takes a row after the other: two rows of 1 KiB at once are more than the hardware fetches ahead of, and
    cost half the bandwidth (measured). Several heads are slower than memory anyway, and take two rows and two heads.
    """
    group, width = q.shape
    n = rows.shape[0] // width
    t = 0
    while group > 1 and t + 2 <= n:
        a = rows[t * width : (t + 1) * width]
        b = rows[(t + 1) * width : (t + 2) * width]
        g = 0
        while g + 2 <= group:
            x, y = q[g], q[g + 1]
            s0 = s1 = r0 = r1 = ZERO
            for d in range(width):
                s0 += x[d] * a[d]
                s1 += x[d] * b[d]
                r0 += y[d] * a[d]
                r1 += y[d] * b[d]
            out[g, at + t] += s0
            out[g, at + t + 1] += s1
            out[g + 1, at + t] += r0
            out[g + 1, at + t + 1] += r1
            g += 2
        if g < group:
            x = q[g]
            s0 = s1 = ZERO
            for d in range(width):
                s0 += x[d] * a[d]
                s1 += x[d] * b[d]
            out[g, at + t] += s0
            out[g, at + t + 1] += s1
        t += 2
    while t < n:
        a = rows[t * width : (t + 1) * width]
        for g in range(group):
            x = q[g]
            s0 = ZERO
            for d in range(width):
                s0 += x[d] * a[d]
            out[g, at + t] += s0
        t += 1


@njit(fastmath=FAST, cache=True)
def mix(weights, at, rows, acc):  # type: ignore[no-untyped-def] # pragma: no cover
    """acc[g] += sum over t of weights[g, at + t] * row t, for rows [n * width] one after the other.

    One head, or rows of more than half a KiB, are taken one after the other (see `dots`), else four at once, to load
    and store `acc` less often.
    """
    group, width = acc.shape
    n = rows.shape[0] // width
    t = 0
    while group > 1 and width <= 128 and t + 4 <= n:
        a = rows[t * width : (t + 1) * width]
        b = rows[(t + 1) * width : (t + 2) * width]
        c = rows[(t + 2) * width : (t + 3) * width]
        e = rows[(t + 3) * width : (t + 4) * width]
        for g in range(group):
            w = weights[g, at + t : at + t + 4]
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            o = acc[g]
            for d in range(width):
                o[d] += w0 * a[d] + w1 * b[d] + w2 * c[d] + w3 * e[d]
        t += 4
    while t < n:
        a = rows[t * width : (t + 1) * width]
        for g in range(group):
            w0 = weights[g, at + t]
            o = acc[g]
            for d in range(width):
                o[d] += w0 * a[d]
        t += 1


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


@njit(fastmath=FAST, cache=True)
def weigh(scores, n, top, total, acc):  # type: ignore[no-untyped-def] # pragma: no cover
    """Turn a tile's logits into weights relative to the greatest so far, and bring what is there to that scale.

    top, total: [group], greatest logit and sum of weights so far; acc [group, width] the weighted sum
    """
    lanes = np.empty(LANES, dtype=np.float32)
    padded = (n + LANES - 1) // LANES * LANES
    for g in range(scores.shape[0]):
        s = scores[g]
        for t in range(n, padded):
            s[t] = -np.inf
        for i in range(LANES):
            lanes[i] = s[i]
        for block in range(1, padded // LANES):
            part = s[block * LANES : (block + 1) * LANES]
            for i in range(LANES):
                lanes[i] = part[i] if part[i] > lanes[i] else lanes[i]
        best = top[g]
        for i in range(LANES):
            best = lanes[i] if lanes[i] > best else best
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
        for t in range(padded):
            w = exp2(s[t] - best)
            s[t] = w
            mass += w
        total[g] += mass


@njit(cache=True)
def merge(owner, top, total, acc, sinks, out):  # type: ignore[no-untyped-def] # pragma: no cover
    """Join partial results: out [owners, group, width] is the softmax over all pieces of an owner and its sink.

    owner: [pieces], which row of `out` a piece belongs to; top, total [pieces, group] and acc [pieces, group,
    width] as `weigh` leaves them; sinks [owners, group] in units of log2, minus infinity for none
    """
    best = sinks.copy()
    for p in range(len(owner)):
        for g in range(top.shape[1]):
            if total[p, g] != 0 and not best[owner[p], g] >= top[p, g]:
                best[owner[p], g] = top[p, g]
    mass = np.zeros_like(sinks)
    for row in range(sinks.shape[0]):
        for g in range(sinks.shape[1]):
            if sinks[row, g] > -np.inf:
                mass[row, g] = np.exp2(sinks[row, g] - best[row, g])
    out[:] = 0
    for p in range(len(owner)):
        row = owner[p]
        for g in range(top.shape[1]):
            if total[p, g] != 0:
                factor = np.exp2(top[p, g] - best[row, g])
                mass[row, g] += factor * total[p, g]
                for d in range(out.shape[2]):
                    out[row, g, d] += factor * acc[p, g, d]
    for row in range(sinks.shape[0]):
        for g in range(sinks.shape[1]):
            if mass[row, g] != 0:
                inverse = ONE / mass[row, g]
                for d in range(out.shape[2]):
                    out[row, g, d] *= inverse


Floats = NDArray[np.float32]
NO_FLOATS: Floats = np.empty(0, dtype=np.float32)
