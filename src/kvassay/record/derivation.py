"""Proving recorded selections: what the model's index chose follows from the index keys and queries beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvassay.layout.model import Layer
from kvassay.policy.indexers import block_scores, lightning_score
from kvassay.trace.reader import Segment, Trace
from kvassay.trace.shapes import layer_shard

TOLERANCE = 1e-4
"""Of a query's largest score: choices between scores that are closer than this may fall either way."""
ROWS = 256
"""Queries scored together."""


def underived(trace: Trace) -> Iterator[str]:
    """One line per layer and segment in which some recorded choice is not a best one of its query's scores."""
    for layer in trace.layout.layers:
        if layer.index_keys is None or layer.topk is None:
            continue
        for segment in trace.segments:
            if segment.q_start < segment.start + segment.tokens:
                wrong = [row for part in _parts(trace, segment, layer) for row in part]
                shard = trace.path / layer_shard(segment.name, layer.index)
                if wrong:
                    yield (
                        f"{shard}: 'selection' of {len(wrong)} queries is not what its index keys and queries give, "
                        f"first at position {wrong[0]}"
                    )


def _parts(trace: Trace, segment: Segment, layer: Layer) -> Iterator[list[int]]:
    """Positions whose choice does not derive, some queries at a time."""
    index = layer.index
    parts = [segment] if segment is trace.prefix else [trace.prefix, segment]
    held = [part.cache(index, "index_keys") for part in parts if part.holds(index, "index_keys")]
    assert layer.index_keys is not None and layer.topk is not None
    keys = torch.cat(held) if held else torch.empty(0, layer.index_keys.dim)
    chosen, queries = segment.selection(index), segment.index_queries(index)
    weights = segment.index_weights(index) if layer.index_keys.weighted else None
    assert chosen is not None
    for first in range(0, len(chosen), ROWS):
        part = slice(first, first + ROWS)
        positions = torch.arange(len(chosen))[part] + segment.q_start
        of_heads = None if weights is None else weights[part]
        score = _scores(layer, queries[part].transpose(0, 1), of_heads, keys, positions)
        good = torch.stack(
            [_best(*pair, layer.topk.k) for pair in zip(score, chosen[part].long().unbind(1), strict=True)]
        )
        yield positions[~good.all(0)].tolist()


def _scores(layer: Layer, queries: Tensor, weights: Tensor | None, keys: Tensor, positions: Tensor) -> Tensor:
    """Score of every unit that an index may choose, [sets, queries, units]: -inf where a query does not see it."""
    assert layer.topk is not None
    if weights is None:
        return block_scores(queries, keys, positions, block=layer.topk.unit, ends=(layer.topk.first, layer.topk.last))
    units = torch.arange(len(keys))
    # A token is there at once, an entry when its last token is.
    hidden = units >= (positions[:, None] + 1) // layer.topk.unit
    return lightning_score(queries, keys, weights).masked_fill(hidden, -torch.inf)[None]


def _best(score: Tensor, chosen: Tensor, k: int) -> Tensor:
    """bool [queries]: whether `chosen` [queries, k], -1 unused, are the k best (or all) of what each query sees."""
    units = score.shape[1]
    seen = score > -torch.inf
    wanted = seen.sum(1).clamp(max=k)
    table = torch.zeros(len(score), units + 1, dtype=torch.bool)
    table.scatter_(1, chosen.masked_fill((chosen < 0) | (chosen >= units), units), True)
    taken = table[:, :-1] & seen
    counted = ((chosen >= 0).sum(1) == wanted) & (taken.sum(1) == wanted)
    if units == 0:
        return counted
    margin = TOLERANCE * score.masked_fill(score.isinf(), 0).abs().amax(1)
    least = score.masked_fill(~taken, torch.inf).amin(1)
    left = score.masked_fill(taken, -torch.inf).amax(1)
    return counted & (least >= left - margin)
