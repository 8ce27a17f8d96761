"""Situations with answers worked out by hand, asked of our manager and of vLLM's.

Each looks at the physical layout (block ids, reference counts, order of free blocks), the prefix hits and
how many blocks were taken. Blocks have 4 tokens; block 0 is null, so a fresh pool hands out 1, 2, 3 ...
"""

from __future__ import annotations

import pytest

from kvassay.cache.ops import GroupSpec
from kvassay.cache.prefix import Hit
from kvassay.cache.protocol import Admitted, Removed, Stored
from kvassay.errors import CacheError
from tests.cache.backends import BACKENDS, make

FULL = GroupSpec(0, (0,), (1,), 4)
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def sliding(index: int, window: int) -> GroupSpec:
    return GroupSpec(index, (index,), (1,), 4, window)


def used(manager) -> int:
    """Blocks that some table holds."""
    return sum(ref > 0 for ref in manager.state().refs)


def refs(manager, ids) -> list[int]:
    return [manager.state().refs[i] for i in ids]


class TestPrefixReuse:
    A = (*range(16), 100, 101, 102, 103, 104)
    B = (*range(16), 200, 201, 202, 203, 204)

    def test_shared_blocks_are_taken_once(self, backend: str) -> None:
        manager = make(backend, [FULL], 20)
        assert manager.admit("a", self.A) == Admitted(0, 0)
        assert manager.admit("b", self.B) == Admitted(16, 0)
        assert manager.tables("a") == ((1, 2, 3, 4, 5, 6),)
        assert manager.tables("b") == ((1, 2, 3, 4, 7, 8),)
        assert refs(manager, range(1, 9)) == [2, 2, 2, 2, 1, 1, 1, 1]
        assert used(manager) == 8
        # 5 full blocks of a, and of b only the one that differs
        assert [type(event) for event in manager.take_events()] == [Stored] * 6

    def test_without_a_prefix_cache_nothing_is_shared(self, backend: str) -> None:
        manager = make(backend, [FULL], 20, caching=False)
        assert manager.admit("a", self.A) == manager.admit("b", self.B) == Admitted(0, 0)
        assert manager.tables("b") == ((7, 8, 9, 10, 11, 12),)
        assert used(manager) == 12 and set(manager.state().refs[1:13]) == {1}
        assert manager.take_events() == []

    def test_the_last_token_is_always_computed(self, backend: str) -> None:
        manager = make(backend, [FULL], 20)
        manager.admit("a", range(8))
        assert manager.lookup(range(8)) == Hit(4, [[1]], 0)
        assert manager.lookup(range(9)) == Hit(8, [[1, 2]], 0)


