"""The block tables an engine would have had: the recorded tokens sent through the block pool, chunk by chunk.

The context is one request; every branch forks it by reference count, copies the partial block it writes into,
and goes on in blocks of its own. Groups bounded by a window let go of blocks as it passes them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import group_specs
from kvassay.cache.pool import NULL_BLOCK
from kvassay.trace.blocks import RECORDED, GroupTable, Overlay, RequestTables
from kvassay.trace.events import Event, EventKind
from kvassay.trace.schema import PREFIX, TraceHeader

BLOCK_SIZE = 16
"""Slots per block of the smallest group: vLLM's default. `reblock` lays other sizes over the same trace."""


def block_tables(header: TraceHeader, block_size: int = BLOCK_SIZE) -> tuple[Overlay, tuple[Event, ...]]:
    """Tables of the context and its branches, all live at the end, and the events that made them."""
    log = _Log(header, block_size)
    events = tuple(log.run())
    overlay = Overlay(
        name=RECORDED,
        source="recorded",
        num_blocks=log.ledger.pool.num_blocks,
        groups=tuple(
            GroupTable(index=g.index, layers=g.layers, block_size=g.block_size, window=g.window)
            for g in log.ledger.groups
        ),
        requests=tuple(
            RequestTables(segment=name, tokens=log.ledger.length(seq), tables=tuple(log.tables(seq)))
            for name, seq in log.sequences.items()
        ),
    )
    return overlay, events


class _Log:
    """A ledger under way, and what happened in it."""

    def __init__(self, header: TraceHeader, block_size: int) -> None:
        self.header = header
        groups = group_specs(header.layout, block_size)
        longest = [header.prefix.tokens, *(header.prefix.tokens + branch.tokens for branch in header.branches)]
        blocks = sum(-(-tokens // group.block_size) for tokens in longest for group in groups)
        self.ledger = Ledger(groups, 1 + blocks, caching=False)
        self.sequences: dict[str, int] = {}
        self.step = 0

    def run(self) -> Iterator[Event]:
        """The context, then every branch."""
        for name in self.header.segment_names:
            shared = [] if name == PREFIX else self.tables(self.sequences[PREFIX])
            seq = self.ledger.create([]).seq if name == PREFIX else self.ledger.fork(self.sequences[PREFIX])
            self.sequences[name] = seq
            left = self.header.segment_tokens(name)
            while left:
                count = min(left, self.header.prefill_chunk)
                yield Event(self.step, EventKind.STEP, value=count)
                yield from self._fork(name, shared)
                yield from self._append(name, seq, count)
                shared, left, self.step = [], left - count, self.step + 1

    def tables(self, seq: int) -> list[tuple[int, ...]]:
        """The block ids of a sequence, per group."""
        return [self.ledger.table(seq, group.index) for group in self.ledger.groups]

    def _fork(self, name: str, shared: list[tuple[int, ...]]) -> Iterator[Event]:
        for group, table in enumerate(shared):
            for ordinal, block in enumerate(table):
                yield Event(self.step, EventKind.ALLOC, name, group, block, ordinal, 1)
        if shared:
            yield Event(self.step, EventKind.HIT, name, value=self.header.prefix.tokens)

    def _append(self, name: str, seq: int, count: int) -> Iterator[Event]:
        before = self.tables(seq)
        self.ledger.append(seq, [0] * count)
        changes = [
            (group, ordinal, old[ordinal] if ordinal < len(old) else None, block)
            for group, (old, new) in enumerate(zip(before, self.tables(seq), strict=True))
            for ordinal, block in enumerate(new)
        ]
        for group, ordinal, was, block in changes:
            if was not in (None, block) and block == NULL_BLOCK:
                yield Event(self.step, EventKind.NULL, name, group, was, ordinal)
        for group, ordinal, was, block in changes:
            if was == block or block == NULL_BLOCK:
                continue
            generation = self.ledger.pool.generation(block)
            if generation > 1:
                yield Event(self.step, EventKind.GENERATION, block=block, value=generation)
            if was is None:
                yield Event(self.step, EventKind.ALLOC, name, group, block, ordinal, 0)
            else:
                yield Event(self.step, EventKind.COPY, name, group, block, ordinal, was)
        yield Event(self.step, EventKind.APPEND, name, value=count)
