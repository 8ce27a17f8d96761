"""Carry out checked edits, in the order merge, bias, encode, evict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from kvassay.cache.edits import Edit, LowRank, Merge, Quantize
from kvassay.cache.encoded import low_rank, quantized
from kvassay.cache.ops import Ints
from kvassay.cache.validate import Ground, Plan, validate

if TYPE_CHECKING:
    from kvassay.cache.paged import PagedCache


def apply_edits(cache: PagedCache, seq: int, edits: Mapping[int, Sequence[Edit]], *, allow_window: bool) -> None:
    """Apply edits by layer; every edit's token axis is its layer's view before any of them.

    All layers are checked before anything is carried out: `IllegalEdit` leaves the cache as it was. Then come
    the copies that writing needs; they alone can run out of blocks, and `PoolExhausted` leaves the contents as
    they were.
    """
    committed = cache.ledger.length(seq) - cache.ledger.uncommitted(seq)
    plans = [
        validate(
            Ground(cache.layout.layers[layer], cache.layer(seq, layer), committed), wanted, allow_window=allow_window
        )
        for layer, wanted in edits.items()
        if wanted
    ]
    for plan in plans:
        if plan.merge is not None:
            targets = _rows(plan, plan.targets)
            cache.run(cache.ledger.begin_write(seq, plan.layer, targets, allow_window=True))
    for plan in plans:
        _carry_out(cache, seq, plan)


def _carry_out(cache: PagedCache, seq: int, plan: Plan) -> None:
    if plan.merge is not None:
        _merge(cache, seq, plan, plan.merge)
    for weight, before_softcap in plan.bias:
        cache.set_bias(seq, plan.layer, plan.data.positions, weight, before_softcap)
    if plan.codes:
        _encode(cache, seq, plan)
    if bool(plan.gone.any()):
        cache.ledger.evict_positions(seq, plan.layer, _rows(plan, plan.gone), allow_window=True)


def _rows(plan: Plan, mask: Tensor) -> list[Ints]:
    """Per head, the positions that a mask names, ascending."""
    return [row[chosen].numpy() for row, chosen in zip(plan.data.positions, mask, strict=True)]


def _merge(cache: PagedCache, seq: int, plan: Plan, edit: Merge) -> None:
    """Write the weighted mean of each target and its sources; the blocks are this sequence's own by now."""
    view = cache.ledger.slots(seq, plan.layer)
    for head, (target, positions) in enumerate(zip(plan.targets, _rows(plan, plan.targets), strict=True)):
        if not len(positions):
            continue
        k, v = (
            None if x is None else _means(x[head], edit.into[head], edit.weight[head])[target]
            for x in (None if edit.values_only else plan.data.k, plan.data.v)
        )
        columns = np.searchsorted(view.positions[head, : view.counts[head]], positions)
        cache.store.write_at(plan.layer, head, view.block_ids[head, columns], view.offsets[head, columns], k, v)


def _means(x: Tensor, into: Tensor, weight: Tensor) -> Tensor:
    """Rows x [n, dim], each with the rows merged into it, as their mean by weight [n]."""
    weight, source = weight.to(x.dtype), into >= 0
    to, scaled = into[source].long(), x * weight[:, None]
    total = weight.index_add(0, to, weight[source])
    return scaled.index_add(0, to, scaled[source]) / total[:, None]


def _encode(cache: PagedCache, seq: int, plan: Plan) -> None:
    """Move tokens into encoded segments."""
    data = plan.data if plan.merge is None else cache.layer(seq, plan.layer)  # what the merge has written
    layout = cache.layout
    for edit, scope in plan.codes:
        columns = scope.any(0)
        k, v = data.take(columns)
        positions = data.positions.masked_fill(~scope, -1)[:, columns]
        if isinstance(edit, Quantize):
            run, kind = quantized(_cut(edit, columns), k, v, positions), "quantized"
        else:
            cut = _cut_rows(edit, columns)
            run, kind = low_rank(cut, k, v, positions, layout.layers[plan.layer].rope), "low_rank"
        nbytes = max(1, round(run.size.total(layout.element_bytes)))
        segment = cache.ledger.encode(seq, plan.layer, _rows(plan, scope), nbytes, kind, allow_window=True)
        cache.keep_encoded(segment, run.packed_left())


def _cut_rows(edit: LowRank, columns: Tensor) -> LowRank:
    """The edit with the keys before its norm for some columns only."""
    if edit.key_norm is None:
        return edit
    return replace(edit, key_norm=replace(edit.key_norm, rows=edit.key_norm.rows[:, columns]))


def _cut(edit: Quantize, columns: Tensor) -> Quantize:
    """The edit with its widths per token for some columns only."""

    def cut(bits: int | Tensor) -> int | Tensor:
        return bits[:, columns] if isinstance(bits, Tensor) else bits

    key_bits = edit.key_bits if edit.key_axis == "channel" else cut(edit.key_bits)
    return replace(edit, value_bits=cut(edit.value_bits), key_bits=key_bits)