class TestPressure:
    def pressed(self, backend: str, first: str, second: str):
        """Nine blocks: a and b hold four each and end in this order, then c needs three."""
        manager = make(backend, [FULL], 10)
        manager.admit("a", range(100, 116))
        manager.admit("b", range(200, 216))
        manager.free(first)
        manager.free(second)
        manager.take_events()
        manager.admit("c", range(300, 312))
        return manager

    @pytest.mark.parametrize(
        ("first", "second", "free", "table", "hits"),
        [
            ("a", "b", (2, 1, 8, 7, 6, 5), (9, 4, 3), (8, 16)),
            ("b", "a", (6, 5, 4, 3, 2, 1), (9, 8, 7), (16, 8)),
        ],
    )
    def test_who_ends_first_is_forgotten_first_tail_first(
        self, backend: str, first: str, second: str, free, table, hits
    ) -> None:
        manager = self.pressed(backend, first, second)
        assert manager.tables("c") == (table,)
        assert manager.state().free == free
        assert (manager.lookup(range(100, 117)).tokens, manager.lookup(range(200, 217)).tokens) == hits
        assert [type(event) for event in manager.take_events()] == [Removed] * 2 + [Stored] * 3

    def test_the_same_calls_give_the_same_blocks(self, backend: str) -> None:
        one, other = self.pressed(backend, "a", "b"), self.pressed(backend, "a", "b")
        assert one.state() == other.state()

    def test_what_does_not_fit_changes_nothing(self, backend: str) -> None:
        manager = self.pressed(backend, "a", "b")
        before = manager.state()
        assert manager.admit("d", range(400, 425)) is None  # 7 blocks, 6 are free
        assert manager.state() == before
        # the prefix of b is free too, so reviving it takes from the same six
        assert manager.admit("d", [*range(200, 216), *range(400, 409)]) is None
        assert manager.state() == before
        assert manager.admit("d", [*range(200, 216), *range(400, 408)]) == Admitted(16, 0)
        assert manager.tables("d") == ((5, 6, 7, 8, 2, 1),)
        assert manager.state().free == ()

    def test_a_running_request_waits_until_another_is_preempted(self, backend: str) -> None:
        manager = self.pressed(backend, "a", "b")
        manager.admit("d", [*range(200, 216), *range(400, 408)])
        assert manager.append("c", [1]) is False
        assert manager.tables("c") == ((9, 4, 3),)
        manager.free("d")
        assert manager.append("c", [1]) is True
        assert manager.tables("c") == ((9, 4, 3, 1),)
        # That took the tail of d from the cache: 20 of its 24 tokens are left, and no block for the rest.
        d = [*range(200, 216), *range(400, 408)]
        assert manager.lookup(d).tokens == 20
        assert manager.admit("d", d) is None
        manager.free("c")
        assert manager.admit("d", d) == Admitted(20, 0)
        assert manager.tables("d") == ((5, 6, 7, 8, 2, 1),)


class TestOwners:
    def test_two_owners_of_one_step_leave_one_by_one(self, backend: str) -> None:
        manager = make(backend, [FULL], 10)
        shared = [*range(8)]
        manager.admit("a", [*shared, 50])
        seen = [refs(manager, (1, 2))]
        manager.admit("b", [*shared, 60])
        seen.append(refs(manager, (1, 2)))
        manager.free("a")
        seen.append(refs(manager, (1, 2)))
        manager.free("b")
        seen.append(refs(manager, (1, 2)))
        assert seen == [[1, 1], [2, 2], [1, 1], [0, 0]]
        # Tails without a hash are reused first, the last one freed before the other; cached blocks last.
        assert manager.state().free == (4, 3, 5, 6, 7, 8, 9, 2, 1)
        manager.take_events()
        assert manager.admit("c", [*shared, 70]) == Admitted(8, 0)
        assert manager.tables("c") == ((1, 2, 4),)
        assert manager.take_events() == []


