"""Where evicted tokens go: to the kept token of their bucket that they attend to most (SelKV, equation 3).

Attention inside a bucket needs the bucket's own scores and each row's log-sum-exp alone; the full map is never
held. A bucket is a run of positions that begins at a multiple of its size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvassay.errors import EvidenceMissing
from kvassay.policy.views import LayerView

CHUNK = 4096
"""Positions looked at together."""


def route(layer: LayerView, own: Tensor, kept: Tensor) -> Tensor:
    """int64 [kv_heads, tokens]: for each evicted token the kept one it merges into, -1 if there is none.

    own: bool [kv_heads, tokens], the kept tokens that a head may merge into; kept: bool [tokens]
    The view must hold every position of the context, in order. Raises `EvidenceMissing` if the recorded rows do not.
    """
    tokens = own.shape[1]
    rows, lse = layer.bucket_scores(), layer.row_lse()
    if len(rows.positions) < tokens or len(lse.positions) < tokens:
        raise EvidenceMissing(
            f"policy '{layer.card.name}' needs bucket scores and log-sum-exp of all {tokens} tokens of layer "
            f"{layer.index}, the trace holds {min(len(rows.positions), len(lse.positions))}"
        )
    into = [
        _best(rows.values[part], lse.values[part], own, part)
        for part in (slice(first, min(first + CHUNK, tokens)) for first in range(0, tokens, CHUNK))
    ]
    return torch.cat(into, 1).masked_fill(kept, -1)


def _best(scores: Tensor, lse: Tensor, own: Tensor, part: slice) -> Tensor:
    """int64 [kv_heads, n] of some positions: the token of `own` in their bucket and before them that they attend to
    most, -1 if there is none. scores: [n, q_heads, size]; lse: [n, q_heads]."""
    (heads, tokens), size = own.shape, scores.shape[-1]
    attention = (scores - lse[:, :, None]).exp_().unflatten(1, (heads, -1)).sum(2).transpose(0, 1)
    at = torch.arange(part.start, part.stop)
    columns = (at - at % size)[:, None] + torch.arange(size)
    inside = (columns < tokens) & (columns < at[:, None])
    columns = columns.clamp(max=tokens - 1)
    open_to = own[:, columns] & inside
    best = attention.masked_fill(~open_to, -torch.inf).argmax(-1)
    return torch.where(open_to.any(-1), columns[at - part.start, best], -1)


def likeness(x: Tensor, target: Tensor) -> Tensor:
    """Cosine [heads, tokens] of each row of x [heads, tokens, dim] with the row that `target` names."""
    parts = zip(x.split(CHUNK, dim=1), target.split(CHUNK, dim=1), strict=True)
    found = [
        functional.cosine_similarity(rows, x.gather(1, to[..., None].expand_as(rows)), dim=-1) for rows, to in parts
    ]
    return torch.cat(found, 1)
