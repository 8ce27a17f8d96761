"""Every row of `docs/vllm-differences.md`, on both sides: what vLLM does, and what we do instead."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvassay.cache.ops import GroupSpec
from kvassay.cache.pool import BlockPool
from kvassay.cache.prefix import Hit
from kvassay.cache.protocol import Removed, Stored
from kvassay.errors import CacheError, PoolExhausted
from tests.cache.backends import NEEDS_VLLM, make

pytestmark = NEEDS_VLLM

FULL = GroupSpec(0, (0,), (1,), 4)
DOC = Path(__file__).parents[2] / "docs" / "vllm-differences.md"


def sliding(index: int, window: int) -> GroupSpec:
    return GroupSpec(index, (index,), (1,), 4, window)


def both(groups=(FULL,), num_blocks: int = 20, max_tokens: int = 256, **options):
    return [make(backend, groups, num_blocks, max_tokens, **options) for backend in ("ours", "vllm")]


def test_double_free() -> None:
    ours, theirs = both()
    for manager in (ours, theirs):
        manager.admit("a", range(8))
    (block,) = theirs.pool.blocks[1:2]
    theirs.pool.free_blocks([block])
    theirs.pool.free_blocks([block])
    assert block.ref_cnt == -1
    ours.ledger.pool.release([1])
    with pytest.raises(CacheError, match="double free: block 1 has 0 owners"):
        ours.ledger.pool.release([1])


def test_a_request_ends_twice() -> None:
    ours, theirs = both()
    for manager in (ours, theirs):
        manager.admit("a", range(8))
    request = theirs.known("a")
    theirs.manager.free(request)
    before = theirs.state()
    theirs.manager.free(request)
    assert theirs.state() == before
    ours.free("a")
    with pytest.raises(CacheError, match="no request 'a'"):
        ours.free("a")


def test_reviving_an_empty_free_block() -> None:
    theirs = both()[1]
    theirs.pool.touch([theirs.pool.blocks[5]])
    assert theirs.pool.blocks[5].ref_cnt == 1 and 5 not in theirs.state().free
    with pytest.raises(CacheError, match="block 5 is free and holds nothing"):
        BlockPool(20).acquire([5])


def test_more_blocks_than_there_are() -> None:
    theirs = both()[1]
    with pytest.raises(ValueError, match="Cannot get 20 free blocks"):
        theirs.pool.get_new_blocks(20)
    with pytest.raises(PoolExhausted, match="20 blocks needed, 19 free of 20"):
        BlockPool(20).allocate(20)


def test_longer_than_the_maximum() -> None:
    theirs = both(max_tokens=32)[1]
    with pytest.raises(IndexError):
        theirs.manager.allocate_slots(theirs._request("a", range(40), 40), 40)
    theirs = both(max_tokens=32, caching=False)[1]
    request = theirs._request("a", range(40), 40)
    assert theirs.manager.allocate_slots(request, 40) is not None
    assert len(theirs.manager.get_block_ids("a")[0]) == 8, "slots for 32 of 40 tokens, without a word"
    for manager in both(max_tokens=32):
        with pytest.raises(CacheError, match="40 tokens"):
            manager.admit("a", range(40))


def test_removed_for_every_copy() -> None:
    for manager in both():
        manager.admit("a", range(4))
        manager.admit("b", range(4))  # the last token is computed again: a second copy of the block
        assert manager.tables("b") == ((2,),)
        key = manager.keys("a", 0)[0]
        assert manager.take_events() == [Stored(0, key)] * 2
        manager.evict([1])
        first = manager.take_events()
        assert manager.lookup(range(5)) == Hit(4, [[2]], 0)
        manager.evict([2])
        second = manager.take_events()
        ours = manager.__class__.__name__ == "PagedManager"
        assert (first, second) == ([] if ours else [Removed(0, key)], [Removed(0, key)])


def test_a_null_block_in_the_window_hides_earlier_ones() -> None:
    groups = (sliding(0, 14),)
    ours, theirs = both(groups)
    for manager in (ours, theirs):
        manager.admit("a", range(16))
    # an edit nulls the second block of the window
    table = theirs.manager.coordinator.single_type_managers[0].req_to_blocks["a"]
    theirs.pool.free_blocks([table[1]])
    table[1] = theirs.pool.null_block
    seq = ours.sequence("a")
    ours.ledger.evict_positions(seq, 0, np.arange(4, 8), allow_window=True)
    ours.ledger.reclaim(seq)
    for manager in (ours, theirs):
        assert manager.tables("a") == ((1, 0, 3, 4),)
        manager.append("a", range(100, 110))  # computed together
        manager.append("a", [111])
    # Position 26 sees 13..: the first three blocks are behind it.
    assert ours.tables("a")[0][:4] == (0, 0, 0, 4) and ours.state().refs[1] == 0
    assert theirs.tables("a")[0][:4] == (1, 0, 0, 4) and theirs.state().refs[1] == 1


def test_an_edited_request_goes_on_being_hashed() -> None:
    ours, theirs = both()
    for manager in (ours, theirs):
        manager.admit("a", range(6))
    ours.ledger.begin_write(ours.sequence("a"), 0, np.array([1]))
    theirs.evict([1])  # all that vLLM can be told
    for manager in (ours, theirs):
        manager.append("a", [6, 7])
    assert theirs.state().hashed[2] and not ours.state().hashed[2]
    # `cache.vllm.edits.follow` marks the request, and then vLLM hashes no more either
    assert ours.ledger.is_dense(ours.sequence("a")) is False


def test_a_failed_append() -> None:
    ours, theirs = both((FULL, sliding(1, 6)), num_blocks=11)
    for manager in (ours, theirs):
        manager.admit("a", range(20))
        assert not manager.append("a", range(20, 40))
        assert manager.tables("a")[1] == (0, 0, 0, 9, 10), "windows let go first, in both managers"
    with pytest.raises(PoolExhausted):
        ours.ledger.append(ours.sequence("a"), range(20, 40))
    ours = both((FULL, sliding(1, 6)), num_blocks=11)[0]
    ours.admit("a", range(20))
    with pytest.raises(PoolExhausted):
        ours.ledger.append(ours.sequence("a"), range(20, 40))
    assert ours.tables("a")[1] == (6, 7, 8, 9, 10), "the ledger itself changes nothing"


def test_a_window_of_one_token() -> None:
    """No block is in reach of the next query, so we ask for none; vLLM still wants the last one."""
    ours, theirs = both((FULL, sliding(1, 1)))
    for manager in (ours, theirs):
        manager.admit("a", range(8))
        manager.evict([3, 4])  # both of the windowed group
    assert (ours.lookup(range(9)).tokens, theirs.lookup(range(9)).tokens) == (8, 0)


def test_tails_of_prompts_with_two_block_sizes() -> None:
    groups = (GroupSpec(0, (0,), (1,), 8), sliding(1, 6))
    for manager in both(groups):
        manager.admit("a", range(22))
        manager.append("a", [22, 23])
        assert manager.lookup(range(25)).tokens == 24
        held = manager.tables("a")[0][2]
        manager.evict([held])
        manager.append("a", [24])
        # vLLM hashes the prompt's tail at token 20, inside the block, again: a key that no lookup here asks for
        assert manager.state().hashed[held] == (manager.__class__.__name__ == "VllmManager")
        assert manager.lookup(range(25)).tokens == 16


def test_the_table_lists_these_tests() -> None:
    rows = re.findall(r"^\| .* \| `(test_\w+)` \|$", DOC.read_text(), re.MULTILINE)
    tests = [name for name in globals() if name.startswith("test_") and name != "test_the_table_lists_these_tests"]
    assert rows == tests
