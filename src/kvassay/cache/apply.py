"""Carry out checked edits, in the order merge, bias, encode, evict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.data import LayerData, to_front
from kvassay.cache.edits import Edit, LowRank, Merge, Quantize
from kvassay.cache.encoded import Encoded, low_rank, quantized
from kvassay.cache.ops import Ints
from kvassay.cache.validate import Ground, Plan, validate
from kvassay.layout.model import Layer, Rope

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


def size_after(layer: Layer, data: LayerData, edits: Sequence[Edit], element_bytes: float) -> float:
    """Bytes of a layer's keys and values as `apply_edits` would leave them: raw tokens and codes, no bias.

    For a policy that has to fit into bytes. `IllegalEdit` as there; `data` holds no code yet and all is committed.
    """
    plan = validate(Ground(layer, data, int(data.positions.max()) + 1), edits, allow_window=True)
    coded = [_code(edit, scope, data, layer.rope).size.total(element_bytes) for edit, scope in plan.codes]
    raw = data.alive & ~plan.gone
    for _, scope in plan.codes:
        raw = raw & ~scope
    return float(raw.sum()) * layer.kv.row * element_bytes + sum(coded)


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
    for edit, scope in plan.codes:
        run = _code(edit, scope, data, cache.layout.layers[plan.layer].rope)
        nbytes = max(1, round(run.size.total(cache.layout.element_bytes)))
        kind = "quantized" if isinstance(edit, Quantize) else "low_rank"
        segment = cache.ledger.encode(seq, plan.layer, _rows(plan, scope), nbytes, kind, allow_window=True)
        cache.keep_encoded(segment, run)


def _code(edit: Quantize | LowRank, scope: Tensor, data: LayerData, rope: Rope | None) -> Encoded:
    """The code of the tokens in scope, each head's at the front, as the ledger registers them: heads that hold other
    tokens, but as many, make one piece."""
    alike = bool((scope == scope[:1]).all())
    columns = scope[0].nonzero().flatten().expand(len(scope), -1) if alike else to_front(scope)
    k, v = data.take(columns)
    positions = torch.gather(data.positions.masked_fill(~scope, -1), 1, columns)
    if isinstance(edit, Quantize):
        return quantized(_cut(edit, columns), k, v, positions, one_side=data.one_side)
    return low_rank(_cut_rows(edit, columns), k, v, positions, rope)


def _cut_rows(edit: LowRank, columns: Tensor) -> LowRank:
    """The edit with the keys before its norm for some columns [kv_heads, n] only."""
    if edit.key_norm is None:
        return edit
    heads = torch.arange(len(columns))[:, None]
    return replace(edit, key_norm=replace(edit.key_norm, rows=edit.key_norm.rows[heads, columns]))


def _cut(edit: Quantize, columns: Tensor) -> Quantize:
    """The edit with its widths per token for some columns [kv_heads, n] only."""

    def cut(bits: int | Tensor) -> int | Tensor:
        return bits.gather(1, columns) if isinstance(bits, Tensor) else bits

    key_bits = edit.key_bits if edit.key_axis == "channel" else cut(edit.key_bits)
    return replace(edit, value_bits=cut(edit.value_bits), key_bits=key_bits)
