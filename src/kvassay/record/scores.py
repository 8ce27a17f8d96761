"""Logarithms of attention, worked out from what an attention function was given and gave."""

from __future__ import annotations

import torch
from torch import Tensor

from kvassay.errors import RecordError
from kvassay.trace.buckets import bucket_visible


def row_lse(query: Tensor, key: Tensor, weights: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Return log sum exp of each query row's visible scores, sink included, [q_heads, n] float32.

    From the attention weights w = exp(s - lse): at a row's largest weight, lse = s - log w. So whatever mask
    or sink the model applied is in it, and only one dot product per row is needed.
    """
    if weights is None:
        raise RecordError("the model's eager attention returns no weights: the tap 'lse' cannot be recorded")
    top = weights[0].max(dim=-1)
    heads = torch.arange(query.shape[1], device=query.device) // (query.shape[1] // key.shape[1])
    best = key[0][heads[:, None], top.indices]
    score = (query[0].float() * best.float()).sum(-1) * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    return score - top.values.float().log()


def bucket_scores(
    query: Tensor, key: Tensor, first: int, size: int, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Scores of each query against the keys of its own bucket of `size` positions: [n, q_heads, size] float32.

    query [q_heads, n, k_dim] are those of positions `first`, `first` + 1, ...; key [kv_heads, seen, k_dim] ends
    with the same positions. Scaled and soft-capped as in the softmax; -inf where a query does not see the key.
    """
    n, seen = query.shape[1], key.shape[1]
    oldest = first + n - seen
    heads = torch.arange(query.shape[0], device=query.device) // (query.shape[0] // key.shape[0])
    scores = torch.full((n, query.shape[0], size), -torch.inf, device=query.device)
    for base in range(first // size * size, first + n, size):
        rows = slice(max(base, first) - first, min(base + size, first + n) - first)
        low, high = max(base, oldest), min(base + size, first + n)
        keys = key[heads, low - oldest : high - oldest].float()
        part = torch.matmul(query[:, rows].float(), keys.transpose(1, 2)) * scale
        scores[rows, :, low - base : high - base] = part.transpose(0, 1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    visible = torch.from_numpy(bucket_visible(first, n, size, window)).to(scores.device)
    return scores.masked_fill(~visible[:, None], -torch.inf)
