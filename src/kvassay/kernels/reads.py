"""What the queries of a sequence read of a layer, as a kernel is asked for it: from the cache's own address map."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.codec import Coefficients, Mixed
from kvassay.cache.data import Run, Stored
from kvassay.cache.encoded import Encoded, Restored
from kvassay.cache.ops import Bools, Ints, SegmentView, SlotView
from kvassay.cache.paged import PagedCache
from kvassay.kernels.device import CodeRead, PagedLayer, Read, SlotRead
from kvassay.kernels.packed import flatten
from kvassay.layout.model import Latent, Layer


def paged_layer(cache: PagedCache, layer: Layer, sinks: Tensor | None = None) -> PagedLayer:
    """A layer's pool and constants; a layer that reads another's cache has that one's pool.

    Of a latent layer values are read as keys are, as a whole and in place: cut what comes out to `v_dim`.
    """
    owner = layer.index if layer.cache_of is None else layer.cache_of
    keys, values = cache.store.keys(owner), cache.store.values(owner)
    one_side = isinstance(cache.layout.layers[owner].kv, Latent)
    return PagedLayer(keys, keys if one_side else values, layer.scale, layer.softcap, sinks)


def lane_reads(
    cache: PagedCache,
    seq: int,
    layer: int,
    queries: int = 1,
    *,
    fused: bool = True,
    selected: Tensor | None = None,
) -> list[Read]:
    """All that the last `queries` tokens of a sequence read of a layer that owns its cache.

    fused: codes are dequantised in the kernel, as an engine would; else the decoded copies that this harness keeps
        are read, which is faster to replay and says nothing of a method's speed. So they are where a bias or a norm
        is put back, which no kernel here does
    selected: bool [kv_heads, tokens] as `PagedCache.stored` lists them, live ones: by one query, whatever the window
    """
    view, window = cache.ledger.slots(seq, layer, queries), cache.layout.layers[layer].window
    length = cache.ledger.length(seq)
    positions = np.arange(length - queries, length, dtype=np.int32)
    segments = cache.ledger.segments(seq, layer, queries)
    biased = bool(cache.bias_elements(seq, layer))
    if not segments and not biased:
        return [slot_read(view, positions, window) if selected is None else selected_read(view, selected.numpy())]
    data = cache.stored(seq, layer, queries)
    if not fused or any(_is_restored(cache.encoded[segment.id]) for segment in segments):
        return stored_reads(data, view, positions, window, selected)
    width = data.positions.shape[1] - view.positions.shape[1]
    reads: list[Read] = [_raw_read(data, width, view, positions, window, selected)]
    at = 0
    for members in _together(segments, cache.encoded):
        end = at + sum(s.positions.shape[1] for s in members)
        mine = None if selected is None else selected[:, at:end]
        reads.append(_code_read(members, cache.encoded, positions, window, *_from(data, at, end), mine))
        at = end
    return reads


def slot_read(
    view: SlotView,
    positions: Ints,
    window: int | None,
    bias: Tensor | None = None,
    inner_bias: Tensor | None = None,
) -> SlotRead:
    """Every live slot that queries at `positions` [queries], the newest tokens, may read.

    bias, inner_bias: float [kv_heads, n] as the view's columns
    """
    last = _up_to(view, positions)
    first = _first(view.positions, positions, window)
    if view.is_identity and view.counts[0] and bias is None and inner_bias is None:
        offset = view.offsets[0, 0]
        starts = np.flatnonzero((view.offsets[0] == 0) | (np.arange(view.counts[0]) == 0))
        first = np.zeros_like(last) if first is None else first
        blocks = _tensor(view.block_ids[:1, starts])
        return SlotRead(blocks, _tensor(last + offset), _tensor(first + offset), unit=view.block_size)
    physical = _physical(view)
    start = None if first is None else _tensor(first)
    return SlotRead(_tensor(physical), _tensor(last), start, bias=bias, inner_bias=inner_bias)


def selected_read(
    view: SlotView, mask: Bools, bias: Tensor | None = None, inner_bias: Tensor | None = None
) -> SlotRead:
    """What one query reads of a view by a selection: bool [kv_heads, n]; biases as for `slot_read`."""
    physical, heads = _physical(view), len(mask)
    last = mask.sum(1, dtype=np.int32)
    columns = np.zeros((heads, int(last.max(initial=0))), dtype=np.int64)
    for head in range(heads):
        columns[head, : last[head]] = np.flatnonzero(mask[head])
    packed = np.take_along_axis(np.broadcast_to(physical, mask.shape), columns, 1)
    there = torch.from_numpy(columns)
    outer, inner = (None if one is None else torch.gather(one, 1, there) for one in (bias, inner_bias))
    return SlotRead(_tensor(packed), _tensor(last[None]), bias=outer, inner_bias=inner)


def stored_reads(
    data: Stored, view: SlotView, positions: Ints, window: int | None, selected: Tensor | None = None
) -> list[Read]:
    """The same as `data` says it, whose last run is `view`: encoded runs by their decoded copies."""
    reads: list[Read] = []
    held = data.positions if selected is None else data.positions.masked_fill(~selected, -1)
    at = 0
    for run in data.runs[:-1]:
        bias, inner = _from(data, at, at + run.tokens)
        reads.append(_row_read(run, held[:, at : at + run.tokens], positions, window, bias, inner))
        at += run.tokens
    return [*reads, _raw_read(data, at, view, positions, window, selected)]


def _raw_read(
    data: Stored, begin: int, view: SlotView, positions: Ints, window: int | None, selected: Tensor | None
) -> SlotRead:
    """The raw slots, which are the columns of `data` from `begin` on."""
    biases = _from(data, begin)
    if selected is None:
        return slot_read(view, positions, window, *biases)
    return selected_read(view, selected[:, begin:].numpy(), *biases)


def _row_read(
    run: Run, held: Tensor, positions: Ints, window: int | None, bias: Tensor | None, inner: Tensor | None
) -> SlotRead:
    """Rows that lie outside the pool, at true positions `held` [kv_heads, n], -1 where nothing is read.

    They are a pool of one block.
    """
    key = torch.where(held >= 0, held, torch.iinfo(held.dtype).max)
    order = torch.argsort(key, dim=1, stable=True).to(torch.int32)
    ascending = torch.gather(held, 1, order.long()).numpy()
    first = _first(ascending, positions, window)
    last = _passed(ascending, positions, 0)
    bias, inner = (None if one is None else torch.gather(one, 1, order.long()) for one in (bias, inner))
    start = None if first is None else _tensor(first)
    values = run.k if run.one_side else run.v
    return SlotRead(order, _tensor(last), start, bias=bias, inner_bias=inner, keys=run.k[None], values=values[None])


def _code_read(
    segments: Sequence[SegmentView],
    encoded: dict[int, Encoded],
    positions: Ints,
    window: int | None,
    bias: Tensor | None,
    inner: Tensor | None,
    selected: Tensor | None = None,
) -> CodeRead:
    """Segments that are read as one, in the order in which their codes lie.

    selected: bool [kv_heads, tokens] as the segments list them
    """
    codes = [encoded[segment.id] for segment in segments]
    place = torch.cat([_code_order(one) for one in codes], 1)
    listed = torch.from_numpy(np.concatenate([s.positions for s in segments], 1))
    alive = torch.from_numpy(np.concatenate([s.alive for s in segments], 1))
    offsets = list(itertools.accumulate((s.positions.shape[1] for s in segments), initial=0))
    # `place` counts from each segment's own first column.
    shift = torch.cat([torch.full((_code_width(one),), at) for one, at in zip(codes, offsets, strict=False)])
    column = torch.where(place >= 0, place + shift, place)

    def laid(x: Tensor, empty: float) -> Tensor:
        return torch.gather(x, 1, column.clamp(min=0)).masked_fill(column < 0, empty)

    held = laid(listed, -1)
    wanted = alive if selected is None else alive & selected
    seen = (laid(wanted, False) & (column >= 0))[None].expand(1, *held.shape)
    newest = torch.from_numpy(positions)[:, None, None]
    if bool((held > int(positions.min())).any()):  # of this chunk, encoded as they were written
        seen = seen & (held[None] <= newest)
    if window is not None:
        seen = seen & (held[None] > newest - window)
    rope = codes[0].rope
    return CodeRead(
        flatten([one.key for one in codes], rope),
        flatten([one.value for one in codes]),
        held.clamp(min=0).to(torch.int32),
        None if bool(seen.all()) else seen,
        None if bias is None else laid(bias, 0),
        None if inner is None else laid(inner, 0),
    )


def _code_order(encoded: Encoded) -> Tensor:
    """int64 [kv_heads, code columns]: which column of the segment's positions a code column is, -1 for none."""
    present = next((side.present for side in (encoded.key, encoded.value) if isinstance(side, Mixed)), None)
    if present is None:
        return torch.arange(encoded.positions.shape[1]).expand(encoded.positions.shape[0], -1)
    return torch.where(present, present.cumsum(1) - 1, -1)


