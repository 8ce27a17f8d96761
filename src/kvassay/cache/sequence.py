"""What the ledger knows of one sequence: its tokens, a block table per group, its address maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from kvassay.cache.address import LayerMap, Live, live_slots, materialise
from kvassay.cache.ops import Bools, GroupSpec, Ints, SegmentView, SlotView
from kvassay.cache.pool import NULL_BLOCK


class BlockRef(NamedTuple):
    """A table entry: a block and the generation in which it was taken."""

    id: int
    generation: int


NULL_REF = BlockRef(NULL_BLOCK, 0)
_ID = itemgetter(0)


@dataclass
class Table:
    """One sequence's block table in one group, shared by the group's layers, and their address maps."""

    group: GroupSpec
    blocks: list[BlockRef]
    slots: int
    """Slots in use; fewer than tokens after slot reuse or compaction."""
    maps: dict[int, LayerMap] = field(default_factory=dict)
    hashed: int = 0
    """Leading blocks already considered for hashing."""
    expired: int = 0
    """Leading blocks already dropped because the window has passed them."""
    reserved: int = 0
    """Blocks at the end without a slot in use, taken for tokens to come."""

    def fork(self) -> Table:
        """A copy that shares the immutable maps, without the reserved blocks: nobody may share those."""
        blocks = self.blocks[: self.filled]
        return Table(self.group, blocks, self.slots, dict(self.maps), self.hashed, self.expired)

    @property
    def filled(self) -> int:
        """Blocks with a slot in use."""
        return -(-self.slots // self.group.block_size)

    def held(self) -> list[int]:
        """Ids of the blocks really held, tail first: the order in which they are freed."""
        return list(filter(None, map(_ID, reversed(self.blocks))))  # the null block is 0


@dataclass
class SequenceState:
    """One sequence: all its tokens, the last of which may be uncommitted (speculative)."""

    tokens: list[int]
    committed: int
    tables: list[Table]
    salt: bytes
    chains: dict[int, list[bytes]]
    """Prefix hashes of the committed full blocks, by block size."""
    boundaries: tuple[int, ...] = ()
    """Lengths at which a later sequence may resume this one: what sparse retention keeps hashed."""
    dense: bool = True
    """Whether its K/V still follow from its tokens alone; only then are its blocks hashed."""
    segments: dict[int, dict[int, Bools]] = field(default_factory=dict)
    """By layer, encoded segments by id, oldest first, with this sequence's mask of what it still reads."""
    slot_views: dict[tuple[int, int, int], SlotView] = field(default_factory=dict)
    segment_views: dict[tuple[int, int], tuple[SegmentView, ...]] = field(default_factory=dict)
    """Caches of views, emptied by every change."""

    @property
    def uncommitted(self) -> int:
        """Speculative tokens at the end."""
        return len(self.tokens) - self.committed

    @property
    def segment_ids(self) -> list[int]:
        """Ids of all segments that this sequence owns."""
        return [segment for masks in self.segments.values() for segment in masks]

    def masks(self, layer: int) -> dict[int, Bools]:
        """One layer's segments by id, each with the mask of what this sequence still reads of it."""
        return self.segments.get(layer, {})

    def shift(self, table: Table) -> int:
        """Position minus slot for the slots after every mapped one."""
        return len(self.tokens) - table.slots

    def committed_slots(self, table: Table) -> int:
        """Slots in use without those of uncommitted tokens, which are always the last."""
        return table.slots - self.uncommitted

    def window_low(self, table: Table, length: int) -> int:
        """First position that a query at position `length` can see."""
        window = table.group.window
        return 0 if window is None else max(0, length - window + 1)

    def first_visible(self, table: Table, queries: int = 1) -> int:
        """First position that the last `queries` tokens can see and whose block has not expired."""
        low = self.window_low(table, len(self.tokens) - queries)
        return max(low, table.expired * table.group.block_size)

    def entries(self, table: Table, layer: int) -> Ints:
        """A writable copy of the layer's map over all committed slots."""
        heads = table.group.heads(layer)
        return materialise(table.maps.get(layer), heads, self.committed_slots(table), self.shift(table))

    def live(self, table: Table, layer: int, queries: int = 1) -> Live:
        """Logical slots of the layer's live tokens that the last `queries` tokens can see."""
        low, heads = self.first_visible(table, queries), table.group.heads(layer)
        return live_slots(table.maps.get(layer), heads, table.slots, self.shift(table), low)
