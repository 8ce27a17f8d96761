"""Hand-made cases of a sequence's life in the ledger; the laws under any mix of them are test_state_machine's."""

from __future__ import annotations

import numpy as np
import pytest

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import CopyBlock, GroupSpec
from kvassay.cache.pool import BlockRemoved
from kvassay.errors import CacheError, IllegalEdit, LedgerCorrupt, PoolExhausted
from tests.cache.ledgers import FULL, SLIDING, evict_everywhere, filled, full_ledger, rows


class TestGroups:
    def test_a_layer_belongs_to_one_group(self) -> None:
        with pytest.raises(CacheError, match="one group only"):
            Ledger([FULL, GroupSpec(1, (1,), (1,), 4)], 8)

    def test_groups_are_numbered_in_order(self) -> None:
        with pytest.raises(CacheError, match=r"numbered 0.., not \[1\]"):
            Ledger([SLIDING], 8)

    @pytest.mark.parametrize(
        "values", [((0, 1), (2,), 4, None), ((0,), (0,), 4, None), ((0,), (1,), 0, None), ((0,), (1,), 4, 0)]
    )
    def test_geometry_must_be_possible(self, values) -> None:
        with pytest.raises(CacheError, match="group 0"):
            GroupSpec(0, *values)

    def test_unknown_ids_are_named(self) -> None:
        ledger = full_ledger()
        with pytest.raises(CacheError, match="no live sequence 3"):
            ledger.append(3, [1])
        seq = filled(ledger, 3)
        with pytest.raises(CacheError, match=r"no group holds layer 9: known are \[0, 1\]"):
            ledger.slots(seq, 9)
        with pytest.raises(CacheError, match="no group 2"):
            ledger.table(seq, 2)