def _code_width(encoded: Encoded) -> int:
    return _code_order(encoded).shape[1]


def _together(segments: Sequence[SegmentView], encoded: dict[int, Encoded]) -> Iterator[list[SegmentView]]:
    """Segments that one call can read: neighbours with codes of their own; low-rank ones stand alone."""

    def alone(segment: SegmentView) -> int:
        one = encoded[segment.id]
        low = any(isinstance(side, Coefficients) for side in (one.key, one.value))
        return segment.id if low or one.rope is not None else -1

    for _, members in itertools.groupby(segments, key=alone):
        yield list(members)


def _is_restored(encoded: Encoded) -> bool:
    return isinstance(encoded.key, Restored) or isinstance(encoded.value, Restored)


def _up_to(view: SlotView, positions: Ints) -> Ints:
    """int32 [queries, kv_heads]: how many leading entries queries at `positions`, the newest tokens, may read."""
    many = np.arange(len(positions), dtype=np.int32)
    newest = view.counts[:, None] - len(positions) + many
    if newest.min() >= 0 and bool((np.take_along_axis(view.positions, newest, 1) == positions).all()):
        return newest.T + 1  # they come last in every head
    return _passed(view.positions, positions, 0)


def _first(held: Ints, positions: Ints, window: int | None) -> Ints | None:
    """int32 [queries, kv_heads]: how many leading entries, at ascending positions `held`, a window has passed."""
    return None if window is None else _passed(held, positions, window)


def _passed(held: Ints, positions: Ints, by: int) -> Ints:
    """int32 [queries, kv_heads]: entries, at ascending positions `held`, at least `by` before a query's own."""
    counts = (held >= 0).sum(1)
    passed = [np.searchsorted(row[:n], positions - by, "right") for row, n in zip(held, counts, strict=True)]
    return np.stack(passed, 1).astype(np.int32)


def _from(data: Stored, begin: int, end: int | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Both biases of some columns."""
    bias, inner = (None if one is None else one[:, begin:end] for one in (data.bias, data.inner_bias))
    return bias, inner


def _physical(view: SlotView) -> Ints:
    """Physical slots [kv_heads or 1, n]: one row where all heads read the same."""
    heads = slice(0, 1) if view.uniform else slice(None)
    slots: Ints = view.block_ids[heads] * view.block_size + view.offsets[heads]
    return slots


def _tensor(x: Ints) -> Tensor:
    return torch.from_numpy(np.require(x, np.int32, ["C", "W"]))
