"""Prefix hits: what a window still needs, what is hashed when, and in which order blocks may go."""

from __future__ import annotations

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec


def test_a_hit_that_ends_earlier_looks_for_the_blocks_of_its_own_window() -> None:
    """vllm PR #17398: window 4, blocks of 2. A lookup found [null, null, A, B], the last was dropped, and
    [null, null, A] was taken for a hit: the query after A sees one token more than A holds."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 2, window=4)], 40)
    seq, _ = ledger.create(range(9))
    ledger.append(seq, range(9))
    whole, shorter = ledger.create(range(9)), ledger.create(range(8))  # the last token is always computed
    assert (whole.cached_tokens, shorter.cached_tokens) == (8, 6)
    assert [bool(block) for block in ledger.table(whole.seq, 0)] == [False, False, True, True]
    assert [bool(block) for block in ledger.table(shorter.seq, 0)] == [False, True, True]
    ledger.append(shorter.seq, [6, 7])
    assert ledger.slots(shorter.seq, 0).positions.tolist() == [[4, 5, 6, 7]]
    ledger.check()


def test_all_groups_resume_where_the_shortest_hit_ends() -> None:
    """vllm PR #46281: one group hit N blocks, another N - 1, and the run went on at N: a block was never computed."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 2), GroupSpec(1, (1,), (1,), 4)], 40)
    seq, _ = ledger.create(range(11))
    ledger.append(seq, range(11))
    hit = ledger.create(range(11))
    assert hit.cached_tokens == 8, "10 tokens by blocks of 2, 8 by blocks of 4"
    assert [len(ledger.table(hit.seq, group)) for group in (0, 1)] == [4, 2]


def test_only_full_blocks_are_offered_and_once() -> None:
    """vllm #49125: the hash of a partial block came back after the block had been promoted to a full one."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 4)], 40)
    seq, _ = ledger.create(range(6))
    ledger.append(seq, range(6))
    assert ledger.create(range(12)).cached_tokens == 4
    ledger.append(seq, range(6, 8))
    assert ledger.create(range(12)).cached_tokens == 8
    assert ledger.create([0, 1, 2, 3, 4, 5, 77, 78, 79]).cached_tokens == 4


def test_the_tail_goes_before_the_blocks_it_follows() -> None:
    """LMCache #443: an interior block was evicted first, and all blocks behind it were held for nothing."""
    ledger = Ledger([GroupSpec(0, (0,), (1,), 4)], 6)
    seq, _ = ledger.create(range(20))
    ledger.append(seq, range(20))
    ledger.free(seq)
    for taken, left in ((1, 16), (2, 12), (3, 8)):
        other, _ = ledger.create([])
        ledger.append(other, range(1000 * taken, 1000 * taken + 4))
        probe = ledger.create(range(21))
        assert probe.cached_tokens == left
        ledger.free(probe.seq)
