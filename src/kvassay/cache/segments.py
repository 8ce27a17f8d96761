"""Encoded segments: tokens of one layer that left their slots for a packed form of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvassay.cache.ops import Ints
from kvassay.errors import CacheError


@dataclass
class Segment:
    """An immutable encoding and its owners. Ids are never given twice: an id is its own generation.

    `positions` and `slots` (the logical slots the tokens left) are `[kv_heads, n]`, -1 where padded.
    """

    id: int
    layer: int
    kind: str
    nbytes: int
    positions: Ints
    slots: Ints
    owners: int = 1


class Segments:
    """Segments by id, each freed with its last owner."""

    def __init__(self) -> None:
        self._by_id: dict[int, Segment] = {}
        self._next = 0

    def add(self, layer: int, kind: str, nbytes: int, positions: Ints, slots: Ints) -> int:
        """Keep a new segment with one owner; returns its id."""
        for array in (positions, slots):
            array.setflags(write=False)
        self._by_id[self._next] = Segment(self._next, layer, kind, nbytes, positions, slots)
        self._next += 1
        return self._next - 1

    def get(self, segment: int) -> Segment:
        """The segment, or `CacheError` if it was freed or never was."""
        if segment not in self._by_id:
            raise CacheError(f"no live segment {segment}: {len(self._by_id)} live, next id {self._next}")
        return self._by_id[segment]

    def all(self) -> tuple[Segment, ...]:
        """Every live segment, oldest first."""
        return tuple(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def acquire(self, ids: Iterable[int]) -> None:
        """Add an owner to each."""
        for segment in map(self.get, ids):
            segment.owners += 1

    def release(self, ids: Iterable[int]) -> None:
        """Drop an owner of each; a segment without owners is gone."""
        for segment in [self.get(i) for i in ids]:
            segment.owners -= 1
            if segment.owners == 0:
                del self._by_id[segment.id]