class TestWindows:
    """A window of 5 reaches back exactly one block at a block boundary, one of 6 reaches into a second."""

    def running(self, backend: str):
        manager = make(backend, [FULL, sliding(1, 5), sliding(2, 6)], 40)
        manager.admit("a", range(24))
        return manager

    def test_what_a_window_has_passed_becomes_null_at_the_next_token(self, backend: str) -> None:
        manager = self.running(backend)
        assert manager.tables("a") == ((1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12), (13, 14, 15, 16, 17, 18))
        assert manager.append("a", [24])
        # Position 24 sees 20.. with a window of 5 and 19.. with one of 6.
        assert manager.tables("a") == (
            (1, 2, 3, 4, 5, 6, 19),
            (0, 0, 0, 0, 0, 12, 20),
            (0, 0, 0, 0, 17, 18, 21),
        )
        assert manager.state().free == (*range(22, 40), 11, 10, 9, 8, 7, 16, 15, 14, 13)
        assert used(manager) == 7 + 2 + 3

    def test_a_hit_needs_only_what_the_windows_reach(self, backend: str) -> None:
        manager = self.running(backend)
        manager.append("a", [24])
        hit = manager.lookup([*range(24), 99])
        assert hit == Hit(24, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 12], [0, 0, 0, 0, 17, 18]], 0)
        # Blocks that a let go of can still be found: 11 for the window of 5, 16 and 17 for that of 6.
        other = [*range(20), 90, 91]
        assert manager.lookup(other) == Hit(20, [[1, 2, 3, 4, 5], [0, 0, 0, 0, 11], [0, 0, 0, 16, 17]], 0)
        assert manager.admit("b", other) == Admitted(20, 0)
        assert refs(manager, (5, 11, 16, 17, 10)) == [2, 1, 1, 2, 0]
        assert manager.tables("b") == ((1, 2, 3, 4, 5, 22), (0, 0, 0, 0, 11, 23), (0, 0, 0, 16, 17, 24))

    def test_groups_agree_on_a_shorter_prefix(self, backend: str) -> None:
        manager = self.running(backend)
        manager.evict([16])  # of the window of 6, tokens 12..15
        # 20 and 16 need block 16, 12 needs 14 and 15; the others could serve 20.
        assert manager.lookup([*range(20), 90]) == Hit(12, [[1, 2, 3], [0, 0, 9], [0, 14, 15]], 20)
        manager.evict([5])
        assert manager.lookup([*range(20), 90]) == Hit(12, [[1, 2, 3], [0, 0, 9], [0, 14, 15]], 16)
        manager.evict([2])
        assert manager.lookup([*range(20), 90]) == Hit(4, [[1], [7], [13]], 0)


class TestSharedPrefixBoundary:
    """The engine's default retention interval is 0, a bare `KVCacheConfig` says None."""

    GROUPS = (FULL, sliding(1, 6))
    A = (*range(13), *range(100, 109))
    B = (*range(13), *range(200, 209))
    C = (*range(13), *range(300, 309))

    def hashed(self, manager, request: str) -> list[bool]:
        return [manager.state().hashed[block_id] for block_id in manager.tables(request)[1]]

    def test_dense_retention_shares_at_once(self, backend: str) -> None:
        manager = make(backend, self.GROUPS, 40, retention_interval=None)
        manager.admit("a", self.A)
        assert self.hashed(manager, "a") == [True] * 5 + [False]
        assert manager.admit("b", self.B) == Admitted(12, 0)
        assert manager.tables("b") == ((1, 2, 3, 13, 14, 15), (0, 8, 9, 16, 17, 18))

    def test_sparse_retention_keeps_the_end_of_the_prompt(self, backend: str) -> None:
        manager = make(backend, self.GROUPS, 40, retention_interval=0)
        manager.admit("a", self.A)
        # To resume at 20 (of 22 tokens the last is computed) the window needs blocks 3 and 4.
        assert self.hashed(manager, "a") == [False, False, False, True, True, False]
        assert len(manager.take_events()) == 5 + 2
        assert manager.lookup(self.A) == Hit(20, [[1, 2, 3, 4, 5], [0, 0, 0, 10, 11]], 0)
        assert manager.lookup(self.B) == Hit(0, [[], []], 12)

    @pytest.mark.parametrize("kept", [True, False])
    def test_the_boundary_of_the_second_serves_the_third_if_kept(self, backend: str, kept: bool) -> None:
        manager = make(backend, self.GROUPS, 40, retention_interval=0)
        manager.admit("a", self.A)
        assert manager.admit("b", self.B, pin_boundary=kept) == Admitted(0, 12)
        assert manager.tables("b") == ((13, 14, 15, 16, 17, 18), (19, 20, 21, 22, 23, 24))
        assert self.hashed(manager, "b") == [False, kept, kept, True, True, False]
        found = manager.admit("c", self.C)
        if kept:
            # of the full group the older copies, blocks of a
            assert found == Admitted(12, 0)
            assert manager.tables("c") == ((1, 2, 3, 25, 26, 27), (0, 20, 21, 28, 29, 30))
        else:
            assert found == Admitted(0, 12)
            assert used(manager) == 3 * 12

    def test_an_interval_keeps_the_end_of_every_segment(self, backend: str) -> None:
        manager = make(backend, self.GROUPS, 40, retention_interval=12)
        manager.admit("a", range(40))
        # before 12, 24, 36, which is also where the prompt can be resumed
        assert self.hashed(manager, "a") == [i in (1, 2, 4, 5, 7, 8) for i in range(10)]

    def test_an_interval_is_whole_blocks(self, backend: str) -> None:
        with pytest.raises((CacheError, ValueError), match="multiple of"):
            make(backend, self.GROUPS, 40, retention_interval=6)