class TestPrefix:
    def test_hit_shares_full_blocks_and_stops_before_the_last_token(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 9)
        assert ledger.table(a, 0) == (1, 2, 3)
        assert ledger.create(range(9)).cached_tokens == 8
        assert ledger.create(range(8)).cached_tokens == 4
        assert ledger.create([*range(7), 99, 100]).cached_tokens == 4
        assert [ledger.pool.ref(i) for i in (1, 2, 3)] == [4, 2, 1]

    def test_a_prefix_shorter_than_a_block_is_no_hit(self) -> None:
        """LMCache PR #2116 counts partial chunks; vllm #54607 shows 240 shared tokens at block 784: 0 hits."""
        ledger = full_ledger()
        filled(ledger, 9)
        assert ledger.create([0, 1, 2, 50, 51]).cached_tokens == 0

    def test_equal_blocks_after_different_prefixes_do_not_match(self) -> None:
        """The parent of a block is the block before it (vllm-ascend #12002)."""
        ledger = full_ledger()
        filled(ledger, 9)
        assert ledger.create([9, 9, 9, 9, 4, 5, 6, 7, 8]).cached_tokens == 0

    def test_tokens_that_differ_beyond_32_bits_do_not_match(self) -> None:
        """dynamo PR #12046: ids cut to 32 bits make false hits."""
        ledger = full_ledger()
        seq, _ = ledger.create([])
        ledger.append(seq, [1, 2, 3, 4, 5])
        assert ledger.create([1 + 2**32, 2, 3, 4, 5]).cached_tokens == 0
        assert ledger.create([1, 2, 3, 4, 5]).cached_tokens == 4

    def test_salt_sets_apart(self) -> None:
        ledger = full_ledger()
        filled(ledger, 9, salt=b"fp8")
        assert ledger.create(range(9)).cached_tokens == 0
        assert ledger.create(range(9), salt=b"fp8").cached_tokens == 8

    def test_a_freed_sequence_is_still_found_until_its_blocks_are_reused(self) -> None:
        ledger = full_ledger(num_blocks=4)
        ledger.free(filled(ledger, 9))
        assert ledger.pool.free_order() == [3, 2, 1]
        seq, cached = ledger.create(range(9))
        assert (cached, ledger.table(seq, 0)) == (8, (1, 2))
        ledger.free(seq)
        ledger.free(filled(ledger, 9, salt=b"other"))
        assert ledger.create(range(9)).cached_tokens == 0
        assert sum(isinstance(event, BlockRemoved) for event in ledger.pool.events) == 2

    def test_caching_off_never_hits(self) -> None:
        ledger = full_ledger(caching=False)
        filled(ledger, 9)
        assert ledger.create(range(9)).cached_tokens == 0

    def test_an_edited_sequence_hashes_nothing_it_fills_later(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        ledger.evict_positions(seq, 0, np.array([0]))
        ledger.append(seq, range(6, 13))
        assert ledger.create(range(13)).cached_tokens == 4, "only the block filled before the eviction"

    @pytest.mark.parametrize("edit", ["evict", "write", "encode", "diverge"])
    def test_every_edit_stops_hashing(self, edit: str) -> None:
        ledger = full_ledger()
        seq, some = filled(ledger, 6), np.array([5])
        assert ledger.is_dense(seq)
        {
            "evict": lambda: ledger.evict_positions(seq, 0, some),
            "write": lambda: ledger.begin_write(seq, 0, some),
            "encode": lambda: ledger.encode(seq, 0, some, 4, "int4"),
            "diverge": lambda: ledger.diverge(seq),
        }[edit]()
        assert not ledger.is_dense(seq)
        assert not ledger.is_dense(ledger.fork(seq))
        ledger.append(seq, [6, 7])
        assert ledger.pool.hash_of(ledger.table(seq, 0)[1]) is None


class TestHybrid:
    def test_window_blocks_go_null_at_the_next_append(self) -> None:
        """Window 6, block 4: the query at position 9 sees 4..9, so block 0 goes when token 9 is appended."""
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 9)
        assert ledger.table(seq, 1) == (4, 5, 6)
        ledger.append(seq, [9])
        assert ledger.table(seq, 1) == (0, 5, 6)
        assert ledger.table(seq, 0) == (1, 2, 3)
        assert ledger.pool.free_order()[-1] == 4, "free, and findable until it is reused"
        ledger.append(seq, [10, 11, 12])
        assert ledger.table(seq, 1)[:3] == (0, 5, 6), "position 10 sees 5..10"
        ledger.append(seq, [13])
        assert ledger.table(seq, 1)[:3] == (0, 0, 6), "position 13 sees 8..13"

    def test_views_show_the_window_of_the_asking_tokens(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 8)
        ledger.append(seq, [8, 9])
        assert rows(ledger.live(seq, 2)) == [[4, 5, 6, 7, 8, 9]]
        assert rows(ledger.live(seq, 2, queries=2)) == [[3, 4, 5, 6, 7, 8, 9]]
        assert rows(ledger.live(seq, 1)) == [list(range(10))]

    def test_window_hit_needs_only_the_blocks_inside_the_window(self) -> None:
        """As vLLM: a later request gets [null, ..., cached, cached], blocks its owner had already dropped."""
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 16)
        ledger.append(seq, [16])
        assert ledger.table(seq, 1)[:2] == (0, 0)
        other, cached = ledger.create(range(17))
        assert cached == 16
        assert ledger.table(other, 1) == (0, 0, *ledger.table(seq, 1)[2:4])
        assert rows(ledger.live(other, 2)) == [list(range(10, 16))]

    def test_a_hit_shows_only_what_its_next_query_needs(self) -> None:
        """Window 5: one block serves the query at 16, and position 11, which only 15 saw, is not there."""
        ledger = Ledger([FULL, GroupSpec(1, (2,), (1,), 4, window=5)], 20)
        filled(ledger, 17)
        other, _ = ledger.create(range(17))
        assert ledger.table(other, 1)[:3] == (0, 0, 0)
        assert rows(ledger.live(other, 2)) == [[12, 13, 14, 15]]
        ledger.check()

    def test_groups_converge_to_a_common_length(self) -> None:
        """One block of the full group lost: the window group must fall back to the same length."""
        ledger = Ledger([FULL, SLIDING], 40)
        seq = filled(ledger, 17)
        ledger.pool.drop_hash(ledger.table(seq, 0)[3])
        other, cached = ledger.create(range(17))
        assert cached == 12
        assert len(ledger.table(other, 0)) == len(ledger.table(other, 1)) == 3
        ledger.pool.drop_hash(ledger.table(seq, 1)[2])
        assert ledger.create(range(17)).cached_tokens == 8

    def test_block_sizes_may_differ(self) -> None:
        ledger = Ledger([GroupSpec(0, (0,), (1,), 2), GroupSpec(1, (1,), (1,), 4)], 40)
        filled(ledger, 11)
        assert ledger.create(range(11)).cached_tokens == 8
        assert ledger.create(range(8)).cached_tokens == 4

    def test_rollback_never_shows_an_expired_block(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 9)
        ledger.append(seq, [9], committed=False)
        ledger.rollback(seq, 1)
        assert rows(ledger.live(seq, 2)) == [[4, 5, 6, 7, 8]], "position 3 went with block 0"
        ledger.check()

    def test_speculation_keeps_what_the_committed_tokens_still_need(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 8)
        ledger.append(seq, [90, 91, 92, 93], committed=False)
        ledger.append(seq, [94], committed=False)
        ledger.rollback(seq, 5)
        ledger.append(seq, [8])
        assert rows(ledger.live(seq, 2)) == [[3, 4, 5, 6, 7, 8]]


