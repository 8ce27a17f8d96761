from __future__ import annotations

import random

import pytest

from kvassay.cache.pool import BlockPool, BlockRemoved, BlockStored, PoolCounts
from kvassay.errors import CacheError, LedgerCorrupt, PoolExhausted


def test_counts_add_up_from_new_to_full() -> None:
    pool = BlockPool(5)
    assert pool.counts() == PoolCounts(null=1, free_clean=4, free_cached=0, referenced=0, total=5)
    assert pool.allocate(3) == [1, 2, 3]
    pool.set_hash(2, b"h2")
    pool.release([3, 2])
    assert pool.counts() == PoolCounts(null=1, free_clean=2, free_cached=1, referenced=1, total=5)


def test_free_order_is_vllms() -> None:
    """Two requests share blocks 1-4; a adds 5 (full) and 6 (partial), b adds 7 (full) and 8 (partial).

    vLLM 0.25.1-0.33 leaves the queue [8, 6, 9, ...] ... [5, 7, 4, 3, 2, 1] after both are freed.
    """
    pool = BlockPool(12)
    a = pool.allocate(6)
    pool.acquire(a[:4])
    b = a[:4] + pool.allocate(2)
    for block_id in (1, 2, 3, 4, 5, 7):
        pool.set_hash(block_id, bytes([block_id]))
    pool.release(reversed(a))
    assert [pool.ref(i) for i in (1, 2, 3, 4)] == [1, 1, 1, 1]
    pool.release(reversed(b))
    assert pool.free_order() == [8, 6, 9, 10, 11, 5, 7, 4, 3, 2, 1]


def test_clean_blocks_of_one_release_keep_their_order_at_the_head() -> None:
    pool = BlockPool(6)
    pool.allocate(4)
    pool.release([4, 3])
    assert pool.free_order() == [4, 3, 5]
    pool.release([2, 1])
    assert pool.free_order() == [2, 1, 4, 3, 5]


def test_reuse_of_a_cached_block_drops_its_hash_before_anything_new_is_stored() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.set_hash(1, b"old")
    pool.release([1])
    assert pool.lookup(b"old") == 1
    assert pool.allocate(1) == [1]
    assert pool.lookup(b"old") is None
    pool.set_hash(1, b"new")
    assert pool.events == [BlockStored(b"old", 1), BlockRemoved(b"old"), BlockStored(b"new", 1)]
    assert pool.generation(1) == 2


def test_a_cached_free_block_can_be_acquired_again_without_an_event() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.set_hash(1, b"h")
    pool.release([1])
    pool.acquire([1, 1])
    assert (pool.ref(1), pool.generation(1), pool.free_order()) == (2, 1, [2])
    assert pool.events == [BlockStored(b"h", 1)]


def test_removed_comes_only_with_the_last_of_two_copies() -> None:
    """vllm PR #55092: one hash on two physical blocks; losing one must not announce the content gone."""
    pool = BlockPool(4)
    pool.allocate(2)
    pool.set_hash(1, b"h")
    pool.set_hash(2, b"h")
    pool.drop_hash(1)
    assert pool.lookup(b"h") == 2
    assert not [event for event in pool.events if isinstance(event, BlockRemoved)]
    pool.drop_hash(2)
    assert pool.lookup(b"h") is None
    assert pool.events[-1] == BlockRemoved(b"h")


def test_exhaustion_takes_nothing_and_says_both_numbers() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match=r"2 blocks needed, 1 free of 4"):
        pool.allocate(2)
    assert pool.counts() == PoolCounts(1, 1, 0, 2, 4)


def test_double_free_is_refused_whole() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(CacheError, match=r"double free: block 2 has 1 owners, 2 leave"):
        pool.release([1, 2, 2])
    assert (pool.ref(1), pool.ref(2)) == (1, 1)
    pool.set_hash(2, b"h")
    with pytest.raises(CacheError, match=r"double free: block 1 has 1 owners, 2 leave"):
        pool.release([2, 1, 1])
    assert pool.counts() == PoolCounts(1, 1, 0, 2, 4)
    pool.check()
    pool.release([1])
    with pytest.raises(CacheError, match=r"double free: block 1 has 0 owners"):
        pool.release([1])


