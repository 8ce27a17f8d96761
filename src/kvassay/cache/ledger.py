"""The ledger: every edit of a cache, validated, as changes of tables and address maps plus copies to make.

Three kinds of edits, and no fourth:
- `evict`, `evict_positions`, `reclaim`: a mask or a dereference of one sequence; nothing is written.
- `begin_write`, `reuse_slot`, `compact`, `decode`: slots will be written, so blocks with another owner
  are copied first and every block written loses its prefix hash.
- `encode`: tokens leave their slots (which nobody writes) for a segment.
An edited sequence fills blocks that no longer follow from its tokens alone, so it hashes none of them.
No edit touches uncommitted tokens, and none may leave a head with nothing to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvassay.cache.address import EMPTY, LayerMap, dead_blocks, find
from kvassay.cache.check import check_ledger
from kvassay.cache.ops import Bools, Index, Ints, MoveSlots, Op, Reclaimed
from kvassay.cache.pool import NULL_BLOCK
from kvassay.cache.sequence import NULL_REF, BlockRef, SequenceState, Table
from kvassay.cache.views import Views
from kvassay.errors import IllegalEdit

Positions = NDArray[np.integer] | Sequence[ArrayLike]
"""An array `[n]` for all heads, an array `[kv_heads, n]` padded with -1, or one list of positions per head."""

Victim = int | Mapping[int, ArrayLike]
"""A position dead everywhere in the group, or for every layer of it one dead position per head."""


class Ledger(Views):
    """Sequences, their block tables and every legal way to change them; `check()` proves the laws."""

    # -- edits that write nothing --------------------------------------------------------------------

    def evict(self, seq: int, layer: int, dead: Bools, *, allow_window: bool = False) -> int:
        """Stop reading slots: `dead` is bool `[kv_heads, n]` over `slots(seq, layer)`. Returns how many.

        A mask of this sequence alone. Blocks are given back by `reclaim` after all layers.
        """
        s, table = self._editable(seq, layer, allow_window)
        live, dead = s.live(table, layer), np.asarray(dead)
        if dead.dtype != np.bool_ or dead.shape != live.positions.shape:
            raise IllegalEdit(
                f"layer {layer}: mask {dead.dtype}{list(dead.shape)} given, bool{list(live.positions.shape)} needed"
            )
        heads, columns = np.nonzero(dead)
        positions = live.positions[heads, columns]
        if (positions < 0).any():
            head = heads[positions < 0][0]
            raise IllegalEdit(f"layer {layer} head {head}: mask goes beyond its {live.counts[head]} live slots")
        return self._evict_pairs(s, table, layer, heads, positions)

    def evict_positions(self, seq: int, layer: int, positions: Positions, *, allow_window: bool = False) -> int:
        """Stop reading these positions, be they in slots or in encoded segments. Returns how many."""
        s, table = self._editable(seq, layer, allow_window)
        return self._evict_pairs(s, table, layer, *_pairs(positions, table.group.heads(layer), layer))

    def reclaim(self, seq: int) -> Reclaimed:
        """Let go of every full block in which each head of each layer of the group is dead (vLLM's rule).

        The block that the next token goes into stays, dead or not.
        """
        s = self._edit(seq)
        before = self.pool.num_free
        dereferenced = 0
        for table in s.tables:
            maps = [table.maps.get(layer) for layer in table.group.layers]
            dead = dead_blocks(maps, table.group.block_size)
            gone = [i for i in np.flatnonzero(dead)[::-1] if table.blocks[i] != NULL_REF]
            self.pool.release([table.blocks[i].id for i in gone])
            for i in gone:
                table.blocks[i] = NULL_REF
            dereferenced += len(gone)
        return Reclaimed(dereferenced, self.pool.num_free - before)

    # -- edits that write ----------------------------------------------------------------------------

    def begin_write(self, seq: int, layer: int, positions: Positions, *, allow_window: bool = False) -> list[Op]:
        """Make the slots of live `positions` writable in place; returns the copies to make first."""
        s, table = self._editable(seq, layer, allow_window)
        heads, wanted = _pairs(positions, table.group.heads(layer), layer)
        slots, segments = self._locate(s, table, layer, heads, wanted)
        if (segments >= 0).any():
            at = np.flatnonzero(segments >= 0)[0]
            raise IllegalEdit(
                f"layer {layer} head {heads[at]}: position {wanted[at]} is in segment {segments[at]}, not in a slot"
            )
        return self._own_blocks(s, table, slots)

    def reuse_slot(self, seq: int, victims: Mapping[int, Victim], token_id: int) -> list[Op]:
        """Append one committed token into slots of dead tokens, in the groups `victims` names by index.

        The token has its true position at every layer and head, and its slot is where the victim was
        there; groups not named append as usual. Full groups only.
        """
        s = self._edit(seq)
        self._refuse_unsettled(seq, s, "slot reuse")
        targets = [self._victim_slots(s, self._full_table(s, group), victims[group]) for group in victims]
        blocks = [_ordinals(np.concatenate(list(slots.values())), table) for table, slots in targets]
        extra = sum(self._shared(table, b) for (table, _), b in zip(targets, blocks, strict=True))
        ops = self._grow(s, [table for table in s.tables if table.group.index not in victims], 1, extra)
        for (table, slots_of), touched in zip(targets, blocks, strict=True):
            ops += [op for i in touched for op in self._make_writable(table, i)]
            for layer, slots in slots_of.items():
                entries = s.entries(table, layer)
                entries[np.arange(len(slots)), slots] = len(s.tokens)
                table.maps[layer] = LayerMap(entries)
        s.dense = s.dense and not victims
        s.tokens.append(int(token_id))
        self._commit(s, 1)
        return ops

    def check_reuse(self, seq: int, victims: Mapping[int, Victim]) -> None:
        """Raise `IllegalEdit` if `reuse_slot` would refuse these victims."""
        s = self._sequence(seq)
        self._refuse_unsettled(seq, s, "slot reuse")
        for group, victim in victims.items():
            self._victim_slots(s, self._full_table(s, group), victim)

    def compact(self, seq: int, group: int) -> list[Op]:
        """Move live slots to the front, padded to the widest (layer, head), and free the tail blocks.

        Nothing moves while some head has no hole, as no slot would be gained. Leading blocks without a
        hole stay as they are, shared and hashed; of the others, blocks with another owner are replaced
        (which takes new blocks first), and none stays hashed. Positions are unchanged. The ops say which
        slots move; `MoveSlots.count` is the copy to charge. Full groups only.
        """
        s = self._edit(seq)
        table = self._full_table(s, group)
        self._refuse_unsettled(seq, s, "compaction")
        size = table.group.block_size
        entries = {layer: s.entries(table, layer) for layer in table.group.layers}
        width = max(int((array >= 0).sum(axis=1).max(initial=0)) for array in entries.values())
        if width == table.slots:
            return []
        stay = min(_first_hole(array) for array in entries.values()) // size
        old, table.blocks = table.blocks, self._destinations(table, stay, -(-width // size))
        table.slots, table.reserved = width, 0
        ops: list[Op] = []
        for layer, array in entries.items():
            packed = np.full((len(array), width), EMPTY, dtype=np.int32)
            for head, row in enumerate(array):
                src = np.flatnonzero(row >= 0)
                packed[head, : len(src)] = row[src]
                moved = _physical(old, src, size), _physical(table.blocks, np.arange(len(src)), size)
                differ = moved[0] != moved[1]
                if differ.any():
                    ops.append(MoveSlots(layer, head, moved[0][differ], moved[1][differ]))
            table.maps[layer] = LayerMap(packed)
        kept = set(table.blocks)
        self.pool.release([ref.id for ref in reversed(old) if ref not in kept and ref != NULL_REF])
        s.dense = False
        return ops

    # -- encoded segments ----------------------------------------------------------------------------

    def encode(
        self,
        seq: int,
        layer: int,
        positions: Positions,
        nbytes: int,
        kind: str,
        *,
        allow_window: bool = False,
    ) -> int:
        """Move live positions out of their slots, or of older segments, into a new segment; returns its id.

        `nbytes` is what the encoding really holds. Slots left behind are dead, unwritten and reclaimable.
        """
        s, table = self._editable(seq, layer, allow_window)
        heads, wanted = _pairs(positions, table.group.heads(layer), layer)
        if not len(wanted) or nbytes < 1:
            raise IllegalEdit(f"layer {layer}: a segment of {len(wanted)} tokens and {nbytes} bytes")
        slots, segments = self._locate(s, table, layer, heads, wanted)
        self._leave(s, table, layer, heads, wanted, slots, segments)
        count = np.bincount(heads, minlength=table.group.heads(layer))
        shape = (len(count), int(count.max()))
        order = np.lexsort((wanted, heads))
        columns = np.concatenate([np.arange(n) for n in count])
        packed = []
        for values in (wanted, slots):
            array = np.full(shape, -1, dtype=np.int32)
            array[heads[order], columns] = values[order]
            packed.append(array)
        added = self._segments.add(layer, kind, int(nbytes), *packed)
        self._keep_in_segment(s, added, packed[0] >= 0)
        s.dense = False
        return added

    def decode(self, seq: int, segment: int, *, allow_window: bool = False) -> list[Op]:
        """Return what a sequence still reads of a segment to the slots it left, and let go of the segment.

        `IllegalEdit` if a slot was given to another token, compacted away, or its block let go.
        """
        s = self._edit(seq)
        if segment not in s.segment_ids:
            raise IllegalEdit(f"sequence {seq} does not own segment {segment}: it owns {sorted(s.segment_ids)}")
        layer = self._segments.get(segment).layer
        s, table = self._editable(seq, layer, allow_window)
        mask = s.masks(layer)[segment]
        heads, columns = np.nonzero(mask)
        positions = self._segments.get(segment).positions[heads, columns]
        entries = s.entries(table, layer)
        slots = find(entries, heads, positions, dead=True)
        held = np.array([slot >= 0 and table.blocks[slot // table.group.block_size] != NULL_REF for slot in slots])
        if not held.all():
            at = np.flatnonzero(~held)[0]
            raise IllegalEdit(f"layer {layer} head {heads[at]}: position {positions[at]} has no slot to return to")
        ops = self._own_blocks(s, table, slots)
        entries[heads, slots] = positions
        table.maps[layer] = LayerMap(entries)
        self._keep_in_segment(s, segment, np.zeros_like(mask))
        return ops

    def check(self) -> None:
        """Verify every law from scratch; `LedgerCorrupt` with the numbers if one is broken."""
        check_ledger(self)

    # -- machinery -----------------------------------------------------------------------------------

    def _evict_pairs(self, s: SequenceState, table: Table, layer: int, heads: Index, positions: Index) -> int:
        if len(positions):
            places = self._locate(s, table, layer, heads, positions)
            self._refuse_empty(s, table, layer, np.bincount(heads, minlength=table.group.heads(layer)))
            self._leave(s, table, layer, heads, positions, *places)
            s.dense = False
        return len(positions)

    def _leave(
        self,
        s: SequenceState,
        table: Table,
        layer: int,
        heads: Index,
        positions: Index,
        slots: Ints,
        segments: Ints,
    ) -> None:
        """Mark (head, position) pairs dead where `_locate` found them."""
        inside = segments >= 0
        if not inside.all():
            entries = s.entries(table, layer)
            entries[heads[~inside], slots[~inside]] = ~positions[~inside]
            table.maps[layer] = LayerMap(entries)
        for segment in map(int, _distinct(segments[inside])):
            mine = segments == segment
            gone = _member(self._segments.get(segment).positions, heads[mine], positions[mine])
            self._keep_in_segment(s, segment, s.masks(layer)[segment] & ~gone)

    def _locate(self, s: SequenceState, table: Table, layer: int, heads: Index, positions: Index) -> tuple[Ints, Ints]:
        """Logical slot and segment id (-1: in the slot itself) of every live, committed (head, position)."""
        late = positions >= s.committed
        if late.any():
            raise IllegalEdit(
                f"layer {layer}: position {positions[late][0]} is uncommitted or unknown, "
                f"{s.committed} of {len(s.tokens)} tokens are committed"
            )
        slots = find(s.entries(table, layer), heads, positions)
        segments = np.full(len(heads), -1, dtype=np.int32)
        # What a slot holds no segment holds, so a step that only touches new tokens looks into none.
        for segment, mask in self._encoded(s, layer) if (slots < 0).any() else ():
            at = np.full((len(segment.positions), s.committed), -1, dtype=np.int32)
            rows, columns = np.nonzero(mask)
            at[rows, segment.positions[rows, columns]] = columns
            column = at[heads, positions]
            here = column >= 0
            segments[here] = segment.id
            slots[here] = segment.slots[heads[here], column[here]]
        low = s.first_visible(table)
        lost = ((slots < 0) & (segments < 0)) | (positions < low)
        if lost.any():
            raise IllegalEdit(f"layer {layer} head {heads[lost][0]}: position {positions[lost][0]} is not live")
        return slots, segments

    def _own_blocks(self, s: SequenceState, table: Table, slots: Ints) -> list[Op]:
        ordinals = _ordinals(slots, table)
        self._require(self._shared(table, ordinals))
        s.dense = s.dense and not ordinals
        return [op for i in ordinals for op in self._make_writable(table, i)]

    def _victim_slots(self, s: SequenceState, table: Table, victim: Victim) -> tuple[Table, dict[int, Ints]]:
        """Per layer, the slot `[kv_heads]` that the victim left."""
        slots_of = {}
        for layer in table.group.layers:
            count = table.group.heads(layer)
            heads = np.arange(count)
            if isinstance(victim, Mapping) and layer not in victim:
                raise IllegalEdit(f"group {table.group.index}: no victim named for layer {layer}")
            named = np.asarray(victim[layer] if isinstance(victim, Mapping) else victim)
            if named.shape not in ((), (count,)) or (named < 0).any():
                raise IllegalEdit(
                    f"layer {layer}: victims {named.tolist()} given, one position per {count} heads needed"
                )
            positions = np.broadcast_to(named, count)
            slots = find(s.entries(table, layer), heads, positions, dead=True)
            for head, slot in enumerate(slots):
                if slot < 0 or table.blocks[slot // table.group.block_size] == NULL_REF:
                    raise IllegalEdit(
                        f"layer {layer} head {head}: position {positions[head]} holds no dead slot to reuse"
                    )
            slots_of[layer] = slots
        return table, slots_of

    def _destinations(self, table: Table, stay: int, total: int) -> list[BlockRef]:
        """The blocks of a compacted table: `stay` untouched, then own blocks unhashed, then new ones."""
        own = [ref if ref != NULL_REF and self.pool.ref(ref.id) == 1 else None for ref in table.blocks]
        spare = [ref for ref in own[total:] if ref is not None]
        wanted = [i for i in range(stay, total) if own[i] is None]
        self._require(len(wanted) - len(spare))
        supply = iter(spare[: len(wanted)] + self._allocate(max(len(wanted) - len(spare), 0)))
        chosen = [own[i] or next(supply) for i in range(stay, total)]
        for ref in chosen:
            self.pool.drop_hash(ref.id)
        return table.blocks[:stay] + chosen

    def _editable(self, seq: int, layer: int, allow_window: bool) -> tuple[SequenceState, Table]:
        s = self._edit(seq)
        table = self._layer_table(s, layer)
        if table.group.window is not None and not allow_window:
            raise IllegalEdit(
                f"layer {layer} is bounded by a window of {table.group.window}: pass allow_window=True to edit it"
            )
        return s, table

    def _full_table(self, s: SequenceState, group: int) -> Table:
        table = self._table(s, group)
        if table.group.window is not None:
            raise IllegalEdit(f"group {group} has a window of {table.group.window}: its slots must stay in order")
        return table

    def _refuse_unsettled(self, seq: int, s: SequenceState, what: str) -> None:
        if s.uncommitted:
            raise IllegalEdit(f"sequence {seq} has {s.uncommitted} uncommitted tokens: no {what} before they settle")

    def _refuse_empty(self, s: SequenceState, table: Table, layer: int, leaving: Index) -> None:
        live = s.live(table, layer)
        held = ((live.positions >= 0) & (live.positions < s.committed)).sum(axis=1)
        low = s.first_visible(table)
        for segment, mask in self._encoded(s, layer):
            held = held + (mask & (segment.positions >= low)).sum(axis=1)
        empty = np.flatnonzero(leaving >= np.maximum(held, 1))
        if empty.size:
            head = empty[0]
            raise IllegalEdit(
                f"layer {layer} head {head}: evicting {leaving[head]} of {held[head]} live tokens leaves none"
            )


def _pairs(positions: Positions, heads: int, layer: int) -> tuple[Ints, Ints]:
    """(head, position) pairs, each named once."""
    if isinstance(positions, np.ndarray) and positions.ndim == 1:
        rows = [positions] * heads
    elif isinstance(positions, np.ndarray):
        rows = [row[row >= 0] for row in positions]
    else:
        rows = [np.asarray(row, dtype=np.int32) for row in positions]
    if len(rows) != heads or any(row.ndim != 1 for row in rows):
        raise IllegalEdit(f"layer {layer}: positions for {len(rows)} heads given, {heads} needed")
    flat = np.concatenate(rows).astype(np.int32)
    owner = np.repeat(np.arange(heads, dtype=np.int32), [len(row) for row in rows])
    if (flat < 0).any():
        raise IllegalEdit(f"layer {layer}: position {flat.min()} is negative")
    for head, row in enumerate(rows):
        if len(_distinct(row)) != len(row):
            raise IllegalEdit(f"layer {layer} head {head}: a position is named twice in {len(row)}")
    return owner, flat


def _distinct(values: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """The values in ascending order, each once; `np.unique` hashes them, which grows faster than their number."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _member(positions: Ints, heads: Index, wanted: Index) -> Bools:
    """Mask over `positions [heads, n]` of the pairs named."""
    return np.stack([np.isin(row, wanted[heads == head]) for head, row in enumerate(positions)])


def _ordinals(slots: Ints, table: Table) -> list[int]:
    return _distinct(slots // table.group.block_size).tolist()


def _first_hole(entries: Ints) -> int:
    """The first slot that is not live in some head, or the number of slots."""
    holes = np.flatnonzero((entries < 0).any(axis=0))
    return int(holes[0]) if holes.size else entries.shape[1]


def _physical(blocks: list[BlockRef], slots: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    ids = np.array([ref.id for ref in blocks] or [NULL_BLOCK], dtype=np.int64)
    return ids[slots // size] * size + slots % size
