"""What the scheduler asks of a cache manager, over our ledger or over vLLM's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvassay.cache.manager import PagedManager
from kvassay.cache.prefix import Hit
from kvassay.cache.protocol import Admitted
from kvassay.errors import PoolExhausted
from kvassay.replay.serving.footprint import dropped
from kvassay.replay.serving.geometry import Geometry

RETENTION = 0
"""vLLM's engine default of `prefix_cache_retention_interval`: windowed groups keep only what a resumed prompt needs."""


class Backend(Protocol):
    """A cache manager for requests in units (`Geometry`)."""

    name: str
    usable: int
    """Blocks that requests can hold: all but the null block."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        ...

    def lookup(self, units: Sequence[int]) -> Hit:
        """The longest cached prefix, at most all but the last unit."""
        ...

    def revived(self, hit: Hit) -> int:
        """Blocks of a hit that nobody holds: taking them makes fewer free."""
        ...

    def admit(self, request: str, units: Sequence[int], count: int, prompt: int) -> Admitted | None:
        """Give the first `count` units after the hit slots; None if the pool is short."""
        ...

    def append(self, request: str, units: Sequence[int]) -> bool:
        """Give the next units slots; False if the pool is short."""
        ...

    def free(self, request: str) -> None:
        """End or preempt a request."""
        ...

    def tables(self, request: str) -> tuple[tuple[int, ...], ...]:
        """Block ids per group, 0 where a block was let go."""
        ...

    def release(self, request: str, fraction: float, full_units: int, first: int = 0) -> int:
        """Let go of that fraction of the blocks that units `first` to `full_units` fill, in every group that no window
        bounds; returns how many units of one such group went, the most of any."""
        ...

    def rewrite(self, request: str) -> bool:
        """Make the kept blocks of those groups the request's own, unhashed; False if copies do not fit."""
        ...


class OursBackend:
    """`Backend` over our own ledger."""

    name = "ours"

    def __init__(self, geometry: Geometry, num_blocks: int, max_units: int) -> None:
        self.manager = PagedManager(geometry.groups, num_blocks, max_units, retention_interval=RETENTION)
        self.usable = num_blocks - 1
        self._editable = [group for group in geometry.groups if group.window is None]

    @property
    def free_blocks(self) -> int:
        """See `Backend.free_blocks`."""
        return self.manager.ledger.pool.num_free

    def lookup(self, units: Sequence[int]) -> Hit:
        """See `Backend.lookup`."""
        return self.manager.lookup(units)

    def revived(self, hit: Hit) -> int:
        """See `Backend.revived`."""
        pool = self.manager.ledger.pool
        return sum(pool.ref(block) == 0 for ids in hit.blocks for block in ids if block)

    def admit(self, request: str, units: Sequence[int], count: int, prompt: int) -> Admitted | None:
        """See `Backend.admit`."""
        self.manager.ledger.pool.events.clear()
        return self.manager.admit(request, units, count, prompt_tokens=prompt)

    def append(self, request: str, units: Sequence[int]) -> bool:
        """See `Backend.append`."""
        return self.manager.append(request, units)

    def free(self, request: str) -> None:
        """See `Backend.free`."""
        self.manager.free(request)

    def tables(self, request: str) -> tuple[tuple[int, ...], ...]:
        """See `Backend.tables`."""
        return self.manager.tables(request)

    def release(self, request: str, fraction: float, full_units: int, first: int = 0) -> int:
        """See `Backend.release`."""
        ledger, seq, most = self.manager.ledger, self.manager.sequence(request), 0
        for group in self._editable:
            size = group.block_size
            start = -(-first // size)
            gone = [start + block for block in dropped(max(full_units // size - start, 0), fraction)]
            most = max(most, len(gone) * size)
            if gone:
                ledger.evict_positions(
                    seq, group.index, np.concatenate([np.arange(i * size, (i + 1) * size) for i in gone])
                )
        ledger.reclaim(seq)
        return most

    def rewrite(self, request: str) -> bool:
        """See `Backend.rewrite`; the ledger copies what others hold before it is written."""
        ledger, seq = self.manager.ledger, self.manager.sequence(request)
        try:
            for group in self._editable:
                kept = ledger.slots(seq, group.index).positions[0]
                ledger.begin_write(seq, group.index, kept)
        except PoolExhausted:
            return False
        return True

    def check(self) -> None:
        """Verify every law of the ledger."""
        self.manager.check()
