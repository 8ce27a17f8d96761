"""What a sequence can read, layer by layer: live slots and encoded segments."""

from __future__ import annotations

import numpy as np

from kvassay.cache.ops import Bools, Ints, SegmentView, SlotView
from kvassay.cache.segments import Segment
from kvassay.cache.sequence import SequenceState, Table
from kvassay.cache.tables import Tables
from kvassay.errors import CacheError


class Views(Tables):
    """Read access. Views are cached until the sequence changes, and never change themselves."""

    def slots(self, seq: int, layer: int, queries: int = 1) -> SlotView:
        """Live slots of one layer by position; uncommitted tokens are among them.

        In a windowed group: the slots that at least one of the last `queries` tokens can see.
        """
        s = self._sequence(seq)
        table = self._layer_table(s, layer)
        if queries < 1:
            raise CacheError(f"queries must be at least 1, not {queries}")
        # Layers of a group that nothing changed read the same slots: one view per head count serves all.
        who = layer if layer in table.maps else -table.group.heads(layer)
        key = (table.group.index, who, queries)
        if key not in s.slot_views:
            s.slot_views[key] = self._slot_view(s, table, layer, queries)
        return s.slot_views[key]

    def segments(self, seq: int, layer: int, queries: int = 1) -> tuple[SegmentView, ...]:
        """The layer's encoded segments that the last `queries` tokens read from, oldest first."""
        s = self._sequence(seq)
        table = self._layer_table(s, layer)
        if (layer, queries) not in s.segment_views:
            low = s.first_visible(table, queries)
            s.segment_views[layer, queries] = tuple(
                SegmentView(
                    id=segment.id,
                    kind=segment.kind,
                    nbytes=segment.nbytes,
                    positions=segment.positions,
                    slots=segment.slots,
                    alive=mask & (segment.positions >= low) if low else mask,
                )
                for segment, mask in self._encoded(s, layer)
            )
        return s.segment_views[layer, queries]

    def live(self, seq: int, layer: int, queries: int = 1) -> tuple[Ints, ...]:
        """Per head, the sorted positions that can be read, in slots or in segments."""
        s = self._sequence(seq)
        table = self._layer_table(s, layer)
        view = s.live(table, layer, queries)
        encoded = [(part.positions, part.alive) for part in self.segments(seq, layer, queries)]
        return tuple(
            np.sort(np.concatenate([view.positions[h, :n], *(p[h, alive[h]] for p, alive in encoded)]))
            for h, n in enumerate(view.counts)
        )

    def segment_bytes(self) -> int:
        """Bytes of all encoded segments, shared ones once."""
        return sum(segment.nbytes for segment in self._segments.all())

    def segment_count(self) -> int:
        """Number of live encoded segments."""
        return len(self._segments)

    def segment_ids(self) -> frozenset[int]:
        """Ids of all live encoded segments."""
        return frozenset(segment.id for segment in self._segments.all())

    def _encoded(self, s: SequenceState, layer: int) -> list[tuple[Segment, Bools]]:
        """One layer's segments, oldest first, with the mask of what the sequence still reads of each."""
        return [(self._segments.get(segment), mask) for segment, mask in s.masks(layer).items()]

    def _slot_view(self, s: SequenceState, table: Table, layer: int, queries: int) -> SlotView:
        live = s.live(table, layer, queries)
        size = table.group.block_size
        ids = np.array([ref.id for ref in table.blocks] or [0], dtype=np.int32)
        logical = live.slots[:1] if live.uniform else live.slots
        block_ids = np.where(logical >= 0, ids[logical // size], -1).astype(np.int32)
        offsets = np.where(logical >= 0, logical % size, -1).astype(np.int32)
        view = SlotView(
            logical=live.slots,
            block_ids=np.broadcast_to(block_ids, live.slots.shape),
            offsets=np.broadcast_to(offsets, live.slots.shape),
            positions=live.positions,
            counts=live.counts,
            block_size=size,
            uniform=live.uniform,
            is_identity=live.contiguous,
        )
        for array in (view.logical, view.positions, view.counts):
            array.setflags(write=False)
        return view