class TestSpeculation:
    def test_uncommitted_blocks_are_hashed_only_on_commit(self) -> None:
        """As vLLM with look-ahead: only full blocks of final tokens are findable."""
        ledger = full_ledger()
        seq = filled(ledger, 6)
        ledger.append(seq, [6, 7, 8, 9, 10, 11, 12], committed=False)
        hashed = [ledger.pool.hash_of(i) is not None for i in ledger.table(seq, 0)]
        assert hashed == [True, False, False, False]
        ledger.commit(seq, 3)
        hashed = [ledger.pool.hash_of(i) is not None for i in ledger.table(seq, 0)]
        assert hashed == [True, True, False, False]
        ledger.rollback(seq, 4)
        assert ledger.tokens(seq) == tuple(range(9))
        assert len(ledger.table(seq, 0)) == 3
        assert ledger.create(range(13)).cached_tokens == 8

    def test_positions_restart_after_a_rollback(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 3)
        ledger.append(seq, [50, 51, 52], committed=False)
        ledger.rollback(seq, 3)
        ledger.append(seq, [3, 4])
        assert rows(ledger.live(seq, 0)) == [[0, 1, 2, 3, 4]] * 2
        assert ledger.tokens(seq) == (0, 1, 2, 3, 4)

    def test_committed_tokens_wait_for_settled_ones(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 3)
        ledger.append(seq, [3], committed=False)
        with pytest.raises(IllegalEdit, match="1 uncommitted"):
            ledger.append(seq, [4])
        for call in (ledger.commit, ledger.rollback):
            with pytest.raises(IllegalEdit, match="has 1 uncommitted tokens, not 2"):
                call(seq, 2)

    def test_no_edit_touches_uncommitted_tokens(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 3)
        ledger.append(seq, [3], committed=False)
        last = np.array([3])
        mask = np.array([[False, False, False, True]] * 2)
        for call in (
            lambda: ledger.evict(seq, 0, mask),
            lambda: ledger.evict_positions(seq, 0, last),
            lambda: ledger.begin_write(seq, 0, last),
            lambda: ledger.encode(seq, 0, last, 4, "int4"),
        ):
            with pytest.raises(IllegalEdit, match="position 3 is uncommitted or unknown, 3 of 4 tokens"):
                call()
        evict_everywhere(ledger, seq, [0])
        with pytest.raises(IllegalEdit, match="1 uncommitted tokens: no compaction"):
            ledger.compact(seq, 0)
        with pytest.raises(IllegalEdit, match="1 uncommitted tokens: no slot reuse"):
            ledger.reuse_slot(seq, {0: 0}, 9)

    def test_uncommitted_tokens_do_not_count_as_something_left_to_read(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 3)
        ledger.append(seq, [3], committed=False)
        with pytest.raises(IllegalEdit, match="head 0: evicting 3 of 3 live tokens leaves none"):
            ledger.evict_positions(seq, 0, np.arange(3))


