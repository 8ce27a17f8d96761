"""The address map: which position each head of a layer finds in each logical slot of its block table.

A layer that nothing has changed has no map: slot `s` holds position `s + shift` for every head. A changed
layer maps its first `n` slots explicitly; later slots follow the rule, with `shift` = tokens - slots.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvassay.cache.ops import Bools, Index, Ints

EMPTY = np.iinfo(np.int32).min
"""Entry of a slot that holds nothing (padding after a compaction)."""


class Live(NamedTuple):
    """Live slots by position: `slots` and `positions` are `[heads, n]`, -1 padded, `counts` is `[heads]`.

    `uniform`: every head has the same slots, though not necessarily the same positions in them;
    `contiguous`: also, the slots are consecutive.
    """

    slots: Ints
    positions: Ints
    counts: Ints
    uniform: bool
    contiguous: bool


class LayerMap:
    """Immutable, so that forks share it. `entries[h, s]` is position `p` if live, `~p` if dead, or `EMPTY`.

    A dead entry still names the position whose stale content the slot holds: a later token may take
    that slot, or the position may return to it from an encoded segment.
    """

    def __init__(self, entries: Ints) -> None:
        self.entries = entries
        entries.setflags(write=False)

    @property
    def n(self) -> int:
        """Slots mapped."""
        return self.entries.shape[1]

    @cached_property
    def live(self) -> Live:
        """The mapped part's live slots."""
        return _sorted_live(self.entries)


def _sorted_live(entries: Ints, low: int = 0) -> Live:
    alive = entries >= low
    counts = alive.sum(axis=1, dtype=np.int32)
    width = int(counts.max(initial=0))
    keys = np.where(alive, entries, np.iinfo(np.int32).max)
    slots = np.argsort(keys, axis=1, kind="stable")[:, :width].astype(np.int32)
    positions = np.take_along_axis(entries, slots, axis=1)
    padding = np.arange(width) >= counts[:, None]
    slots[padding] = -1
    positions[padding] = -1
    return Live(slots, positions, counts, *_shape_flags(slots))


def _shape_flags(slots: Ints) -> tuple[bool, bool]:
    uniform = bool((slots == slots[0]).all())
    return uniform, uniform and bool((np.diff(slots[0]) == 1).all())


def live_slots(layer_map: LayerMap | None, heads: int, slots: int, shift: int, low: int = 0) -> Live:
    """Live slots of one layer with `slots` slots in use, without positions below `low`."""
    if layer_map is None:
        return _uniform_live(np.arange(max(low - shift, 0), slots, dtype=np.int32), shift, heads)
    mapped = _sorted_live(layer_map.entries, low) if low else layer_map.live
    tail = np.arange(max(layer_map.n, low - shift), slots, dtype=np.int32)
    if tail.size == 0:
        return mapped
    if mapped.slots.size == 0:
        return _uniform_live(tail, shift, heads)
    more = _uniform_live(tail, shift, heads)
    counts = mapped.counts + more.counts
    if (mapped.counts != mapped.counts[0]).any():
        return Live(*_append_ragged(mapped, more), counts, False, False)
    slots_of = np.concatenate((mapped.slots, more.slots), axis=1)
    positions = np.concatenate((mapped.positions, more.positions), axis=1)
    contiguous = mapped.contiguous and bool(mapped.slots[0, -1] + 1 == tail[0])
    return Live(slots_of, positions, counts, mapped.uniform, contiguous)


def _uniform_live(row: Ints, shift: int, heads: int) -> Live:
    counts = np.full(heads, row.size, dtype=np.int32)
    return Live(_broadcast(row, heads), _broadcast(row + np.int32(shift), heads), counts, True, True)


def _broadcast(row: Ints, heads: int) -> Ints:
    return np.broadcast_to(row.astype(np.int32, copy=False), (heads, row.size))


def _append_ragged(mapped: Live, more: Live) -> tuple[Ints, Ints]:
    """Slots and positions of `mapped` with `more` put right after each head's last one."""
    heads, width = mapped.slots.shape
    columns = mapped.counts[:, None] + np.arange(more.slots.shape[1])
    head = np.arange(heads)[:, None]
    slots, positions = (np.full((heads, width + more.slots.shape[1]), -1, dtype=np.int32) for _ in range(2))
    slots[:, :width], positions[:, :width] = mapped.slots, mapped.positions
    slots[head, columns], positions[head, columns] = more.slots, more.positions
    return slots, positions


def materialise(layer_map: LayerMap | None, heads: int, upto: int, shift: int) -> Ints:
    """A writable `[heads, upto]` copy of the map, the rule for unmapped slots written out."""
    entries = np.empty((heads, upto), dtype=np.int32)
    mapped = layer_map.n if layer_map is not None else 0
    if layer_map is not None:
        entries[:, :mapped] = layer_map.entries
    entries[:, mapped:] = np.arange(mapped, upto, dtype=np.int32) + shift
    return entries


def find(entries: Ints, heads: Index, positions: Index, dead: bool = False) -> Ints:
    """The slot where head `heads[i]` has `positions[i]` live (or `dead`), -1 if nowhere; `[len(heads)]`."""
    held = ~entries if dead else entries
    limit = int(positions.max(initial=0)) + 1
    slot_of = np.full((len(entries), limit), -1, dtype=np.int32)
    rows, slots = np.nonzero((held >= 0) & (held < limit))
    slot_of[rows, held[rows, slots]] = slots
    return slot_of[heads, positions]


def dead_blocks(maps: list[LayerMap | None], block_size: int) -> Bools:
    """Per full block that every layer maps, whether all its slots are dead for every head of every layer."""
    mapped = [layer_map for layer_map in maps if layer_map is not None]
    blocks = min(layer_map.n for layer_map in mapped) // block_size if len(mapped) == len(maps) else 0
    dead = np.ones(blocks, dtype=np.bool_)
    for layer_map in mapped:
        part = layer_map.entries[:, : blocks * block_size] < 0
        dead &= part.reshape(len(part), blocks, block_size).all(axis=(0, 2))
    return dead
