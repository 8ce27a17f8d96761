"""Index projections fitted to a layer's attention scores on a calibration text, in closed form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Index(NamedTuple):
    """Projections of each KV head's queries (`query`) and of a token's keys (`key`)."""

    query: Tensor
    """float32 [kv_heads, dim, group * k_dim]."""
    key: Tensor
    """float32 [dim, kv_heads * k_dim]."""


def fit_index(queries: Tensor, keys: Tensor, scale: float, dim: int) -> Index:
    """The projections to `dim` channels whose products come nearest, in least squares, to the text's attention scores.

    queries: [q_heads, n, k_dim]; keys: [kv_heads, tokens, k_dim]
    The score of a KV head is the mean over its query heads; what all keys of a text share adds the same to every
    score of a query and is left out. With C the covariance of the keys of all heads side by side, Q_h the second
    moment of head h's queries and M_h the map from such keys to its mean score, the stack of sqrt(Q_h) M_h sqrt(C) is
    cut to its leading right singular vectors.
    """
    kv_heads, tokens, k_dim = keys.shape
    rows = queries.unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(2).double()
    flat = keys.transpose(0, 1).flatten(1).double()
    centred = flat - flat.mean(0)
    root, inverse = _roots(centred.T @ centred / tokens)
    maps = _mean_score(kv_heads, rows.shape[2], k_dim, scale)
    weighted = [_roots(head.T @ head / len(head))[0] @ to @ root for head, to in zip(rows, maps, strict=True)]
    right = torch.linalg.svd(torch.cat(weighted), full_matrices=False).Vh[:dim]
    query = torch.stack([right @ root @ to.T for to in maps])
    return Index(query.float(), (right @ inverse).float())


def _mean_score(kv_heads: int, width: int, k_dim: int, scale: float) -> Tensor:
    """Map of each KV head [kv_heads, group * k_dim, kv_heads * k_dim]: its heads' mean scaled product with its key."""
    group = width // k_dim
    maps = torch.zeros(kv_heads, width, kv_heads * k_dim, dtype=torch.float64)
    for head in range(kv_heads):
        maps[head, :, head * k_dim : (head + 1) * k_dim] = torch.eye(k_dim).repeat(group, 1) * (scale / group)
    return maps


def _roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a positive semi-definite matrix and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(moment)
    root = values.clamp(min=0).sqrt()
    inverse = torch.where(values > 1e-9 * values.max(), 1 / root.clamp(min=1e-300), 0)
    return vectors * root @ vectors.T, vectors * inverse @ vectors.T
