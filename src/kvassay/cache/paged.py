"""The paged cache: ledger, bytes and encoded segments behind one door.

The replay creates, forks and extends sequences here and asks for edits; whatever the ledger orders to be
copied is copied at once, so that block tables and bytes never disagree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.apply import apply_edits
from kvassay.cache.data import LayerData, Run, Stored
from kvassay.cache.edits import Decision
from kvassay.cache.encoded import Encoded
from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec, Ints, Op, Reclaimed
from kvassay.cache.store import KVStore
from kvassay.errors import CacheError, IllegalEdit, LedgerCorrupt
from kvassay.layout.model import Layout

SHORT = 256
"""Tokens below which copying a segment costs less than a matrix product of its own."""


class PagedCache:
    """K/V of many sequences in one pool of blocks, read back only through the ledger's address map."""

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        *,
        poison: bool = False,
        sides_apart: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """`poison` fills unwritten memory with NaN, so that a test sees every read of a wrong slot; `sides_apart` and
        `device` as in `KVStore`."""
        self.layout = layout
        self.ledger = Ledger(groups, num_blocks)
        self.store = KVStore(layout, groups, num_blocks, poison=poison, sides_apart=sides_apart, device=device)
        self.encoded: dict[int, Encoded] = {}
        self.moved_elements = 0
        """Elements copied by copy-on-write and compaction so far."""
        self._bias: dict[tuple[int, int, bool], Tensor] = {}
        """By sequence, layer, and whether it is added before the layer's soft-cap: float [kv_heads, length]."""
        self._group_of = {layer: group for group in groups for layer in group.layers}
        self._tails: dict[tuple[int, int, int, tuple[int, ...]], tuple[Ints, Ints]] = {}
        """Where the newest tokens lie, by group; emptied by every `extend`."""
        self._reusing: set[int] = set()
        """Sequences whose newest token took the slots of evicted ones."""

    # -- life of a sequence ----------------------------------------------------------------------------

    def create(self, token_ids: Sequence[int], salt: bytes = b"") -> tuple[int, int]:
        """A new sequence; returns (id, tokens found in the prefix cache). Extend it with the others."""
        created = self.ledger.create(token_ids, salt)
        return created.seq, created.cached_tokens

    def fork(self, seq: int) -> int:
        """A second sequence with the same content, by reference counts alone."""
        child = self.ledger.fork(seq)
        for (owner, layer, inner), bias in list(self._bias.items()):
            if owner == seq:
                self._bias[child, layer, inner] = bias
        return child

    def free(self, seq: int) -> None:
        """End a sequence and everything only it owned."""
        self.ledger.free(seq)
        for key in [key for key in self._bias if key[0] == seq]:
            del self._bias[key]
        self._drop_dead_segments()

    def extend(self, seq: int, token_ids: Sequence[int], *, committed: bool = True, reuse: int | None = None) -> None:
        """Give the next tokens a slot everywhere; their K/V must then be written, layer by layer.

        reuse: position of an evicted token whose slot the one new token takes, in every full group.
        """
        self._tails.clear()
        self._reusing.discard(seq)
        if reuse is None:
            self.run(self.ledger.append(seq, token_ids, committed))
            return
        self._reusing.add(seq)
        if len(token_ids) != 1:
            raise CacheError(f"slot reuse takes 1 token at a time, not {len(token_ids)}")
        self.run(self.ledger.reuse_slot(seq, self._victims(reuse), token_ids[0]))

    def write(self, layer: int, seqs: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Write the newest tokens' k, v [sequences, kv_heads, tokens, dim] of one layer."""
        blocks, offsets = self._newest_of(layer, seqs, k.shape[2])
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
        segments = self.ledger.segments(seq, layer, queries)
        runs = [*_runs([self.encoded[s.id] for s in segments]), *self.store.runs_of(layer, view)]
        positions = _side_by_side([*(s.positions for s in segments), view.positions])
        slots = _side_by_side([*(s.slots for s in segments), view.logical])
        complete = bool((view.counts == view.positions.shape[1]).all())
        encoded = None
        if segments:
            alive = torch.from_numpy(np.concatenate([s.alive for s in segments], 1))
            encoded = torch.nn.functional.pad(alive, (0, view.positions.shape[1]))
            for ours in (positions, slots):
                ours[:, : alive.shape[1]].masked_fill_(~alive, -1)
            complete = complete and bool(alive.all())
        outer, inner = (
            None if bias is None else _at_positions(bias, positions)
            for bias in (self._bias.get((seq, layer, inner)) for inner in (False, True))
        )
        return Stored(tuple(runs), positions, slots, outer, encoded, complete, inner)

    def is_plain(self, seq: int, layer: int) -> bool:
        """Whether the layer lies in slots alone: no encoded segment, no bias."""
        return not self._biases(seq, layer) and not self.ledger.segments(seq, layer)

    # -- edits -----------------------------------------------------------------------------------------

    def apply(self, seq: int, decision: Decision, *, allow_window: bool = False) -> Reclaimed:
        """Carry out a decision's edits and let go of whole dead blocks; `IllegalEdit` if a law forbids it.

        Every layer's edits are validated before any is carried out, so that a refused decision changes nothing.
        Two things are only known afterwards: whether the pool has the blocks a compaction needs, and whether the
        slot to reuse (which the next `extend` takes) is dead; either error leaves the edits done.
        """
        for layer in decision.edits:
            if layer not in self._group_of:
                raise CacheError(f"a decision edits layer {layer}, which holds no cache of its own")
        self._check_moves(seq, decision)
        apply_edits(self, seq, decision.edits, allow_window=allow_window)
        if decision.compact:
            for group in self.ledger.groups:
                if group.window is None:
                    self.run(self.ledger.compact(seq, group.index))
        self._drop_dead_segments()
        reclaimed = self.ledger.reclaim(seq)
        if decision.reuse is not None:
            self.ledger.check_reuse(seq, self._victims(decision.reuse))
        return reclaimed

    def set_bias(self, seq: int, layer: int, positions: Tensor, log_weight: Tensor, before_softcap: bool) -> None:
        """Add log weights [kv_heads, n] to the logits of positions [kv_heads, n] (-1 ignored)."""
        inner = before_softcap and self.layout.layers[layer].softcap is not None
        old = self._bias.get((seq, layer, inner))
        size = self.ledger.length(seq)
        bias = torch.zeros(positions.shape[0], size)
        if old is not None:
            bias[:, : old.shape[1]] = old
        known = positions >= 0
        bias.scatter_add_(1, positions.clamp(min=0), log_weight.float().masked_fill(~known, 0))
        self._bias[seq, layer, inner] = bias

    def keep_encoded(self, segment: int, run: Encoded) -> None:
        """Hold the tensors of a segment the ledger has just registered."""
        self.encoded[segment] = run

    def bias_elements(self, seq: int, layer: int) -> int:
        """Elements of per-slot bias a layer carries: one per live token and head, float32."""
        biases = self._biases(seq, layer)
        return biases * sum(len(p) for p in self.ledger.live(seq, layer)) if biases else 0

    def code_bytes(self, seq: int, layer: int) -> tuple[float, float]:
        """Bytes that the codes of a layer's keys and of its values hold; a latent's one code is named for both."""
        held = [self.encoded[segment.id] for segment in self.ledger.segments(seq, layer)]
        element = self.layout.element_bytes
        return sum(one.key.size.total(element) for one in held), sum(one.value.size.total(element) for one in held)

    def check(self) -> None:
        """The ledger's laws, and that every segment's tensors are held exactly once."""
        self.ledger.check()
        unlike = self.ledger.segment_ids() ^ set(self.encoded)
        if unlike:
            raise LedgerCorrupt(f"segments {sorted(unlike)} have tensors or an owner, but not both")

    def _check_moves(self, seq: int, decision: Decision) -> None:
        moves = decision.compact, decision.reuse is not None
        if all(moves):
            raise IllegalEdit("a decision compacts or reuses a slot, not both: compaction leaves no dead slot")
        if any(moves) and self.ledger.uncommitted(seq):
            raise IllegalEdit(
                f"sequence {seq} has {self.ledger.uncommitted(seq)} uncommitted tokens: "
                "neither compaction nor slot reuse before they settle"
            )

    def _biases(self, seq: int, layer: int) -> int:
        return sum((seq, layer, inner) in self._bias for inner in (False, True))

    def _victims(self, position: int) -> dict[int, int]:
        return {group.index: position for group in self.ledger.groups if group.window is None}

    def _newest_of(self, layer: int, seqs: Sequence[int], tokens: int) -> tuple[Ints, Ints]:
        """`_newest` of several sequences, [sequences, kv_heads, tokens]; one answer for all layers of a group."""
        group = self._group_of[layer]
        key = group.index, group.heads(layer), tokens, tuple(seqs)
        found = self._tails.get(key)
        if found is None:
            where = [self._newest(seq, layer, tokens) for seq in seqs]
            found = np.stack([blocks for blocks, _ in where]), np.stack([offsets for _, offsets in where])
            if not self._reusing.intersection(seqs):  # a reused slot may be another one in every layer
                self._tails[key] = found
        return found

    def _newest(self, seq: int, layer: int, tokens: int) -> tuple[Ints, Ints]:
        """Block ids and offsets [kv_heads, tokens] of the last appended tokens; after slot reuse heads may differ."""
        view = self.ledger.slots(seq, layer, tokens)
        columns = view.counts[:, None] - tokens + np.arange(tokens)
        return np.take_along_axis(view.block_ids, columns, 1), np.take_along_axis(view.offsets, columns, 1)

    def _drop_dead_segments(self) -> None:
        if len(self.encoded) == self.ledger.segment_count():
            return
        alive = self.ledger.segment_ids()
        for segment in [s for s in self.encoded if s not in alive]:
            del self.encoded[segment]


def _side_by_side(arrays: Sequence[Ints]) -> Tensor:
    """Arrays [kv_heads, n] next to each other, int64."""
    return torch.from_numpy(np.concatenate(arrays, 1, dtype=np.int64))


def _runs(encodings: Sequence[Encoded]) -> Iterator[Run]:
    """Encoded segments as runs; short neighbours, such as the tokens of single steps, are read as one."""
    for short, group in itertools.groupby(encodings, key=lambda one: one.positions.shape[1] < SHORT):
        members = [_run(one) for one in group]
        yield from [Run.end_to_end(members)] if short else members


def _run(one: Encoded) -> Run:
    tokens = one.positions.shape[1]
    return Run(one.keys, one.values, tokens) if one.latent is None else Run.latent(one.keys, one.latent, tokens)


def _at_positions(bias: Tensor, positions: Tensor) -> Tensor:
    """Look a [kv_heads, length] bias up at positions [kv_heads, n]; 0 beyond its length."""
    inside = (positions >= 0) & (positions < bias.shape[1])
    return torch.gather(bias, 1, positions.clamp(0, bias.shape[1] - 1)).masked_fill(~inside, 0)
