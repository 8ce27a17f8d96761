"""What the Triton kernels share: queries, online softmax, and the merge of partial results.

A program has a KV head's query heads as the rows of its matrix products, up to ROWS of them, so that keys and values
are read once for all. Logits are in units of log2, as in the CPU kernel. Widths are padded to powers of two and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)
"""Query heads of a program: the fewest rows that matrix units take."""
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def own_query(q, strides, row, head, group, queries, k_dim, begin, CHUNK: tl.constexpr):  # pragma: no cover
    """Elements `begin` to `begin + CHUNK` of the program's query heads [ROWS, CHUNK], 0 where there are none.

    q: [lanes, q_heads, queries, k_dim] with `strides` over the first three, the last one contiguous
    """
    which = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    element = begin + tl.arange(0, CHUNK)
    place = q + (row // queries) * strides[0] + (row % queries) * strides[2]
    place = place + ((head * group + which) * strides[1])[:, None] + element[None, :]
    return tl.load(place, mask=(which < group)[:, None] & (element < k_dim)[None, :], other=0.0)


@triton.jit
def shaped(s, inner, outer, softcap, CAPPED: tl.constexpr):  # pragma: no cover
    """Logits [ROWS, TILE] with both biases [TILE] and the soft-cap, which is in units of log2 as they are."""
    s = s + inner[None, :]
    if CAPPED:
        twice = tl.minimum(s / softcap * 2.885390081777927, 40.0)  # tanh(u) = 1 - 2 / (1 + e**2u), and 1 beyond
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(twice)))
    return s + outer[None, :]


@triton.jit
def nothing_read(V_WIDTH: tl.constexpr):  # pragma: no cover
    """Greatest logit and sum of weights [ROWS], and weighted sum of values [ROWS, V_WIDTH], before any token."""
    best = tl.full([ROWS], NOTHING, tl.float32)
    return best, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, V_WIDTH], tl.float32)


@triton.jit
def softmax_step(s, top, total):  # pragma: no cover
    """Weights of a tile's logits relative to the greatest so far.

    top, total: [ROWS], greatest logit and sum of weights so far
    Returns the weights, both brought up to date, and the factor [ROWS] that brings earlier sums to the new scale.
    """
    best = tl.maximum(top, tl.max(s, 1))
    base = tl.where(best == NOTHING, 0.0, best)  # nothing read yet: every weight is 0
    shrink = tl.exp2(top - base)
    weights = tl.exp2(s - base[:, None])
    return weights, best, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def leave(top, total, acc, best, mass, mixed, piece, group, v_dim, V_WIDTH: tl.constexpr):  # pragma: no cover
    """Write a piece's partial result: top, total [pieces, group] and acc [pieces, group, v_dim]."""
    which = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, V_WIDTH)
    there = which < group
    place = piece.to(tl.int64) * group + which
    tl.store(top + place, best, mask=there)
    tl.store(total + place, mass, mask=there)
    wide = (place * v_dim)[:, None] + element[None, :]
    tl.store(acc + wide, mixed, mask=there[:, None] & (element < v_dim)[None, :])


@triton.jit
def merge_pieces(  # pragma: no cover
    top, total, acc, pieces, first, sinks, out, queries, kv_heads, group, v_dim,
    SINKS: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """One query and KV head: the softmax over all its pieces and its sinks, 0 where nothing was read.

    Owner o has `pieces[first[o]]` to `pieces[first[o + 1] - 1]`; sinks [q_heads] in units of log2
    out: [lanes, q_heads, queries, v_dim], contiguous
    """
    owner = tl.program_id(0)
    row, head = owner // kv_heads, owner % kv_heads
    which = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = which < group
    element = tl.arange(0, V_WIDTH)
    inside = there[:, None] & (element < v_dim)[None, :]
    best, mass, mixed = nothing_read(V_WIDTH)
    if SINKS:
        best = tl.load(sinks + head * group + which, mask=there, other=NOTHING)
        mass = tl.where(best == NOTHING, 0.0, 1.0)
    for i in range(tl.load(first + owner), tl.load(first + owner + 1)):
        place = tl.load(pieces + i).to(tl.int64) * group + which
        mine = tl.load(total + place, mask=there, other=0.0)
        found = tl.load(acc + (place * v_dim)[:, None] + element[None, :], mask=inside, other=0.0)
        peak = tl.where(mine != 0.0, tl.load(top + place, mask=there, other=NOTHING), NOTHING)
        highest = tl.maximum(best, peak)
        base = tl.where(highest == NOTHING, 0.0, highest)
        old, new = tl.exp2(best - base), tl.exp2(peak - base)
        mass = mass * old + mine * new
        mixed = mixed * old[:, None] + found * new[:, None]
        best = highest
    share = tl.where(mass == 0.0, 0.0, 1.0 / tl.where(mass == 0.0, 1.0, mass))
    place = ((row // queries) * kv_heads * group + head * group + which).to(tl.int64) * queries + row % queries
    tl.store(out + (place * v_dim)[:, None] + element[None, :], mixed * share[:, None], mask=inside)