class TestMaximumLength:
    def test_at_the_maximum_look_ahead_ends(self, backend: str) -> None:
        manager = make(backend, [FULL, sliding(1, 6)], 40, max_tokens=32)
        assert manager.admit("a", range(30), lookahead=9) == Admitted(0, 0)
        assert [len(table) for table in manager.tables("a")] == [8, 8]
        assert manager.append("a", [30, 31], lookahead=9)
        assert [len(table) for table in manager.tables("a")] == [8, 8]
        # Position 30 sees 25..: six blocks of the sliding group are behind it.
        assert manager.tables("a")[1] == (0, 0, 0, 0, 0, 0, 15, 16)
        assert used(manager) == 8 + 2
        assert manager.lookup(range(32)).tokens == 28

    def test_above_the_maximum_nothing_is_taken(self, backend: str) -> None:
        manager = make(backend, [FULL], 40, max_tokens=32)
        before = manager.state()
        with pytest.raises(CacheError, match=r"request 'a' has 33 tokens, 1\.\.32 are allowed"):
            manager.admit("a", range(33))
        assert manager.state() == before
        manager.admit("a", range(32))
        before = manager.state()
        with pytest.raises(CacheError, match=r"request 'a' has 33 tokens"):
            manager.append("a", [32])
        assert manager.state() == before and manager.tables("a") == (tuple(range(1, 9)),)


class TestLookAhead:
    def test_reserved_blocks_stay_and_are_filled(self, backend: str) -> None:
        manager = make(backend, [FULL], 40)
        manager.admit("a", range(10), lookahead=7)
        assert manager.tables("a") == ((1, 2, 3, 4, 5),)
        # only full blocks of tokens are hashed
        assert [manager.state().hashed[i] for i in range(1, 6)] == [True, True, False, False, False]
        manager.append("a", [10, 11, 12], lookahead=0)
        assert manager.tables("a") == ((1, 2, 3, 4, 5),)
        assert [manager.state().hashed[i] for i in range(1, 6)] == [True, True, True, False, False]
        manager.free("a")
        assert manager.state().free[:3] == (5, 4, 6) and manager.state().free[-3:] == (3, 2, 1)


class TestRequests:
    def test_chunks_come_in_order(self, backend: str) -> None:
        manager = make(backend, [FULL], 40)
        assert manager.admit("a", range(20), 6) == Admitted(0, 0)
        assert manager.tables("a") == ((1, 2),)
        with pytest.raises(CacheError, match="append its 14 known tokens first"):
            manager.append("a", [99])
        assert manager.append("a", range(6, 12)) and manager.append("a", [*range(12, 20), 77])
        assert manager.tables("a") == ((1, 2, 3, 4, 5, 6),)
        assert manager.lookup([*range(20), 77]).tokens == 20

    def test_names_are_checked(self, backend: str) -> None:
        manager = make(backend, [FULL], 40)
        manager.admit("a", range(5))
        with pytest.raises(CacheError, match="'a' is already admitted"):
            manager.admit("a", range(5))
        with pytest.raises(CacheError, match="no request 'b': 1 admitted"):
            manager.tables("b")
        with pytest.raises(CacheError, match="5 tokens to compute, 3 are not cached"):
            manager.admit("c", [0, 1, 2, 3, 9, 9, 9], 5)
        manager.free("a")
        with pytest.raises(CacheError, match="no request 'a'"):
            manager.free("a")
