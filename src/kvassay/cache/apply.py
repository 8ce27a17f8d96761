"""Validate a policy's edits of one layer and carry them out, in the order merge, bias, encode, evict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Bias, Edit, Evict, LowRank, Merge, Quantize
from kvassay.cache.encoded import Encoded, low_rank, quantized
from kvassay.errors import IllegalEdit

if TYPE_CHECKING:
    from kvassay.cache.paged import PagedCache

WIDTHS = (0, 2, 4, 8, 16)


def apply_edits(cache: PagedCache, seq: int, layer: int, edits: Sequence[Edit], *, allow_window: bool) -> None:
    """Apply one layer's edits; every edit's token axis is the view before any of them."""
    data = cache.layer(seq, layer)
    committed = cache.ledger.length(seq) - cache.ledger.uncommitted(seq)
    where = _Where(cache, seq, layer, data, committed, allow_window)
    for edit in edits:
        where.validate(edit)
    for kind in (Merge, Bias, Quantize, LowRank, Evict):
        for edit in edits:
            if isinstance(edit, kind):
                where.carry_out(edit)


class _Where:
    """One layer of one sequence, and the edits' common ground."""

    def __init__(
        self, cache: PagedCache, seq: int, layer: int, data: LayerData, committed: int, allow_window: bool
    ) -> None:
        self.cache, self.seq, self.layer, self.data = cache, seq, layer, data
        self.allow_window = allow_window
        self.editable = data.alive & (data.positions < committed)
        self.raw = self.editable if data.encoded is None else self.editable & ~data.encoded

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.positions.shape[0], self.data.positions.shape[1]

    @property
    def key_dim(self) -> int:
        return self.cache.layout.layers[self.layer].kv.k_dim

    def validate(self, edit: Edit) -> None:
        """Refuse wrong shapes and values before anything is changed."""
        if isinstance(edit, Evict):
            keep = self.mask(edit.keep, "Evict.keep")
            self.refuse_empty(keep & self.data.alive)
        elif isinstance(edit, Merge):
            self.floats(edit.weight, "Merge.weight")
            self.targets(edit)
        elif isinstance(edit, Bias):
            self.floats(edit.log_weight, "Bias.log_weight")
        elif isinstance(edit, Quantize):
            self.widths(edit)
        else:
            self.ranks(edit)

    def carry_out(self, edit: Edit) -> None:
        """Do it."""
        if isinstance(edit, Evict):
            gone = self.data.alive & ~self.mask(edit.keep, "Evict.keep")
            self.evict(gone)
        elif isinstance(edit, Merge):
            self.merge(edit)
        elif isinstance(edit, Bias):
            positions = self.data.positions.masked_fill(~self.editable, -1)
            self.cache.set_bias(self.seq, self.layer, positions, edit.log_weight)
        elif isinstance(edit, Quantize):
            self.quantize(edit)
        else:
            self.low_rank(edit)

    # -- evict -----------------------------------------------------------------------------------------

    def evict(self, gone: Tensor) -> None:
        if not bool(gone.any()):
            return
        held = [np.sort(p) for p in self.cache.ledger.live(self.seq, self.layer)]
        rows = [np.intersect1d(row[g].numpy(), h) for row, g, h in zip(self.data.positions, gone, held, strict=True)]
        self.cache.ledger.evict_positions(self.seq, self.layer, rows, allow_window=self.allow_window)

    # -- merge -----------------------------------------------------------------------------------------

    def merge(self, edit: Merge) -> None:
        """Weighted mean of each target with its sources, written after copy-on-write."""
        source = edit.into >= 0
        target = self.target_mask(edit)
        rows = [p[t].numpy() for p, t in zip(self.data.positions, target, strict=True)]
        ledger = self.cache.ledger
        self.cache.run(ledger.begin_write(self.seq, self.layer, rows, allow_window=self.allow_window))
        view = ledger.slots(self.seq, self.layer)
        for head in range(self.shape[0]):
            index = target[head].nonzero().flatten()
            if not len(index):
                continue
            to, weight = edit.into[head][source[head]], edit.weight[head].to(self.data.v.dtype)
            total = weight.clone().index_add_(0, to, weight[source[head]])[index]
            mean = [
                _weighted(side[head], weight, source[head], to)[index] / total[:, None]
                for side in (self.data.k, self.data.v)
            ]
            column = torch.from_numpy(np.searchsorted(view.positions[head, : view.counts[head]], rows[head]))
            self.cache.store.write_at(
                self.layer,
                head,
                view.block_ids[head, column],
                view.offsets[head, column],
                None if edit.values_only else mean[0],
                mean[1],
            )

    def target_mask(self, edit: Merge) -> Tensor:
        target = torch.zeros(self.shape, dtype=torch.bool)
        return target.scatter_(1, edit.into.clamp(min=0), True) & _hit(edit.into, self.shape)

    def targets(self, edit: Merge) -> None:
        if edit.into.shape != self.shape or edit.into.is_floating_point():
            raise self.illegal(f"Merge.into of shape {list(edit.into.shape)}, integer {list(self.shape)} needed")
        if int(edit.into.max()) >= self.shape[1]:
            raise self.illegal(f"Merge.into names token {int(edit.into.max())} of {self.shape[1]}")
        source, target = edit.into >= 0, self.target_mask(edit)
        if bool((source & target).any()):
            raise self.illegal("a token is merged away and merged into at once")
        if bool(((source | target) & ~self.raw).any()):
            raise self.illegal("Merge touches tokens that are encoded, uncommitted or not there")
        if bool((edit.weight[source | target] <= 0).any()):
            raise self.illegal("Merge.weight must be positive")

    # -- encode ----------------------------------------------------------------------------------------

    def quantize(self, edit: Quantize) -> None:
        scope = self.scope(edit.tokens)
        value_bits = edit.value_bits
        dropped = scope & (value_bits == 0) if isinstance(value_bits, Tensor) else torch.zeros_like(scope)
        present = scope & ~dropped
        if not bool(present.any()):
            raise self.illegal("Quantize keeps no token")
        columns = present.any(0)
        cut = replace(edit, value_bits=_cut(edit.value_bits, columns), key_bits=self.cut_keys(edit, columns))
        positions = self.data.positions.masked_fill(~present, -1)[:, columns]
        self.encode(quantized(cut, *self.data.take(columns), positions), "quantized")
        self.evict(dropped)

    def low_rank(self, edit: LowRank) -> None:
        scope = self.scope(edit.tokens)
        columns = scope.any(0)
        positions = self.data.positions.masked_fill(~scope, -1)[:, columns]
        rope = self.cache.layout.layers[self.layer].rope
        run = low_rank(edit, *self.data.take(columns), positions, rope)
        self.encode(run, "low_rank")

    def encode(self, run: Encoded, kind: str) -> None:
        """Register a run with the ledger; its own column order is by ascending position, packed left."""
        packed = _pack_left(run)
        rows = [p[p >= 0].numpy() for p in packed.positions]
        nbytes = max(1, round(run.size.total(self.cache.layout.element_bytes)))
        segment = self.cache.ledger.encode(self.seq, self.layer, rows, nbytes, kind, allow_window=self.allow_window)
        self.cache.keep_encoded(segment, packed)

    def scope(self, tokens: Tensor | None) -> Tensor:
        """The tokens to encode: those asked for, else all that are still raw."""
        if tokens is None:
            return self.raw
        asked = self.mask(tokens, "tokens") & self.data.alive
        if bool((asked & ~self.raw).any()):
            raise self.illegal("tokens to encode are uncommitted or encoded already; encoded data is not re-encoded")
        return asked

    def cut_keys(self, edit: Quantize, columns: Tensor) -> int | Tensor:
        return edit.key_bits if edit.key_axis == "channel" else _cut(edit.key_bits, columns)

    # -- validation ------------------------------------------------------------------------------------

    def mask(self, mask: Tensor, name: str) -> Tensor:
        if mask.dtype != torch.bool or mask.shape not in (self.shape, self.shape[1:]):
            raise self.illegal(
                f"{name} is {mask.dtype} {list(mask.shape)}, bool {list(self.shape)} or [{self.shape[1]}] needed"
            )
        return mask.expand(self.shape)

    def floats(self, x: Tensor, name: str) -> None:
        if x.shape != self.shape or not bool(torch.isfinite(x[self.data.alive]).all()):
            raise self.illegal(f"{name} is {list(x.shape)}, finite {list(self.shape)} needed")

    def widths(self, edit: Quantize) -> None:
        heads, tokens = self.shape
        allowed = {"value_bits": [(heads, tokens)], "key_bits": [(heads, tokens)]}
        if edit.key_axis == "channel":
            allowed["key_bits"] = [(heads, self.key_dim)]
        for name, shapes in allowed.items():
            bits = getattr(edit, name)
            found = [bits] if isinstance(bits, int) else bits.unique().tolist()
            if isinstance(bits, Tensor) and tuple(bits.shape) not in shapes:
                raise self.illegal(f"Quantize.{name} is {list(bits.shape)}, {list(shapes[0])} needed")
            if not set(found) <= set(WIDTHS) or found == [0]:
                raise self.illegal(f"Quantize.{name} holds widths {found}, allowed are {WIDTHS}")
        self.scope(edit.tokens)

    def ranks(self, edit: LowRank) -> None:
        named = sorted(h for g in edit.head_groups for h in g)
        if named != list(range(self.shape[0])):
            raise self.illegal(f"LowRank.head_groups name heads {named}, each of 0..{self.shape[0] - 1} once needed")
        self.scope(edit.tokens)

    def refuse_empty(self, keep: Tensor) -> None:
        empty = (keep.sum(1) == 0).nonzero().flatten()
        if len(empty):
            raise self.illegal(f"KV head {int(empty[0])} would keep 0 of {int(self.data.alive[empty[0]].sum())} tokens")

    def illegal(self, what: str) -> IllegalEdit:
        return IllegalEdit(f"layer {self.layer}: {what}")


def _hit(into: Tensor, shape: tuple[int, int]) -> Tensor:
    """Which tokens at least one source names as its target."""
    count = torch.zeros(shape, dtype=torch.int64)
    return count.scatter_add_(1, into.clamp(min=0), (into >= 0).long()) > 0


def _weighted(x: Tensor, weight: Tensor, source: Tensor, to: Tensor) -> Tensor:
    scaled = x * weight[:, None]
    return scaled.index_add(0, to, scaled[source])


def _cut(bits: int | Tensor, columns: Tensor) -> int | Tensor:
    return bits if isinstance(bits, int) else bits[:, columns]


def _pack_left(run: Encoded) -> Encoded:
    """Move each head's tokens to the front, as the ledger registers them; padding last."""
    if bool((run.positions >= 0).all()):
        return run
    alive = run.positions >= 0
    order = torch.sort((~alive).to(torch.int8), dim=1, stable=True).indices[:, : int(alive.sum(1).max())]
    rows = torch.arange(order.shape[0])[:, None]
    return Encoded(
        torch.gather(run.positions, 1, order),
        run.key,
        run.value,
        run.rope,
        run.keys()[rows, order],
        run.values()[rows, order],
    )
