"""What a trace offers policies beside the cache itself: recorded queries, taps, and the logits of sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import torch
from torch import Tensor

from kvassay.policy.card import TAPS, Evidence
from kvassay.policy.queries import Queries
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import Rows
from kvassay.replay.asking import Evidences
from kvassay.trace.reader import Segment, Trace
from kvassay.trace.schema import Tap


def after_prefill(trace: Trace) -> Evidences:
    """What policies may be shown when the context is compressed; `future` goes to the hindsight reference alone."""
    return Evidences(
        recent=lambda layer: recorded_queries(trace.prefix, layer),
        future=lambda layer: _future(trace, layer),
        rows=lambda layer: _taps(trace, layer),
    )


def recorded_queries(segment: Segment, layer: int) -> Queries:
    """The stored queries of a segment, float32 [q_heads, rows, k_dim], and what the model's index chose for them."""
    q, chosen = segment.q(layer).transpose(0, 1).float(), recorded_choice(segment, layer)
    return Queries(q, torch.arange(segment.q_start, segment.q_start + q.shape[1]), chosen)


def recorded_choice(segment: Segment, layer: int, first: int | None = None) -> ReadSet | None:
    """What the model's index chose for the stored queries of a layer, from position `first` on; None without one."""
    selection, top = segment.selection(layer, first), segment.layout.layers[layer].topk
    return None if selection is None or top is None else ReadSet(selection.long(), top.unit, own=False)


def sinks_of(trace: Trace) -> dict[int, Tensor]:
    """Logit of each query head's attention sink, float32 [q_heads], per layer that has sinks."""
    return {layer: torch.tensor(logits) for layer, logits in trace.header.sinks.items()}


def index_keys(segment: Segment) -> dict[int, Tensor]:
    """Keys of the model's own selection index, float32 [tokens, dim] by position, per layer that has one."""
    layers = [layer for layer in segment.layout.storing if layer.index_keys is not None]
    return {layer.index: segment.cache(layer.index, "index_keys").float() for layer in layers}


def _future(trace: Trace, layer: int) -> Queries:
    parts = [recorded_queries(branch, layer) for branch in trace.branches]
    return reduce(Queries.then, parts)


def _taps(trace: Trace, layer: int) -> Mapping[Evidence, Callable[[], Rows]]:
    held = {tap.kind: tap for tap in trace.header.taps if tap.layer == layer}
    return {evidence: _rows(trace.prefix, held[kind]) for evidence, kind in TAPS.items() if kind in held}


def _rows(segment: Segment, tap: Tap) -> Callable[[], Rows]:
    def read() -> Rows:
        values = segment.tap(tap.name).float()
        return Rows(values, torch.arange(tap.first, tap.first + len(values)))

    return read
