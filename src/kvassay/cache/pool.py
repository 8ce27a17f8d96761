"""The block pool: who holds which block, which free block is reused next, and what its hash promises.

Follows vLLM >= 0.25: block 0 is the null block; a freed block without a hash goes to the head of the
free queue (reused first), a hashed one to the tail (LRU) where a later request may still find it; reusing
a free hashed block drops its hash. Unlike vLLM, a double free or a wrong acquire is an error, and every
allocation gets a new generation, so that a stale reference can be told from a live one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, NoReturn

from kvassay.errors import CacheError, LedgerCorrupt, PoolExhausted

NULL_BLOCK = 0


class BlockStored(NamedTuple):
    """Block `block_id` now holds the content that `hash` names (one event per physical copy)."""

    hash: bytes
    block_id: int


class BlockRemoved(NamedTuple):
    """The last copy of the content that `hash` names is gone."""

    hash: bytes


Event = BlockStored | BlockRemoved


class PoolCounts(NamedTuple):
    """Blocks by state; `null + free_clean + free_cached + referenced == total`, always."""

    null: int
    free_clean: int
    free_cached: int
    referenced: int
    total: int


class BlockPool:
    """`num_blocks` blocks with reference counts, generations, prefix hashes and one free queue.

    Every call validates before it changes anything, so a refused call leaves the pool as it was.
    """

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        if num_blocks < 2:
            raise CacheError(f"a pool needs at least 2 blocks (block 0 is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self.caching = caching
        self.events: list[Event] = []
        """Stored and removed hashes in order; the caller may drain it."""
        self._refs = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._copies: dict[bytes, dict[int, None]] = {}
        # The free queue in two parts: freed without a hash, the next to reuse last; behind them, in order,
        # those freed with a hash, of which all but `_free_cached` lost it since.
        self._clean = list(range(num_blocks - 1, 0, -1))
        self._tail: dict[int, None] = {}
        self._free_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, cached ones included."""
        return len(self._clean) + len(self._tail)

    def ref(self, block_id: int) -> int:
        """Reference count of a block; the null block's is always 0."""
        return self._refs[self._known(block_id)]

    def generation(self, block_id: int) -> int:
        """How often the block has been allocated."""
        return self._generations[self._known(block_id)]

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which the block can be found, if any."""
        return self._hashes[self._known(block_id)]

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they would be reused."""
        return [*reversed(self._clean), *self._tail]

    def counts(self) -> PoolCounts:
        """Blocks by state, in O(1)."""
        clean = self.num_free - self._free_cached
        used = self.num_blocks - 1 - self.num_free
        return PoolCounts(1, clean, self._free_cached, used, self.num_blocks)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks from the head of the free queue, each with reference count 1.

        A cached block among them loses its hash first (removed event). `PoolExhausted` if fewer than `n`
        are free, and then nothing is taken.
        """
        if n < 0:
            raise CacheError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise exhausted(n, self.num_free, self.num_blocks)
        start = max(len(self._clean) - n, 0)
        taken = self._clean[start:][::-1]
        del self._clean[start:]
        for block_id in list(islice(self._tail, n - len(taken))):
            self.drop_hash(block_id)
            del self._tail[block_id]
            taken.append(block_id)
        for block_id in taken:
            self._refs[block_id] = 1
            self._generations[block_id] += 1
        return taken

    def acquire(self, ids: Iterable[int]) -> None:
        """Add one reference per id; a free block must be cached to be acquired, and leaves the queue."""
        ids = list(ids)
        for block_id in ids:
            if self.ref(self._real(block_id)) == 0 and self._hashes[block_id] is None:
                raise CacheError(f"block {block_id} is free and holds nothing: it cannot be acquired")
        for block_id in ids:
            if self._refs[block_id] == 0:
                del self._tail[block_id]
                self._free_cached -= 1
            self._refs[block_id] += 1

    def release(self, ids: Iterable[int]) -> None:
        """Drop one reference per id, in the order of reuse wanted: callers give a table's tail first.

        `CacheError` if an id would go below 0 (double free). Of the blocks that become free those without
        a hash go to the head of the queue, the others to its tail, both in the order given.
        """
        ids = list(ids)
        refs, hashes, tail, clean = self._refs, self._hashes, self._tail, list[int]()
        queued = len(tail)
        for at, block_id in enumerate(ids):
            left = refs[block_id] - 1 if 0 < block_id < self.num_blocks else -1
            if left > 0:
                refs[block_id] = left
            elif left < 0:
                self._refuse_release(ids, at)
            else:
                refs[block_id] = 0
                if hashes[block_id] is None:
                    clean.append(block_id)
                else:
                    tail[block_id] = None
        self._clean += reversed(clean)
        self._free_cached += len(tail) - queued

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """Make a referenced, unhashed block findable by `block_hash` (stored event)."""
        if not self.caching:
            raise CacheError("prefix caching is off: no block may be hashed")
        if self._refs[self._real(block_id)] == 0:
            raise CacheError(f"block {block_id} is free: only a referenced block can be hashed")
        if self._hashes[block_id] is not None:
            raise CacheError(f"block {block_id} already has a hash")
        self._hashes[block_id] = block_hash
        self._copies.setdefault(block_hash, {})[block_id] = None
        self.events.append(BlockStored(block_hash, block_id))

    def drop_hash(self, block_id: int) -> None:
        """Forget the block's hash, if any; the removed event comes only with the hash's last copy.

        A free block keeps its place in the queue.
        """
        block_hash = self._hashes[self._real(block_id)]
        if block_hash is None:
            return
        self._hashes[block_id] = None
        copies = self._copies[block_hash]
        del copies[block_id]
        if not copies:
            del self._copies[block_hash]
            self.events.append(BlockRemoved(block_hash))
        if self._refs[block_id] == 0:
            self._free_cached -= 1

    def lookup(self, block_hash: bytes) -> int | None:
        """A block that holds this content (the oldest copy), or None; takes no reference."""
        copies = self._copies.get(block_hash)
        return next(iter(copies)) if copies else None

    def is_writable(self, block_id: int) -> bool:
        """Whether writing in place is safe: not the null block, one owner, not findable by hash."""
        return self._known(block_id) != NULL_BLOCK and self.ref(block_id) == 1 and self.hash_of(block_id) is None

    def check(self) -> None:
        """Recount everything from scratch; `LedgerCorrupt` with the numbers if two records disagree."""
        free = {block_id for block_id in range(1, self.num_blocks) if self._refs[block_id] == 0}
        queue = self.free_order()
        if free != set(queue) or len(queue) != len(free):
            raise LedgerCorrupt(f"free queue {queue} and unreferenced blocks {sorted(free)} differ")
        if any(self._hashes[block_id] is not None for block_id in self._clean):
            raise LedgerCorrupt(f"a hashed block stands among the clean ones: {self._clean}")
        cached = sum(self._hashes[block_id] is not None for block_id in free)
        recount = PoolCounts(1, len(free) - cached, cached, sum(ref > 0 for ref in self._refs[1:]), self.num_blocks)
        if self.counts() != recount or sum(recount[:4]) != recount.total:
            raise LedgerCorrupt(f"pool counts {self.counts()}, recounted {recount}")
        if min(self._refs) < 0 or self._refs[NULL_BLOCK] or self._hashes[NULL_BLOCK] is not None:
            raise LedgerCorrupt(f"null block owned or hashed, or a negative count: {self._refs}")
        forward = {(block_hash, i) for i, block_hash in enumerate(self._hashes) if block_hash is not None}
        backward = {(block_hash, i) for block_hash, copies in self._copies.items() for i in copies}
        if forward != backward or not all(self._copies.values()):
            raise LedgerCorrupt(f"hash maps differ on blocks {sorted(i for _, i in forward ^ backward)}")

    def _refuse_release(self, ids: list[int], at: int) -> NoReturn:
        """Take back what `release` did to `ids[:at]`, then raise."""
        for undone in ids[:at]:
            if self._refs[undone] == 0:
                self._tail.pop(undone, None)
            self._refs[undone] += 1
        block_id = self._real(ids[at])
        owners, leaving = self._refs[block_id], ids.count(block_id)
        raise CacheError(f"double free: block {block_id} has {owners} owners, {leaving} leave")

    def _known(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise CacheError(f"no block {block_id}: the pool has 0..{self.num_blocks - 1}")
        return block_id

    def _real(self, block_id: int) -> int:
        if self._known(block_id) == NULL_BLOCK:
            raise CacheError("block 0 is the null block: it is never owned, hashed or freed")
        return block_id


def exhausted(need: int, free: int, total: int) -> PoolExhausted:
    """The error for asking `need` blocks of a pool with only `free`."""
    return PoolExhausted(f"{need} blocks needed, {free} free of {total}")
