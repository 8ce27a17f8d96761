"""The prefix cache of an engine, rebuilt from its events.

Events carry hashes, no block ids, owners or requests: enough to say what can be found, not who holds it.
vLLM (0.25 to 0.33) says `BlockStored` and `BlockRemoved` once per physical copy, so copies are counted; it is told
to report reuse too (`kv_cache_report_mode = "full"`) only by request, and such streams are not for this index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvassay.errors import TraceError
from kvassay.trace.kv_events.events import Cleared, Event, Hash, Removed, Stored, decode
from kvassay.trace.kv_events.frames import Frame

OnGap = Literal["refuse", "forget"]


class Key(NamedTuple):
    """A findable block: one hash may be held in several media and groups."""

    medium: str
    group: int
    hash: Hash


class Gap(NamedTuple):
    """Messages `first` to `last` that never came."""

    first: int
    last: int


@dataclass
class Block:
    """What is known of a block."""

    copies: int
    block_size: int
    parent: Hash | None = None
    parent_known: bool = False
    """False where hashes were left out of the event, so that the one before is not this block's parent."""
    tokens: tuple[int, ...] | None = None
    """None where hashes and tokens cannot be matched by position."""


@dataclass
class KVIndex:
    """Blocks that can be found, and what the stream said on the way."""

    blocks: dict[Key, Block] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    """Stretches of the stream that are missing; at each the index forgot all it knew."""
    messages: int = 0
    stored: int = 0
    """Hashes stored, copies included."""
    removed: int = 0
    clears: int = 0
    unmapped: int = 0
    """Hashes whose tokens could not be told, as their event left blocks out."""
    orphans: int = 0
    """Stored runs whose parent was in no group when they came."""
    unknown_removals: int = 0
    """Removed hashes that the index did not hold: expected after a gap, else a fault of the stream."""
    _groups: set[int] = field(default_factory=set)
    """Groups that ever stored a block."""

    def apply(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Cleared):
            self.clears += 1
            self.blocks.clear()
        elif isinstance(event, Removed):
            for one in event.hashes:
                self._remove(Key(event.medium, event.group, one))
        else:
            self._store(event)

    def holds(self, block_hash: Hash, group: int = 0, medium: str = "GPU") -> bool:
        """Whether a block of this hash can be found."""
        return Key(medium, group, block_hash) in self.blocks

    def chain(self, key: Key) -> tuple[Key, ...] | None:
        """The blocks from the start of a prompt to this one; None if one is gone or not known: then nothing hits it."""
        path = [key]
        while True:
            block = self.blocks.get(path[-1])
            if block is None or not block.parent_known:
                return None
            if block.parent is None:
                return tuple(reversed(path))
            path.append(Key(key.medium, key.group, block.parent))

    def tokens(self, key: Key) -> tuple[int, ...] | None:
        """The tokens of the prefix that ends with this block; None if they cannot be told."""
        path = self.chain(key)
        if path is None:
            return None
        parts = [self.blocks[one].tokens for one in path]
        return None if None in parts else tuple(token for part in parts if part is not None for token in part)

    def broken(self) -> Iterator[Key]:
        """Blocks that name a parent which is no longer there."""
        for key, block in self.blocks.items():
            if block.parent is not None and Key(key.medium, key.group, block.parent) not in self.blocks:
                yield key

    def _store(self, event: Stored) -> None:
        if event.parent is not None and event.hashes and not self._anywhere(event):
            self.orphans += 1
        self._groups.add(event.group)
        size, parent = event.block_size, event.parent
        for ordinal, one in enumerate(event.hashes):
            self.stored += 1
            block = self.blocks.setdefault(Key(event.medium, event.group, one), Block(0, size))
            block.copies += 1
            if event.complete:
                block.parent, block.parent_known = parent, True
                block.tokens = event.tokens[ordinal * size : (ordinal + 1) * size]
                parent = one
            elif block.tokens is None:
                self.unmapped += 1

    def _anywhere(self, event: Stored) -> bool:
        """Whether the parent is known in any group: groups of one block size share hashes, but not what they keep."""
        assert event.parent is not None
        return any(Key(event.medium, group, event.parent) in self.blocks for group in self._groups | {event.group})

    def _remove(self, key: Key) -> None:
        self.removed += 1
        block = self.blocks.get(key)
        if block is None:
            self.unknown_removals += 1
            return
        block.copies -= 1
        if block.copies == 0:
            del self.blocks[key]


def rebuild(frames: Iterable[Frame], source: str, on_gap: OnGap = "refuse") -> KVIndex:
    """Read a stream of one rank from its first message, number 0, on.

    on_gap: what to do when messages are missing, the first ones included. `refuse` raises; `forget` records the gap
        and starts again from nothing, since what was stored and removed in it is not known. None is ever bridged.

    Raises:
        TraceError: a gap that is refused, a number that comes again or goes back, two ranks in one stream, or a message
            that cannot be read; each names `source` and the message.
    """
    index, expected, rank = KVIndex(), 0, None
    for frame in frames:
        if frame.number < expected:
            raise TraceError(f"{source}: message {frame.number} comes after {expected - 1}: a stream only goes forward")
        if frame.number > expected:
            gap = Gap(expected, frame.number - 1)
            if on_gap == "refuse":
                raise TraceError(
                    f"{source}: messages {gap.first} to {gap.last} are missing: what they stored and removed is not "
                    "known (--on-gap forget starts again after them)"
                )
            index.gaps.append(gap)
            index.blocks.clear()
        try:
            batch = decode(frame)
        except TraceError as error:
            raise TraceError(f"{source}: {error}") from None
        if rank not in (None, batch.rank):
            raise TraceError(f"{source}: message {frame.number} is of rank {batch.rank}, the ones before of {rank}")
        rank, expected = batch.rank, frame.number + 1
        index.messages += 1
        for event in batch.events:
            index.apply(event)
    return index
