"""The reference as a `DecodeKernel`: everything gathered and decoded, then plain torch in float64. Slow and right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.cache.data import Run, Stored
from kvassay.cache.rope import rotate
from kvassay.kernels.device import CodeRead, DecodeKernel, LaneRead, PagedLayer, Plan, Read, SlotRead
from kvassay.kernels.reference import attend


class ReferenceKernel(DecodeKernel):
    """What every other kernel is tested against."""

    def plan(self, layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> Plan:
        """See `DecodeKernel.plan`; computed in float64."""
        return _Plan(layer, lanes)


@dataclass(frozen=True)
class _Plan:
    layer: PagedLayer
    lanes: Sequence[LaneRead]

    def run(self, q: Tensor) -> Tensor:
        return torch.stack([_lane(self.layer, one, reads) for one, reads in zip(q, self.lanes, strict=True)])


def _lane(layer: PagedLayer, q: Tensor, reads: LaneRead) -> Tensor:
    kv_heads, queries = layer.keys.shape[1], q.shape[1]
    found = [_gathered(layer, read, kv_heads, queries) for read in reads]
    seen = torch.cat([torch.zeros(kv_heads, queries, 0, dtype=torch.bool), *(one for _, one, _, _ in found)], -1)
    if not seen.any():
        return q.new_zeros(*q.shape[:2], layer.values.shape[3])
    runs = tuple(run for run, _, _, _ in found)
    held = torch.where(seen.any(1), 0, -1)
    bias = torch.cat([one for _, _, one, _ in found], 1)
    inner = torch.cat([one for _, _, _, one in found], 1)
    data = Stored(runs, held, held, bias, inner_bias=inner)
    sinks = None if layer.sinks is None else layer.sinks.double()
    out = attend(q.double(), data, seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
    return out.float()


def _gathered(layer: PagedLayer, read: Read, kv_heads: int, queries: int) -> tuple[Run, Tensor, Tensor, Tensor]:
    """One read's rows, bool [kv_heads, queries, n] what each query sees of them, and both biases."""
    run, seen = _of_slots(layer, read) if isinstance(read, SlotRead) else _of_codes(read, queries)
    none = torch.zeros(kv_heads, run.tokens, dtype=torch.float64)
    bias, inner = (none if one is None else one[:, : run.tokens].double() for one in (read.bias, read.inner_bias))
    return run, seen, bias, inner


def _of_slots(layer: PagedLayer, read: SlotRead) -> tuple[Run, Tensor]:
    keys = layer.keys if read.keys is None else read.keys
    values = layer.values if read.values is None else read.values
    kv_heads, size = keys.shape[1], keys.shape[2]
    n = int(read.last.max()) if read.last.numel() else 0
    token = torch.arange(n)
    entries = read.entries.long().expand(kv_heads, -1)[:, token // read.unit]
    slot = entries * read.unit + token % read.unit if read.unit > 1 else entries
    first = torch.zeros_like(read.last) if read.first is None else read.first
    seen = (token >= first[..., None]) & (token < read.last[..., None])
    seen = seen.transpose(0, 1)
    slot = slot.masked_fill(~seen.any(1), 0)
    head = torch.arange(kv_heads)[:, None]
    block, offset = slot // size, slot % size
    return Run.of(keys[block, head, offset].double(), values[block, head, offset].double()), seen


def _of_codes(read: CodeRead, queries: int) -> tuple[Run, Tensor]:
    keys, values = (torch.cat([one.decode() for one in side.origin], 1).double() for side in (read.keys, read.values))
    if read.keys.rope is not None:
        keys = rotate(keys, read.positions, read.keys.rope)
    seen = torch.ones(1, *read.positions.shape, dtype=torch.bool) if read.seen is None else read.seen
    return Run.of(keys, values), seen.expand(queries, -1, -1).transpose(0, 1)
