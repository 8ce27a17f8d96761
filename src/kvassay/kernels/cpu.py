"""Decode attention in place over paged slots on the CPU: nothing is gathered or repeated.

Each (query token, KV head) walks a list of physical slots, so ragged heads, evicted tokens and shared
blocks cost nothing extra. Compiled once by numba and cached on disk.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor


# Sums may be reordered, but infinities must stay: a head without a sink has a sink logit of minus infinity.
@njit(parallel=True, fastmath={"reassoc", "contract", "arcp", "nsz"}, cache=True)
def _paged_decode(q, k, v, slots, lists, first, last, scale, softcap, sinks, out):  # type: ignore[no-untyped-def] # pragma: no cover
    rows, kv_heads, group, k_dim = q.shape
    v_dim = v.shape[-1]
    block_size = k.shape[2]
    for task in prange(rows * kv_heads):
        at, head = task // kv_heads, task % kv_heads
        mine = slots[lists[at], head]
        start = first[at, head]
        n = last[at, head] - start
        score = np.empty((group, n), dtype=np.float32)
        top = np.full(group, -np.inf, dtype=np.float32)
        for t in range(n):
            slot = mine[start + t]
            row = k[slot // block_size, head, slot % block_size]
            for g in range(group):
                query = q[at, head, g]
                dot = np.float32(0)
                for d in range(k_dim):
                    dot += query[d] * row[d]
                dot *= scale
                if softcap > 0:
                    dot = np.float32(math.tanh(dot / softcap) * softcap)
                score[g, t] = dot
                top[g] = max(top[g], dot)
        total = np.zeros(group, dtype=np.float32)
        for g in range(group):
            sink = sinks[head * group + g]
            top[g] = max(top[g], sink)
            if sink > -np.inf:
                total[g] = math.exp(sink - top[g])
            for t in range(n):
                weight = math.exp(score[g, t] - top[g])
                score[g, t] = weight
                total[g] += weight
        for g in range(group):
            for d in range(v_dim):
                out[at, head, g, d] = 0
        for t in range(n):
            slot = mine[start + t]
            row = v[slot // block_size, head, slot % block_size]
            for g in range(group):
                weight = score[g, t]
                target = out[at, head, g]
                for d in range(v_dim):
                    target[d] += weight * row[d]
        for g in range(group):
            if total[g] > 0:
                inverse = np.float32(1) / total[g]
                for d in range(v_dim):
                    out[at, head, g, d] *= inverse


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    last: Tensor,
    *,
    scale: float,
    first: Tensor | None = None,
    lists: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per row over a list of slots.

    q: float32 [rows, q_heads, k_dim]; k, v: float32 [blocks, kv_heads, block_size, dim], any strides but a
    contiguous last dimension
    slots: int32 [lists, kv_heads, capacity], physical slots; row i reads list `lists[i]` (int32 [rows]; by
    default list i), entries `first` (int32 [rows, kv_heads], default 0) up to, not including, `last`
    sinks: float [q_heads], logits without a value, or None
    Returns float32 [rows, q_heads, v_dim]; zeros for a row that reads nothing.
    """
    rows, q_heads, k_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, q_heads // kv_heads, k_dim).contiguous()
    out = torch.empty(rows, kv_heads, q_heads // kv_heads, v.shape[-1])
    no_sinks = np.full(q_heads, -np.inf, dtype=np.float32)
    _paged_decode(
        grouped.numpy(),
        k.numpy(),
        v.numpy(),
        slots.numpy(),
        np.arange(rows, dtype=np.int32) if lists is None else lists.numpy(),
        np.zeros((rows, kv_heads), dtype=np.int32) if first is None else first.numpy(),
        last.numpy(),
        np.float32(scale),
        np.float32(softcap or 0.0),
        no_sinks if sinks is None else sinks.float().numpy(),
        out.numpy(),
    )
    return out.view(rows, q_heads, v.shape[-1])