@pytest.mark.parametrize("block_id", [0, 4, -1])
def test_null_and_unknown_blocks_are_never_owned(block_id: int) -> None:
    pool = BlockPool(4)
    for call in (lambda: pool.acquire([block_id]), lambda: pool.release([block_id])):
        with pytest.raises(CacheError):
            call()


def test_a_clean_free_block_cannot_be_acquired() -> None:
    with pytest.raises(CacheError, match="block 2 is free and holds nothing"):
        BlockPool(4).acquire([2])


def test_writable_means_one_owner_and_no_hash() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.is_writable(1)
    pool.acquire([1])
    assert not pool.is_writable(1)
    pool.release([1])
    pool.set_hash(1, b"h")
    assert not pool.is_writable(1)
    pool.drop_hash(1)
    assert pool.is_writable(1)
    assert not pool.is_writable(0)
    assert not pool.is_writable(3)


def test_hashing_needs_caching_an_owner_and_no_earlier_hash() -> None:
    with pytest.raises(CacheError, match="caching is off"):
        BlockPool(4, caching=False).set_hash(1, b"h")
    pool = BlockPool(4)
    with pytest.raises(CacheError, match="block 1 is free"):
        pool.set_hash(1, b"h")
    pool.allocate(1)
    pool.set_hash(1, b"h")
    with pytest.raises(CacheError, match="already has a hash"):
        pool.set_hash(1, b"h")


def test_a_pool_holds_at_least_one_usable_block() -> None:
    with pytest.raises(CacheError, match="at least 2 blocks"):
        BlockPool(1)


@pytest.mark.parametrize("seed", range(20))
def test_random_use_agrees_with_a_plain_model(seed: int) -> None:
    """Reference counts, the free queue as a plain list, and hashes as a plain dict."""
    rng, pool = random.Random(seed), BlockPool(8)
    refs, queue, hashes = dict.fromkeys(range(1, 8), 0), list(range(1, 8)), dict[int, bytes]()
    for _ in range(300):
        used = [i for i in refs if refs[i]]
        action = rng.choice(["allocate", "acquire", "release", "hash", "drop"])
        if action == "allocate" and queue:
            for block_id in pool.allocate(rng.randint(0, len(queue))):
                assert block_id == queue.pop(0)
                refs[block_id] = 1
                hashes.pop(block_id, None)
        elif action == "acquire" and (ids := used + list(hashes)):
            block_id = rng.choice(ids)
            pool.acquire([block_id])
            refs[block_id] += 1
            queue = [i for i in queue if i != block_id]
        elif action == "release" and used:
            ids = rng.sample(used, rng.randint(1, len(used)))
            pool.release(ids)
            for i in ids:
                refs[i] -= 1
            freed = [i for i in ids if refs[i] == 0]
            queue = [i for i in freed if i not in hashes] + queue + [i for i in freed if i in hashes]
        elif action == "hash" and (ids := [i for i in used if i not in hashes]):
            block_id = rng.choice(ids)
            hashes[block_id] = bytes([rng.randint(0, 3)])
            pool.set_hash(block_id, hashes[block_id])
        elif action == "drop":
            block_id = rng.randint(1, 7)
            pool.drop_hash(block_id)
            hashes.pop(block_id, None)
        pool.check()
        assert pool.free_order() == queue
        assert {i: pool.ref(i) for i in refs} == refs
        for value in (b"\0", b"\1", b"\2", b"\3"):
            assert pool.lookup(value) in [i for i in hashes if hashes[i] == value] or (
                pool.lookup(value) is None and value not in hashes.values()
            )


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._refs.__setitem__(1, 0),
        lambda pool: pool._clean.remove(3),
        lambda pool: pool._clean.append(4),
        lambda pool: pool._tail.update({1: None}),
        lambda pool: pool._hashes.__setitem__(2, b"x"),
        lambda pool: pool._copies.clear(),
        lambda pool: setattr(pool, "_free_cached", 1),
    ],
)
def test_check_finds_damage(damage) -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    pool.set_hash(1, b"h")
    pool.check()
    damage(pool)
    with pytest.raises(LedgerCorrupt):
        pool.check()
