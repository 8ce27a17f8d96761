"""Attention fidelity of one layer by hand: float64, position by position, from the recorded rows alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvassay.trace.reader import Branch, Trace


def rows(trace: Trace, branch: Branch, index: int, name: str) -> Tensor:
    """Context and branch, float64 [tokens, kv_heads, dim]."""
    return torch.cat([trace.prefix.cache(index, name), branch.cache(index, name)]).double()


def weights(trace: Trace, branch: Branch, index: int, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Softmax rows [queries, q_heads, tokens] of the branch's queries over keys [tokens, kv_heads, dim]."""
    layer, window = trace.layout.layers[index], trace.layout.source(index).window or math.inf
    q = branch.q(index).double()
    sinks = trace.header.sinks.get(index)
    group = q.shape[1] // keys.shape[1]
    found = torch.zeros(q.shape[0], q.shape[1], len(keys), dtype=torch.float64)
    for t in range(len(q)):
        position = branch.start + t
        seen = [j for j in range(position + 1) if position - j < window]
        for head in range(q.shape[1]):
            mine = [j for j in seen if allowed is None or j >= branch.start or bool(allowed[t, head, j])]
            logits = keys[mine, head // group] @ q[t, head] * layer.scale
            if layer.softcap:
                logits = layer.softcap * torch.tanh(logits / layer.softcap)
            extra = torch.tensor([] if sinks is None else [sinks[head]], dtype=torch.float64)
            found[t, head, mine] = torch.softmax(torch.cat([logits, extra]), 0)[: len(mine)]
    return found


def fidelity(
    trace: Trace,
    branch: Branch,
    index: int,
    allowed: Tensor | None = None,
    changed: tuple[Tensor, Tensor] | None = None,
) -> tuple[float, float]:
    """Output error and retained mass of an arm in one layer.

    allowed: bool [queries, q_heads, context tokens], what it reads of the context; changed: keys and values
    [context tokens, kv_heads, dim] as it holds them
    """
    k, v = rows(trace, branch, index, "k"), rows(trace, branch, index, "v")
    mine_k, mine_v = k.clone(), v.clone()
    if changed is not None:
        mine_k[: branch.start], mine_v[: branch.start] = changed
    dense = weights(trace, branch, index, k)
    arm = weights(trace, branch, index, mine_k, allowed)
    group = dense.shape[1] // k.shape[1]
    reference = torch.einsum("qhj,jhd->qhd", dense, v.repeat_interleave(group, 1))
    output = torch.einsum("qhj,jhd->qhd", arm, mine_v.repeat_interleave(group, 1))
    read = torch.ones_like(dense, dtype=torch.bool)
    if allowed is not None:
        read[..., : branch.start] = allowed
    share = (dense * read).sum(-1) / dense.sum(-1)
    return float((output - reference).norm() / reference.norm()), float(share.mean())


def top(score: Tensor, keep: int, sink: int, recent: int, length: int) -> Tensor:
    """bool like score [heads, tokens]: protected positions, then the best, `keep` per head; ties to the earlier."""
    mask = torch.zeros(score.shape, dtype=torch.bool)
    for head, row in enumerate(score.tolist()):
        order = sorted(range(len(row)), key=lambda j: (not (j < sink or j >= length - recent), -row[j], j))
        mask[head, order[:keep]] = True
    return mask
