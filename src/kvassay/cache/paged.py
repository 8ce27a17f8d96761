"""The paged cache: ledger, bytes and encoded segments behind one door.

The replay creates, forks and extends sequences here and asks for edits; whatever the ledger orders to be
copied is copied at once, so that block tables and bytes never disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.apply import apply_edits
from kvassay.cache.data import LayerData, Run, Stored
from kvassay.cache.edits import Decision
from kvassay.cache.encoded import Encoded
from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec, Op, Reclaimed
from kvassay.cache.store import KVStore
from kvassay.errors import CacheError
from kvassay.layout.model import Layout


class PagedCache:
    """K/V of many sequences in one pool of blocks, read back only through the ledger's address map."""

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        device: str = "cpu",
        poison: bool = False,
    ) -> None:
        """`poison` fills unwritten memory with NaN, so that a test sees every read of a wrong slot."""
        self.layout = layout
        self.ledger = Ledger(groups, num_blocks)
        self.store = KVStore(layout, groups, num_blocks, device=device, poison=poison)
        self.encoded: dict[int, Encoded] = {}
        self.moved_elements = 0
        """Elements copied by copy-on-write and compaction so far."""
        self._bias: dict[tuple[int, int], Tensor] = {}
        self._group_of = {layer: group for group in groups for layer in group.layers}

    # -- life of a sequence ----------------------------------------------------------------------------

    def create(self, token_ids: Sequence[int], salt: bytes = b"") -> tuple[int, int]:
        """A new sequence; returns (id, tokens found in the prefix cache). Extend it with the others."""
        created = self.ledger.create(token_ids, salt)
        return created.seq, created.cached_tokens

    def fork(self, seq: int) -> int:
        """A second sequence with the same content, by reference counts alone."""
        child = self.ledger.fork(seq)
        for layer in self._group_of:
            if (seq, layer) in self._bias:
                self._bias[child, layer] = self._bias[seq, layer]
        return child

    def free(self, seq: int) -> None:
        """End a sequence and everything only it owned."""
        self.ledger.free(seq)
        for layer in self._group_of:
            self._bias.pop((seq, layer), None)
        self._drop_dead_segments()

    def extend(self, seq: int, token_ids: Sequence[int], *, committed: bool = True, reuse: int | None = None) -> None:
        """Give the next tokens a slot everywhere; their K/V must then be written, layer by layer.

        reuse: position of an evicted token whose slot the one new token takes, in every full group.
        """
        if reuse is None:
            self.run(self.ledger.append(seq, token_ids, committed))
            return
        if len(token_ids) != 1:
            raise CacheError(f"slot reuse takes 1 token at a time, not {len(token_ids)}")
        victims = {group.index: reuse for group in self.ledger.groups if group.window is None}
        self.run(self.ledger.reuse_slot(seq, victims, token_ids[0]))

    def write(self, layer: int, seqs: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Write the newest tokens' k, v [sequences, kv_heads, tokens, dim] of one layer."""
        tokens = k.shape[2]
        where = [self._newest(seq, layer, tokens) for seq in seqs]
        blocks, offsets = (np.stack(side) for side in zip(*where, strict=True))
        self.store.write(layer, blocks, offsets, k, v)

    def run(self, ops: Sequence[Op]) -> None:
        """Carry out what the ledger ordered."""
        self.moved_elements += self.store.run(ops)

    # -- reading ---------------------------------------------------------------------------------------

    def layer(self, seq: int, layer: int, queries: int = 1) -> LayerData:
        """What the last `queries` tokens of a sequence can read of a layer, by ascending position."""
        return self.stored(seq, layer, queries).by_position()

    def stored(self, seq: int, layer: int, queries: int = 1) -> Stored:
        """The same as it lies: encoded segments, then raw slots."""
        view = self.ledger.slots(seq, layer, queries)
        segments = self.ledger.segments(seq, layer)
        complete = bool((view.counts == view.positions.shape[1]).all())
        runs = [self.store.run_of(layer, view)]
        positions, slots = _long(view.positions), _long(view.logical)
        encoded = None
        if segments:
            encodings = [self.encoded[segment.id] for segment in segments]
            masks = [torch.tensor(segment.alive) for segment in segments]
            at = [_long(s.positions).masked_fill(~alive, -1) for s, alive in zip(segments, masks, strict=True)]
            was = [_long(s.slots).masked_fill(~alive, -1) for s, alive in zip(segments, masks, strict=True)]
            encoded = torch.cat([*masks, torch.zeros_like(positions, dtype=torch.bool)], 1)
            runs = [Run(e.keys, e.values, e.positions.shape[1]) for e in encodings] + runs
            positions, slots = torch.cat([*at, positions], 1), torch.cat([*was, slots], 1)
            complete = complete and all(bool(alive.all()) for alive in masks)
        bias = self._bias.get((seq, layer))
        if bias is not None:
            bias = _at_positions(bias, positions)
        return Stored(tuple(runs), positions, slots, bias, encoded, complete)

    def is_plain(self, seq: int, layer: int) -> bool:
        """Whether the layer lies in slots alone: no encoded segment, no bias."""
        return (seq, layer) not in self._bias and not self.ledger.segments(seq, layer)

    # -- edits -----------------------------------------------------------------------------------------

    def apply(self, seq: int, decision: Decision, *, allow_window: bool = False) -> Reclaimed:
        """Carry out a decision's edits and let go of whole dead blocks; `IllegalEdit` if a law forbids it.

        Nothing is changed in a layer whose edits are refused. Slot reuse is for the next `extend`.
        """
        for layer, edits in decision.edits.items():
            if layer not in self._group_of:
                raise CacheError(f"a decision edits layer {layer}, which holds no cache of its own")
            apply_edits(self, seq, layer, edits, allow_window=allow_window)
        if decision.compact:
            for group in self.ledger.groups:
                if group.window is None:
                    self.run(self.ledger.compact(seq, group.index))
        self._drop_dead_segments()
        return self.ledger.reclaim(seq)

    def set_bias(self, seq: int, layer: int, positions: Tensor, log_weight: Tensor) -> None:
        """Add log weights [kv_heads, n] to the logits of positions [kv_heads, n] (-1 ignored)."""
        old = self._bias.get((seq, layer))
        size = self.ledger.length(seq)
        bias = torch.zeros(positions.shape[0], size)
        if old is not None:
            bias[:, : old.shape[1]] = old
        known = positions >= 0
        bias.scatter_add_(1, positions.clamp(min=0), log_weight.float().masked_fill(~known, 0))
        self._bias[seq, layer] = bias

    def keep_encoded(self, segment: int, run: Encoded) -> None:
        """Hold the tensors of a segment the ledger has just registered."""
        self.encoded[segment] = run

    def bias_elements(self, seq: int, layer: int) -> int:
        """Elements of per-slot bias a layer carries: one per live token and head, float32."""
        if (seq, layer) not in self._bias:
            return 0
        return sum(len(p) for p in self.ledger.live(seq, layer))

    def check(self) -> None:
        """The ledger's laws, and that every segment's tensors are held exactly once."""
        self.ledger.check()
        owned = {
            s.id
            for seq, layer in itertools.product(self.ledger.sequences(), self._group_of)
            for s in self.ledger.segments(seq, layer)
        }
        if not owned <= set(self.encoded):
            raise CacheError(f"segments {sorted(owned - set(self.encoded))} have no tensors")

    def _newest(self, seq: int, layer: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Block ids and offsets [tokens] of the last appended tokens of a layer."""
        view = self.ledger.slots(seq, layer, tokens)
        if view.uniform:
            return view.block_ids[0, -tokens:], view.offsets[0, -tokens:]
        last = int(view.counts[0])
        return view.block_ids[0, last - tokens : last], view.offsets[0, last - tokens : last]

    def _drop_dead_segments(self) -> None:
        alive = self.ledger.segment_ids()
        for segment in [s for s in self.encoded if s not in alive]:
            del self.encoded[segment]


def _long(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _at_positions(bias: Tensor, positions: Tensor) -> Tensor:
    """Look a [kv_heads, length] bias up at positions [kv_heads, n]; 0 beyond its length."""
    inside = (positions >= 0) & (positions < bias.shape[1])
    return torch.gather(bias, 1, positions.clamp(0, bias.shape[1] - 1)).masked_fill(~inside, 0)
