"""Small views with known contents, and float64 NumPy attention to compare with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.layout.model import KV, Component, Layer
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Evidence
from kvassay.policy.queries import Queries
from kvassay.policy.views import CacheView, LayerView, Meter

Q_HEADS, KV_HEADS, DIM = 4, 2, 8


def layer(index: int = 0, q_heads: int = Q_HEADS, kv_heads: int = KV_HEADS, dim: int = DIM, **more: object) -> Layer:
    return Layer(index, q_heads, (Component(KV(kv_heads, dim, dim)),), scale=dim**-0.5, **more)  # type: ignore[arg-type]


def random_kv(tokens: int, seed: int = 0, kv_heads: int = KV_HEADS, dim: int = DIM) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(kv_heads, tokens, dim, generator=rng, dtype=torch.float64),
        torch.randn(kv_heads, tokens, dim, generator=rng, dtype=torch.float64),
    )


def random_q(queries: int, seed: int = 1, q_heads: int = Q_HEADS, dim: int = DIM) -> Tensor:
    return torch.randn(q_heads, queries, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def view(
    policy: Policy,
    data: LayerData,
    *,
    of: Layer | None = None,
    length: int | None = None,
    sink: int = 0,
    recent: int = 0,
    queries: Tensor | None = None,
    future: tuple[Tensor, Tensor] | None = None,
    side: Mapping[str, Tensor] | None = None,
    block_size: int = 4,
    meter: Meter | None = None,
) -> LayerView:
    """A view of one layer; `queries` are those of the last positions, `future` is (q, positions)."""
    length = length if length is not None else int(data.positions.max()) + 1
    offered = {}
    if queries is not None:
        q = Queries(queries, torch.arange(length - queries.shape[1], length))
        offered[Evidence.QUERIES] = lambda: q
    if future is not None:
        offered[Evidence.FUTURE_QUERIES] = lambda: Queries(*future)
    return LayerView(
        of or layer(kv_heads=data.k.shape[0], q_heads=2 * data.k.shape[0], dim=data.k.shape[2]),
        policy.card,
        load=lambda: data,
        length=length,
        protection=Protection(sink, recent),
        meter=meter or Meter(2.0),
        queries=offered,
        side=side,
        block_size=block_size,
    )


def dense(tokens: int, seed: int = 0, dim: int = DIM, kv_heads: int = KV_HEADS) -> LayerData:
    return LayerData.dense(*random_kv(tokens, seed, kv_heads, dim))


def ragged(data: LayerData, keep: list[list[int]]) -> LayerData:
    """Only the named tokens per head, the shorter heads padded with NaN."""
    width = max(map(len, keep))
    k, v = (torch.full((len(keep), width, side.shape[2]), torch.nan, dtype=side.dtype) for side in (data.k, data.v))
    positions = torch.full((len(keep), width), -1)
    for head, rows in enumerate(keep):
        k[head, : len(rows)], v[head, : len(rows)] = data.k[head, rows], data.v[head, rows]
        positions[head, : len(rows)] = torch.tensor(rows)
    return LayerData.ragged(k, v, positions)


def allowance(tokens: int, context: int, sink: int = 0, recent: int = 0, unit: str = "keep_tokens") -> Allowance:
    return Allowance(Budget(unit, tokens), tokens, context, Protection(sink, recent))


def cache(*views: LayerView, length: int | None = None, context: int | None = None) -> CacheView:
    n = length if length is not None else views[0].length
    return CacheView({v.index: v for v in views}, n, n if context is None else context)


def memory(seed: int = 0) -> Memory:
    return Memory(rng=torch.Generator().manual_seed(seed))


def kept(policy: Policy, shown: LayerView, tokens: int, mem: Memory | None = None) -> list[list[int]]:
    """The positions a one-layer decision keeps, per KV head (all, if it asks for nothing)."""
    mem = mem or memory()
    budget = allowance(tokens, shown.length, shown.protection.sink, shown.protection.recent)
    decision = policy.decide(cache(shown), {shown.index: policy.score(shown, mem)}, mem, budget)
    edits = decision.edits.get(shown.index, [])
    mask = edits[0].keep if edits else shown.alive
    return [row[m].tolist() for row, m in zip(shown.positions, mask, strict=True)]


def attention_oracle(q: Tensor, k: Tensor, q_positions: list[int], positions: list[int], scale: float) -> np.ndarray:
    """Causal softmax rows [queries, tokens] of one query head over one KV head, in float64 NumPy."""
    logits = (q.double().numpy() @ k.double().numpy().T) * scale
    for row, at in enumerate(q_positions):
        for column, position in enumerate(positions):
            if position > at:
                logits[row, column] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)
