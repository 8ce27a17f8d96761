"""Decode attention in place over slots on a GPU: by block table or by a list per KV head, as `slots` on the CPU."""

from __future__ import annotations

import triton
import triton.language as tl

from kvassay.kernels import pieces as columns
from kvassay.kernels.triton_core import NOTHING, ROWS, leave, nothing_read, own_query, shaped, softmax_step

FIELDS = tl.constexpr(columns.SLOT_FIELDS)
ROW, HEAD, LIST = (tl.constexpr(column) for column in (columns.ROW, columns.HEAD, columns.LIST))
BEGIN, END = (tl.constexpr(column) for column in (columns.BEGIN, columns.END))
BIAS, INNER = (tl.constexpr(column) for column in (columns.BIAS, columns.INNER))


@triton.jit
def bias_of(biases, begin, token, end):  # pragma: no cover
    """A list's biases of tokens before `end`, beginning at `begin`; 0 if that is -1."""
    return tl.load(biases + begin + token, mask=token < tl.where(begin >= 0, end, 0), other=0.0)


@triton.jit
def attend_slots(  # pragma: no cover
    q, keys, values, entries, pieces, biases, top, total, acc,
    q_strides, key_strides, value_strides, group, queries, k_dim, v_dim, scale, softcap,
    SIZE: tl.constexpr, BY_BLOCK: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr,
    K_CHUNK: tl.constexpr, K_CHUNKS: tl.constexpr, V_WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One piece: attention over its tokens, left as `leave` does.

    keys, values: a pool [blocks, kv_heads, SIZE, dim] with strides over the first three, the last one contiguous
    pieces: int64 [pieces, FIELDS], see `pieces.SlotJob`; scale, softcap: in units of log2
    """
    piece = tl.program_id(0)
    mine = pieces + piece * FIELDS
    row, head, begin, end = tl.load(mine + ROW), tl.load(mine + HEAD), tl.load(mine + BEGIN), tl.load(mine + END)
    listed, bias, inner = entries + tl.load(mine + LIST), tl.load(mine + BIAS), tl.load(mine + INNER)
    keys += head * key_strides[1]
    values += head * value_strides[1]
    element = tl.arange(0, V_WIDTH)
    best, mass, mixed = nothing_read(V_WIDTH)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        live = token < end
        if BY_BLOCK:
            block = tl.load(listed + token // SIZE, mask=live, other=0).to(tl.int64)
            offset = token % SIZE
        else:
            slot = tl.load(listed + token, mask=live, other=0).to(tl.int64)
            block, offset = slot // SIZE, slot % SIZE
        place = keys + block * key_strides[0] + offset * key_strides[2]
        s = tl.zeros([ROWS, TILE], tl.float32)
        for chunk in tl.static_range(K_CHUNKS):
            d = chunk * K_CHUNK + tl.arange(0, K_CHUNK)
            k = tl.load(place[None, :] + d[:, None], mask=live[None, :] & (d < k_dim)[:, None], other=0.0)
            asked = own_query(q, q_strides, row, head, group, queries, k_dim, chunk * K_CHUNK, K_CHUNK)
            s = tl.dot(asked.to(k.dtype), k, s, input_precision="ieee")
        s = s * scale
        if BIASED:
            before, after = bias_of(biases, inner, token, end), bias_of(biases, bias, token, end)
            s = shaped(s, before, after, softcap, CAPPED)
        elif CAPPED:
            none = tl.zeros([TILE], tl.float32)
            s = shaped(s, none, none, softcap, CAPPED)
        s = tl.where(live[None, :], s, NOTHING)
        weights, best, mass, shrink = softmax_step(s, best, mass)
        place = values + block * value_strides[0] + offset * value_strides[2]
        v = tl.load(place[:, None] + element[None, :], mask=live[:, None] & (element < v_dim)[None, :], other=0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    leave(top, total, acc, best, mass, mixed, piece, group, v_dim, V_WIDTH)