class TestForkAndCopyOnWrite:
    def test_fork_takes_no_block_and_append_copies_the_shared_partial_block(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 6)
        b = ledger.fork(a)
        assert ledger.pool.num_free == 17
        assert ledger.append(b, [60]) == [CopyBlock(0, 2, 3)]
        assert (ledger.table(a, 0), ledger.table(b, 0)) == ((1, 2), (1, 3))
        assert ledger.append(a, [6]) == [], "the other owner left: no copy"

    def test_a_full_shared_block_needs_no_copy(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 4)
        b = ledger.fork(a)
        assert ledger.append(b, [4]) == []
        assert (ledger.table(a, 0), ledger.table(b, 0)) == ((1,), (1, 2))

    def test_append_is_all_or_nothing(self) -> None:
        ledger = Ledger([FULL, SLIDING], 8)
        a = filled(ledger, 10)
        b = ledger.fork(a)
        before = ledger.pool.free_order(), ledger.table(b, 0), ledger.table(b, 1), ledger.length(b)
        with pytest.raises(PoolExhausted, match="2 blocks needed, 1 free of 8"):
            ledger.append(b, [10])
        assert before == (ledger.pool.free_order(), ledger.table(b, 0), ledger.table(b, 1), ledger.length(b))

    def test_blocks_leaving_the_window_may_serve_the_same_append(self) -> None:
        ledger = Ledger([FULL, SLIDING], 8)
        seq = filled(ledger, 12)
        assert ledger.pool.num_free == 1
        ledger.append(seq, [12])
        assert ledger.table(seq, 1)[0] == 0
        assert ledger.pool.num_free == 0

    def test_free_gives_the_tail_first(self) -> None:
        ledger = full_ledger(num_blocks=8)
        ledger.free(filled(ledger, 10))
        assert ledger.pool.free_order() == [3, 4, 5, 6, 7, 2, 1]
        with pytest.raises(CacheError, match="no live sequence 0"):
            ledger.free(0)


