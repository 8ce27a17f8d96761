"""Attention over retained tokens in plain torch: the oracle, right in any float dtype.

Keys and values come as [kv_heads, tokens, dim]; the query heads of a KV head are taken as query rows, so
nothing is repeated. Visibility is by true position, never by index: evicted tokens are simply not there.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from kvassay.cache.data import Stored


def visible(
    data: Stored,
    positions: Tensor,
    q_heads: int,
    *,
    window: int | None = None,
    allowed: Tensor | None = None,
    own: bool = True,
) -> Tensor:
    """What queries at true `positions` [queries] may read: bool [kv_heads or q_heads, queries, tokens].

    window: visible tokens, the query's own included
    allowed: bool [queries, q_heads, tokens], a selection. With it the result has q_heads rows, else one row per
        KV head.
    own: a query's own token is visible whatever the selection says
    """
    distance = positions[None, :, None] - data.positions[:, None]
    seen = (distance >= 0) & data.alive[:, None]
    if window is not None:
        seen &= distance < window
    if allowed is None:
        return seen
    group = q_heads // data.positions.shape[0]
    chosen = allowed.transpose(0, 1)
    if own:
        chosen = chosen | (distance == 0).repeat_interleave(group, dim=0)
    return seen.repeat_interleave(group, dim=0) & chosen


def attend(
    q: Tensor,
    data: Stored,
    seen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of q [q_heads, queries, k_dim] over what `seen` (see `visible`) lets it read.

    sinks: float [q_heads], a learned logit per head that takes mass and has no value
    Returns [q_heads, queries, v_dim] in q's dtype.
    """
    weights = attention_weights(q, data, seen, scale=scale, softcap=softcap, sinks=sinks)
    widths = [run.tokens for run in data.runs]
    rows = weights.view(data.positions.shape[0], -1, weights.shape[-1]).split(widths, dim=-1)
    alive = data.alive.split(widths, dim=1)
    parts = [
        torch.matmul(w, _clean(run.v, a, data.complete).to(q.dtype))
        for w, run, a in zip(rows, data.runs, alive, strict=True)
    ]
    return reduce(torch.add, parts).view(q.shape[0], q.shape[1], -1)


def attention_weights(
    q: Tensor,
    data: Stored,
    seen: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention probabilities [q_heads, queries, tokens].

    A row sums to 1, with sinks to less; a query that sees nothing has a row of zeros.
    """
    kv_heads, tokens = data.positions.shape
    q_heads, queries = q.shape[0], q.shape[1]
    rows = q.reshape(kv_heads, -1, q.shape[-1])
    parts = [torch.matmul(rows, run.k.to(q.dtype).transpose(1, 2)) for run in data.runs]
    logits = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)).mul_(scale)
    if data.inner_bias is not None:
        logits = logits + data.inner_bias.to(q.dtype)[:, None]
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    if data.bias is not None:
        logits = logits + data.bias.to(q.dtype)[:, None]
    logits = logits.view(kv_heads, q_heads // kv_heads, queries, tokens)
    # Most of a context is seen by every query: only the columns from the first that is not need a mask.
    unseen = ~seen.view(kv_heads, -1, queries, tokens)
    masked = unseen.flatten(0, 2).any(0).nonzero()
    edge = int(masked[0]) if len(masked) else tokens
    logits[..., edge:].masked_fill_(unseen[..., edge:], float("-inf"))
    if sinks is not None:
        extra = sinks.to(q.dtype).view(kv_heads, -1, 1, 1).expand(-1, -1, queries, -1)
        logits = torch.cat([logits, extra], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :tokens]
    weights[..., edge:].masked_fill_(unseen[..., edge:], 0)
    return weights.reshape(q_heads, queries, tokens)


def _clean(v: Tensor, alive: Tensor, complete: bool) -> Tensor:
    """Values with padding zeroed: a weight of 0 does not hide a NaN in memory nobody wrote."""
    return v if complete else v.masked_fill(~alive[..., None], 0)
