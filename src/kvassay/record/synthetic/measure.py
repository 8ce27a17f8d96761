"""Measuring recorded heads: what `statistics.Statistics` says of them, from one trace with all its prompt queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvassay.cache.rope import unrotate
from kvassay.errors import RecordError
from kvassay.layout.model import Layer
from kvassay.record.synthetic.statistics import SPANS, LayerStatistics, Side, Statistics
from kvassay.trace.reader import Branch, Trace

SKIPPED = 8
"""First positions left out of the averages: attention sinks there, and their rows are outliers."""
TYPES = 32
RANK = 16
ROUNDS = 12
"""Steps of k-means."""
FAR = 128
"""Tokens back from which a target counts as far."""
MUCH = 0.25
"""Share of its attention that a query puts on one token, for it to count as aimed."""
EVERY = 8
"""One query in so many is looked at for targets."""


def measure(trace: Trace, layers: Sequence[int] | None = None, *, types: int = TYPES, rank: int = RANK) -> Statistics:
    """Statistics of a trace's layers (None: all that hold keys and values) over its context.

    `RecordError` unless the context's queries are all stored (`--q-tail` of its length) and there are questions, or for
    a text shorter than `4 * types` tokens.
    """
    storing = trace.layout.storing
    chosen = [layer for layer in storing if layers is None or layer.index in layers]
    if not trace.branches:
        raise RecordError(f"{trace.path}: has no branches, so there are no questions to measure")
    if trace.prefix.q_start:
        raise RecordError(f"{trace.path}: stores queries from position {trace.prefix.q_start} on; statistics take all")
    if trace.prefix.tokens < 4 * types:
        raise RecordError(f"{trace.path}: {trace.prefix.tokens} tokens are too few for {types} types of them")
    scales = {layer.scale for layer in chosen}
    if len(scales) != 1:
        raise RecordError(f"{trace.path}: its layers have {len(scales)} factors of the logits, one is needed")
    last = max(1, len(storing) - 1)
    found = {
        storing.index(layer) / last: _measured(trace, layer, types, min(rank, layer.kv.k_dim, layer.kv.v_dim))
        for layer in chosen
    }
    model, recipe = trace.header.model, trace.header.recipe
    about = {
        "model": model.name,
        "licence": model.licence,
        "weights_sha256": str(model.weights_sha256),
        "text": f"{recipe.name}, seed {recipe.seed}, index {recipe.index}",
        "tokens": str(trace.prefix.tokens),
        "layers": ",".join(str(layer.index) for layer in chosen),
        "kvassay": trace.header.versions.kvassay,
    }
    return Statistics(found, scales.pop(), about)


def _measured(trace: Trace, layer: Layer, types: int, rank: int) -> LayerStatistics:
    prefix, index, rope = trace.prefix, layer.index, layer.rope
    positions = torch.arange(prefix.tokens)
    k, v, q = (rows.transpose(0, 1).float() for rows in (prefix.k(index), prefix.v(index), prefix.q(index)))
    key, query = unrotate(k, positions, rope), unrotate(q, positions, rope)
    ids = _types(torch.cat([_unit(key), _unit(v), _unit(query)])[:, SKIPPED:], types)
    return LayerStatistics(
        frequency=torch.bincount(ids, minlength=types) / len(ids),
        keys=_side(key[:, SKIPPED:], ids, types, rank),
        values=_side(v[:, SKIPPED:], ids, types, rank),
        queries=_side(query[:, SKIPPED:], ids, types, rank),
        first_key=key[:, 0],
        first_value=v[:, 0],
        question=torch.cat([_asked(branch, layer) for branch in trace.branches], 1).mean(1),
        aimed=_aimed(q, k, layer),
    )


def _asked(branch: Branch, layer: Layer) -> Tensor:
    """A branch's queries before rotation: [q_heads, tokens, dim]."""
    q = branch.q(layer.index).transpose(0, 1).float()
    return unrotate(q, torch.arange(branch.start, branch.start + q.shape[1]), layer.rope)


