"""Where evicted tokens go: to the kept token of their bucket that they attend to most (SelKV, equation 3).

Attention inside a bucket needs the bucket's own scores and each row's log-sum-exp alone; the full map is never
held. A bucket is a run of positions that begins at a multiple of its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvassay.errors import EvidenceMissing
from kvassay.policy.views import LayerView


def route(layer: LayerView, own: Tensor, kept: Tensor) -> Tensor:
    """int64 [kv_heads, tokens]: for each evicted token the kept one it merges into, -1 if there is none.

    own: bool [kv_heads, tokens], the kept tokens that a head may merge into; kept: bool [tokens]
    The view must hold every position of the context, in order. Raises `EvidenceMissing` if the recorded rows do not.
    """
    heads, tokens = own.shape
    rows, lse = layer.bucket_scores(), layer.row_lse()
    if len(rows.positions) < tokens or len(lse.positions) < tokens:
        raise EvidenceMissing(
            f"policy '{layer.card.name}' needs bucket scores and log-sum-exp of all {tokens} tokens of layer "
            f"{layer.index}, the trace holds {min(len(rows.positions), len(lse.positions))}"
        )
    size = rows.values.shape[-1]
    attention = (rows.values[:tokens] - lse.values[:tokens, :, None]).exp()
    attention = attention.unflatten(1, (heads, -1)).sum(2).transpose(0, 1)  # [kv_heads, tokens, size]
    at = torch.arange(tokens)
    columns = (at - at % size)[:, None] + torch.arange(size)
    inside = (columns < tokens) & (columns < at[:, None])
    columns = columns.clamp(max=tokens - 1)
    open_to = own[:, columns] & inside
    best = attention.masked_fill(~open_to, -torch.inf).max(-1)
    into = columns[at, best.indices]
    return torch.where(open_to.any(-1) & ~kept, into, -1)