class TestSlotView:
    def test_identity(self) -> None:
        ledger = full_ledger()
        view = ledger.slots(filled(ledger, 6), 0)
        assert view.block_ids.tolist() == [[1, 1, 1, 1, 2, 2]] * 2
        assert view.offsets.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
        assert view.positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
        assert view.slots.tolist() == [[4, 5, 6, 7, 8, 9]] * 2
        assert (view.counts.tolist(), view.is_identity, view.uniform) == ([6, 6], True, True)

    def test_untouched_layers_share_one_view_until_something_changes(self) -> None:
        ledger = Ledger([GroupSpec(0, (0, 1), (1, 1), 4)], 20)
        seq = filled(ledger, 6)
        view = ledger.slots(seq, 0)
        assert ledger.slots(seq, 1) is view
        ledger.append(seq, [6])
        assert ledger.slots(seq, 0).counts.tolist() == [7]
        assert view.counts.tolist() == [6]

    def test_views_cannot_be_written(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        ledger.evict_positions(seq, 0, [[1], [2]])
        for layer in (0, 1):
            view = ledger.slots(seq, layer)
            for array in (view.logical, view.block_ids, view.offsets, view.positions, view.counts):
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0

    def test_ragged_heads_are_padded_at_the_end_and_new_tokens_follow_each_head(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        assert ledger.evict_positions(seq, 0, [[0, 1, 4], [5]]) == 4
        ledger.append(seq, [6])
        view = ledger.slots(seq, 0)
        assert view.positions.tolist() == [[2, 3, 5, 6, -1, -1], [0, 1, 2, 3, 4, 6]]
        assert view.logical.tolist() == view.positions.tolist()
        assert view.block_ids.tolist() == [[1, 1, 2, 2, -1, -1], [1, 1, 1, 1, 2, 2]]
        assert view.slots.tolist() == [[6, 7, 9, 10, -1, -1], [4, 5, 6, 7, 8, 10]]
        assert (view.counts.tolist(), view.uniform, view.is_identity) == ([4, 6], False, False)
        assert ledger.slots(seq, 1).is_identity

    def test_equal_eviction_over_heads_is_uniform(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        ledger.evict_positions(seq, 0, np.array([2]))
        assert (ledger.slots(seq, 0).uniform, ledger.slots(seq, 0).is_identity) == (True, False)
        ledger.evict_positions(seq, 0, np.array([0, 1]))
        assert ledger.slots(seq, 0).is_identity, "slots 3..5 are consecutive"

    def test_queries_must_be_positive(self) -> None:
        ledger = full_ledger()
        with pytest.raises(CacheError, match="queries must be at least 1"):
            ledger.slots(filled(ledger, 2), 0, queries=0)


class TestCheck:
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda ledger, s, t: ledger.pool.acquire([1]), "reference count 2, 1 tables"),
            (lambda ledger, s, t: t.blocks.pop(), "1 tables|0 tables"),
            (lambda ledger, s, t: t.blocks.__setitem__(0, t.blocks[0]._replace(generation=7)), "generation 7"),
            (lambda ledger, s, t: setattr(t, "slots", 8), "blocks of 4 for 8 slots"),
            (lambda ledger, s, t: setattr(s, "committed", 10), "10 committed of 9"),
            (lambda ledger, s, t: s.tokens.__setitem__(0, 77), "hash of other content"),
            (lambda ledger, s, t: ledger._segments.get(0).__setattr__("owners", 2), "segment owners"),
            (lambda ledger, s, t: _remap(t, 0, [[0, 0, 2], [0, 1, 2]]), "two places among slots"),
            (lambda ledger, s, t: _remap(t, 0, [[0, 1, 2], [0, 9, 2]]), "of 9 tokens"),
            (lambda ledger, s, t: _remap(t, 1, [[0, 1, 2]]), "two places among live"),
            (lambda ledger, s, t: _remap(t, 0, [list(range(9)), [~i for i in range(9)]]), "nothing is left"),
            (lambda ledger, s, t: _remap(t, 0, [list(range(10))] * 2), "10 slots mapped, 9 committed"),
        ],
    )
    def test_every_broken_law_is_found(self, damage, message: str) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 9)
        ledger.encode(seq, 1, np.array([1]), 4, "int4")
        ledger.check()
        damage(ledger, ledger._sequences[seq], ledger._sequences[seq].tables[0])
        with pytest.raises(LedgerCorrupt, match=message):
            ledger.check()

    def test_a_live_position_in_a_null_block_is_found(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 9)
        evict_everywhere(ledger, seq, range(4))
        ledger.reclaim(seq)
        _remap(ledger._sequences[seq].tables[0], 1, [[0, ~1, ~2, ~3]])
        with pytest.raises(LedgerCorrupt, match="position 0 lives in slot 0, a null block"):
            ledger.check()

    def test_an_expired_block_that_is_still_seen_is_found(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 9)
        ledger._sequences[seq].tables[1].expired = 2
        with pytest.raises(LedgerCorrupt, match="2 blocks of 4 expired, position 9 sees them"):
            ledger.check()


def _remap(table, layer: int, entries: list[list[int]]) -> None:
    from kvassay.cache.address import LayerMap

    table.maps[layer] = LayerMap(np.array(entries, dtype=np.int32))


class TestLookAhead:
    def test_a_fork_does_not_share_reserved_blocks_and_a_rollback_gives_them_back(self) -> None:
        ledger = Ledger([FULL], 20)
        seq, _ = ledger.create([])
        ledger.append(seq, range(6), lookahead=7)
        assert (ledger.table(seq, 0), ledger.used_slots(seq, 0)) == ((1, 2, 3, 4), 6)
        child = ledger.fork(seq)
        assert ledger.table(child, 0) == (1, 2)
        assert [ledger.pool.ref(i) for i in (1, 2, 3, 4)] == [2, 2, 1, 1]
        ledger.check()
        assert ledger.append(seq, [6, 7, 8]) == [CopyBlock(0, 2, 5)]
        assert ledger.table(seq, 0) == (1, 5, 3, 4)
        ledger.append(seq, [9, 10], committed=False)
        ledger.rollback(seq, 1)
        assert ledger.table(seq, 0) == (1, 5, 3)
        assert ledger.pool.free_order()[0] == 4
        ledger.check()