def _unit(rows: Tensor) -> Tensor:
    """Rows [heads, tokens, dim] about their mean, with a total variance of 1 per head, so that no side outweighs."""
    centred = rows - rows[:, SKIPPED:].mean(1, keepdim=True)
    return centred / centred[:, SKIPPED:].square().sum(-1).mean(1).clamp(min=1e-12).sqrt()[:, None, None]


def _types(rows: Tensor, types: int) -> Tensor:
    """k-means on rows [heads, tokens, dim], all heads together: int64 [tokens]."""
    flat = rows.transpose(0, 1).flatten(1)
    spread = torch.linspace(0, len(flat) - 1, types).long()
    centres = flat[spread].clone()
    ids = torch.zeros(len(flat), dtype=torch.int64)
    for _ in range(ROUNDS):
        ids = torch.cdist(flat, centres).argmin(1)
        count = torch.bincount(ids, minlength=types).clamp(min=1)
        moved = torch.zeros_like(centres).index_add_(0, ids, flat) / count[:, None]
        empty = torch.bincount(ids, minlength=types) == 0
        centres = torch.where(empty[:, None], centres, moved)
    return ids


def _side(rows: Tensor, ids: Tensor, types: int, rank: int) -> Side:
    """Centres and scatter of rows [heads, tokens, dim]."""
    heads, tokens, dim = rows.shape
    count = torch.bincount(ids, minlength=types).clamp(min=1)
    centres = torch.zeros(heads, types, dim).index_add_(1, ids, rows) / count[:, None]
    scatter = rows - centres[:, ids]
    variance, directions = torch.linalg.eigh(scatter.transpose(1, 2) @ scatter / tokens)
    basis = directions[..., -rank:] * variance[:, None, -rank:].clamp(min=0).sqrt()
    left = scatter.square().mean(1) - basis.square().sum(-1)
    return Side(centres, basis, left.clamp(min=0).sqrt(), _lasting(scatter))


def _lasting(scatter: Tensor) -> Tensor:
    """Shares of the variance that spans have in common, from correlations half the shorter and a quarter of the longer
    span apart: [heads, spans]."""
    short, long = SPANS
    near, apart = short // 2, long // 4
    # Of tokens `gap` apart, a share 1 - gap / span lies in one span.
    lasting = (_correlation(scatter, apart) / (1 - apart / long)).clamp(0, 1)
    brief = (_correlation(scatter, near) - lasting * (1 - near / long)) / (1 - near / short)
    return torch.stack([torch.minimum(brief.clamp(min=0), 1 - lasting), lasting], -1)


def _correlation(scatter: Tensor, gap: int) -> Tensor:
    """Mean correlation of rows [heads, tokens, dim] that are `gap` tokens apart: [heads]."""
    return (scatter[:, gap:] * scatter[:, :-gap]).sum(-1).mean(1) / scatter.square().sum(-1).mean(1).clamp(min=1e-12)


def _aimed(q: Tensor, k: Tensor, layer: Layer) -> Tensor:
    """Share of queries [q_heads, tokens, dim] that put `MUCH` on one token `FAR` back, not a first one: [q_heads]."""
    tokens, shares = q.shape[1], []
    at = torch.arange(tokens // 2, tokens, EVERY)
    far = (torch.arange(tokens) <= at[:, None] - FAR) & (torch.arange(tokens) >= SKIPPED)
    seen = torch.arange(tokens) <= at[:, None]
    if layer.window is not None:
        seen &= torch.arange(tokens) > at[:, None] - layer.window
    for head in range(q.shape[0]):
        logits = q[head, at] @ k[head // layer.group_size].T * layer.scale
        if layer.softcap:
            logits = torch.tanh(logits / layer.softcap) * layer.softcap
        weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
        shares.append((weights * far).amax(-1).ge(MUCH).float().mean())
    return torch.stack(shares)
