"""vLLM's `BlockPool` as the ledger's `Pool`: reference counts, hashes and the free queue are its own.

What it leaves unchecked (a double free, a reference to an empty free block) is refused before it is asked,
as `BlockPool` of `cache.pool` refuses it, and generations, which it does not have, are counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvassay.cache.pool import NULL_BLOCK, BlockRemoved, BlockStored, PoolCounts, exhausted
from kvassay.cache.vllm.api import api, call
from kvassay.errors import CacheError, LedgerCorrupt


class VllmPool:
    """`Pool` over a `BlockPool` of vLLM with `num_blocks` blocks, `pool`."""

    def __init__(self, num_blocks: int, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self.events: list[BlockStored | BlockRemoved] = []
        self.pool = call(api().BlockPool, num_gpu_blocks=num_blocks, enable_caching=caching, hash_block_size=1)
        self._generations = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """See `Pool`."""
        return int(self.pool.get_num_free_blocks())

    def ref(self, block_id: int) -> int:
        """See `Pool`."""
        block = self._block(block_id)
        return 0 if block.is_null else int(block.ref_cnt)

    def generation(self, block_id: int) -> int:
        """See `Pool`."""
        self._block(block_id)
        return self._generations[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        """See `Pool`."""
        found: bytes | None = self._block(block_id).block_hash
        return found

    def free_order(self) -> list[int]:
        """See `Pool`."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def counts(self) -> PoolCounts:
        """See `Pool`."""
        free = self.free_order()
        cached = sum(self.hash_of(block_id) is not None for block_id in free)
        return PoolCounts(1, len(free) - cached, cached, self.num_blocks - 1 - len(free), self.num_blocks)

    def allocate(self, n: int) -> list[int]:
        """See `Pool`."""
        if n < 0:
            raise CacheError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise exhausted(n, self.num_free, self.num_blocks)
        going = [self.hash_of(block_id) for block_id in self.free_order()[:n]]
        taken = [block.block_id for block in self.pool.get_new_blocks(n)]
        for block_id in taken:
            self._generations[block_id] += 1
        self._removed(going)
        return taken

    def acquire(self, ids: Iterable[int]) -> None:
        """See `Pool`."""
        ids = list(ids)
        for block_id in ids:
            if self._real(block_id).ref_cnt == 0 and self.hash_of(block_id) is None:
                raise CacheError(f"block {block_id} is free and holds nothing: it cannot be acquired")
        self.pool.touch([self._real(block_id) for block_id in ids])

    def release(self, ids: Iterable[int]) -> None:
        """See `Pool`."""
        ids = list(ids)
        for block_id, n in Counter(ids).items():
            if (owners := self._real(block_id).ref_cnt) < n:
                raise CacheError(f"double free: block {block_id} has {owners} owners, {n} leave")
        self.pool.free_blocks([self._real(block_id) for block_id in ids])

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """See `Pool`."""
        if not self.caching:
            raise CacheError("prefix caching is off: no block may be hashed")
        block = self._real(block_id)
        if block.ref_cnt == 0:
            raise CacheError(f"block {block_id} is free: only a referenced block can be hashed")
        if block.block_hash is not None:
            raise CacheError(f"block {block_id} already has a hash")
        call(block.set_block_hash, block_hash=block_hash, num_tokens=1)
        self.pool.cached_block_hash_to_block.insert(block_hash, block)
        self.events.append(BlockStored(block_hash, block_id))

    def drop_hash(self, block_id: int) -> None:
        """See `Pool`."""
        going = self._real(block_id).block_hash
        self.pool.evict_blocks({block_id})
        self._removed([going])

    def lookup(self, block_hash: bytes) -> int | None:
        """See `Pool`."""
        block = self.pool.cached_block_hash_to_block.get_one_block(block_hash)
        return None if block is None else int(block.block_id)

    def is_writable(self, block_id: int) -> bool:
        """See `Pool`."""
        return bool(self.pool.is_block_writable(self._block(block_id)))

    def check(self) -> None:
        """Free queue against reference counts, hashes against the map; `LedgerCorrupt` if they differ."""
        free = {i for i in range(1, self.num_blocks) if self.pool.blocks[i].ref_cnt == 0}
        order = self.free_order()
        if free != set(order) or len(order) != self.num_free or len(set(order)) != len(order):
            raise LedgerCorrupt(f"free queue {order} and unreferenced blocks {sorted(free)} differ")
        for block in self.pool.blocks:
            if block.block_hash is not None and not self._finds(block):
                raise LedgerCorrupt(f"block {block.block_id} is hashed and cannot be found")

    def _finds(self, block: Any) -> bool:
        return bool(self.pool.cached_block_hash_to_block.contain(block.block_hash, block.block_id))

    def _removed(self, hashes: Iterable[bytes | None]) -> None:
        """One event for each hash whose last copy went."""
        for block_hash in dict.fromkeys(hashes):
            if block_hash is not None and self.lookup(block_hash) is None:
                self.events.append(BlockRemoved(block_hash))

    def _block(self, block_id: int) -> Any:
        if not 0 <= block_id < self.num_blocks:
            raise CacheError(f"no block {block_id}: the pool has 0..{self.num_blocks - 1}")
        return self.pool.blocks[block_id]

    def _real(self, block_id: int) -> Any:
        if block_id == NULL_BLOCK:
            raise CacheError("block 0 is the null block: it is never owned, hashed or freed")
        return self._block(block_id)
