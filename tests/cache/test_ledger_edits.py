"""Hand-made cases of every edit in the ledger: eviction, writes, slot reuse, compaction, segments."""

from __future__ import annotations

import numpy as np
import pytest

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import CopyBlock, MoveSlots
from kvassay.errors import IllegalEdit, PoolExhausted
from tests.cache.ledgers import FULL, SLIDING, evict_everywhere, filled, full_ledger, rows


class TestEvict:
    def test_evict_is_a_mask_of_one_sequence(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 9)
        b = ledger.fork(a)
        mask = np.zeros((2, 9), dtype=bool)
        mask[0, :4] = mask[1, 8] = True
        assert ledger.evict(a, 0, mask) == 5
        assert rows(ledger.live(a, 0)) == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7]]
        assert rows(ledger.live(a, 1)) == [list(range(9))]
        assert rows(ledger.live(b, 0)) == [list(range(9))] * 2
        assert ledger.table(a, 0) == ledger.table(b, 0)
        assert ledger.pool.hash_of(1) is not None, "nothing was written: the block is still findable"

    def test_evicting_nothing_changes_nothing(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 5)
        assert ledger.evict(seq, 0, np.zeros((2, 5), dtype=bool)) == 0
        assert ledger.is_dense(seq)
        assert ledger.slots(seq, 0).is_identity

    @pytest.mark.parametrize(
        ("mask", "message"),
        [
            (np.zeros((2, 4), dtype=bool), r"mask bool\[2, 4\] given, bool\[2, 5\] needed"),
            (np.zeros(5, dtype=bool), r"bool\[2, 5\] needed"),
            (np.zeros((2, 5), dtype=np.int64), r"mask int64\[2, 5\]"),
            (np.array([[True] * 5, [False] * 5]), "head 0: evicting 5 of 5 live tokens leaves none"),
        ],
    )
    def test_wrong_masks(self, mask, message: str) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 5)
        with pytest.raises(IllegalEdit, match=message):
            ledger.evict(seq, 0, mask)
        assert rows(ledger.live(seq, 0)) == [list(range(5))] * 2

    def test_mask_over_padding(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 3)
        ledger.evict_positions(seq, 0, [[0], []])
        with pytest.raises(IllegalEdit, match="head 0: mask goes beyond its 2 live slots"):
            ledger.evict(seq, 0, np.array([[False, False, True], [False] * 3]))

    @pytest.mark.parametrize(
        ("positions", "message"),
        [
            ([[0]], "positions for 1 heads given, 2 needed"),
            ([[0, 0], [1]], "head 0: a position is named twice"),
            ([[-1], [1]], "position -1 is negative"),
            ([[1], [5]], "position 5 is uncommitted or unknown, 5 of 5"),
            ([[2], [1]], "head 0: position 2 is not live"),
            ([[[1]], [[1]]], "2 needed"),
        ],
    )
    def test_wrong_positions(self, positions, message: str) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 5)
        ledger.evict_positions(seq, 0, [[2], []])
        with pytest.raises(IllegalEdit, match=message):
            ledger.evict_positions(seq, 0, positions)

    def test_a_padded_array_names_positions_per_head(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 5)
        assert ledger.evict_positions(seq, 0, np.array([[0, 3], [1, -1]])) == 3
        assert rows(ledger.live(seq, 0)) == [[1, 2, 4], [0, 2, 3, 4]]

    def test_window_bounded_layers_are_left_alone_unless_named(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq, some = filled(ledger, 9), np.array([8])
        for call in (ledger.evict_positions, ledger.begin_write):
            with pytest.raises(IllegalEdit, match="layer 2 is bounded by a window of 6"):
                call(seq, 2, some)
        with pytest.raises(IllegalEdit, match="window"):
            ledger.encode(seq, 2, some, 4, "int4")
        assert ledger.evict_positions(seq, 2, some, allow_window=True) == 1
        assert rows(ledger.live(seq, 2)) == [[3, 4, 5, 6, 7]]
        with pytest.raises(IllegalEdit, match="head 0: position 2 is not live"):
            ledger.evict_positions(seq, 2, np.array([2]), allow_window=True)
        for call in (lambda: ledger.compact(seq, 1), lambda: ledger.reuse_slot(seq, {1: 8}, 9)):
            with pytest.raises(IllegalEdit, match="group 1 has a window of 6"):
                call()


class TestReclaim:
    def test_a_block_goes_only_when_every_head_of_every_layer_dropped_it(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 10)
        for layer, heads in ((0, [range(4), range(8)]), (1, [range(1, 9)])):
            ledger.evict_positions(seq, layer, heads)
        assert ledger.reclaim(seq) == (0, 0), "layer 1 still reads position 0, head 0 of layer 0 reads 4..7"
        ledger.evict_positions(seq, 1, np.array([0]))
        assert ledger.reclaim(seq) == (1, 1)
        assert ledger.table(seq, 0) == (0, 2, 3)
        assert ledger.reclaim(seq) == (0, 0)
        ledger.check()

    def test_the_block_of_the_next_token_stays(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        evict_everywhere(ledger, seq, [4, 5])
        assert ledger.reclaim(seq) == (0, 0)
        ledger.append(seq, [6, 7])
        evict_everywhere(ledger, seq, [6, 7])
        assert ledger.reclaim(seq) == (1, 1)
        ledger.append(seq, [8])
        assert ledger.table(seq, 0)[1] == 0
        assert rows(ledger.live(seq, 1)) == [[0, 1, 2, 3, 8]]
        ledger.check()

    def test_a_shared_block_is_let_go_but_not_freed(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 9)
        b = ledger.fork(a)
        evict_everywhere(ledger, a, range(4))
        assert ledger.reclaim(a) == (1, 0)
        evict_everywhere(ledger, b, range(4))
        assert ledger.reclaim(b) == (1, 1)


class TestWrite:
    def test_a_shared_block_is_copied_and_a_written_one_loses_its_hash(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 9)
        b = ledger.fork(a)
        assert ledger.begin_write(a, 0, [[1], [6]]) == [CopyBlock(0, 1, 4), CopyBlock(0, 2, 5)]
        assert (ledger.table(a, 0), ledger.table(b, 0)) == ((4, 5, 3), (1, 2, 3))
        assert [ledger.pool.hash_of(i) is not None for i in (4, 5, 1, 2)] == [False, False, True, True]
        assert ledger.begin_write(b, 0, [[1], []]) == []
        assert ledger.pool.hash_of(1) is None

    def test_it_takes_all_blocks_or_none(self) -> None:
        ledger = full_ledger(num_blocks=5)
        a = filled(ledger, 9)
        ledger.fork(a)
        with pytest.raises(PoolExhausted, match="2 blocks needed, 1 free of 5"):
            ledger.begin_write(a, 0, [[1], [6]])
        assert ledger.table(a, 0) == (1, 2, 3)
        assert ledger.is_dense(a)

    def test_an_encoded_token_has_no_slot_to_write(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 5)
        segment = ledger.encode(seq, 0, [[1], []], 4, "int4")
        with pytest.raises(IllegalEdit, match=f"head 0: position 1 is in segment {segment}, not in a slot"):
            ledger.begin_write(seq, 0, [[1], []])


class TestSlotReuse:
    def test_the_next_token_takes_the_dead_slot_at_its_true_position(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 8)
        evict_everywhere(ledger, seq, [2])
        assert ledger.reuse_slot(seq, {0: 2}, 80) == []
        assert (ledger.length(seq), ledger.used_slots(seq, 0), len(ledger.table(seq, 0))) == (9, 8, 2)
        view = ledger.slots(seq, 0)
        assert view.positions.tolist() == [[0, 1, 3, 4, 5, 6, 7, 8]] * 2
        assert view.logical.tolist() == [[0, 1, 3, 4, 5, 6, 7, 2]] * 2
        assert ledger.pool.hash_of(1) is None
        ledger.append(seq, [90])
        assert ledger.slots(seq, 1).logical[0, -1] == 8
        assert ledger.slots(seq, 1).positions[0, -1] == 9
        ledger.check()

    def test_each_head_may_give_its_own_victim(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 4)
        ledger.evict_positions(seq, 0, [[0], [3]])
        ledger.evict_positions(seq, 1, [[1]])
        ledger.reuse_slot(seq, {0: {0: [0, 3], 1: [1]}}, 4)
        assert ledger.slots(seq, 0).logical.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]
        assert rows(ledger.live(seq, 1)) == [[0, 2, 3, 4]]

    def test_other_groups_append_as_usual(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 8)
        evict_everywhere(ledger, seq, [0])
        ledger.reuse_slot(seq, {0: 0}, 8)
        assert (ledger.used_slots(seq, 0), ledger.used_slots(seq, 1)) == (8, 9)
        assert rows(ledger.live(seq, 2)) == [[3, 4, 5, 6, 7, 8]]
        ledger.check()

    def test_a_shared_block_is_copied_first(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 8)
        b = ledger.fork(a)
        evict_everywhere(ledger, a, [5])
        assert ledger.reuse_slot(a, {0: 5}, 8) == [CopyBlock(0, 2, 3)]
        assert rows(ledger.live(b, 0)) == [list(range(8))] * 2
        assert ledger.table(b, 0) == (1, 2)

    def test_a_slot_with_a_reader_or_without_a_block_is_refused(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 8)
        ledger.evict_positions(seq, 0, np.array([1]))
        with pytest.raises(IllegalEdit, match="layer 1 head 0: position 1 holds no dead slot"):
            ledger.reuse_slot(seq, {0: 1}, 8)
        evict_everywhere(ledger, seq, [4, 5, 6, 7])
        ledger.reclaim(seq)
        with pytest.raises(IllegalEdit, match="layer 0 head 0: position 4 holds no dead slot"):
            ledger.reuse_slot(seq, {0: 4}, 8)
        with pytest.raises(IllegalEdit, match="one position per 2 heads"):
            ledger.reuse_slot(seq, {0: {0: [1], 1: [1]}}, 8)
        with pytest.raises(IllegalEdit, match="no victim named for layer 1"):
            ledger.reuse_slot(seq, {0: {0: [1, 1]}}, 8)
        assert ledger.length(seq) == 8

    def test_a_full_cycle_of_reuse_holds_the_table_at_its_size(self) -> None:
        """A window of 8 tokens by slot reuse: 40 tokens later still two blocks, and the last 8 positions."""
        ledger = full_ledger()
        seq = filled(ledger, 8)
        for position in range(40):
            evict_everywhere(ledger, seq, [position])
            ledger.reuse_slot(seq, {0: position}, position)
        assert len(ledger.table(seq, 0)) == 2
        assert rows(ledger.live(seq, 0)) == [list(range(40, 48))] * 2
        ledger.check()


class TestCompact:
    def test_live_slots_move_to_the_front_padded_to_the_widest(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 12)
        ledger.evict_positions(seq, 0, [range(4, 11), [4, 5, 6, 7, 8]])
        ledger.evict_positions(seq, 1, [range(4, 10)])
        ops = ledger.compact(seq, 0)
        assert [(op.layer, op.head, op.src.tolist(), op.dst.tolist()) for op in ops] == [
            (0, 0, [15], [8]),
            (0, 1, [13, 14, 15], [8, 9, 10]),
            (1, 0, [14, 15], [8, 9]),
        ]
        assert ledger.table(seq, 0) == (1, 2)
        assert ledger.used_slots(seq, 0) == 7
        assert rows(ledger.live(seq, 0)) == [[0, 1, 2, 3, 11], [0, 1, 2, 3, 9, 10, 11]]
        assert [ledger.pool.hash_of(i) is not None for i in (1, 2)] == [True, False], "block 1 had no hole"
        ledger.append(seq, [12])
        view = ledger.slots(seq, 0)
        assert view.positions.tolist() == [[0, 1, 2, 3, 11, 12, -1, -1], [0, 1, 2, 3, 9, 10, 11, 12]]
        assert view.logical.tolist() == [[0, 1, 2, 3, 4, 7, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]]
        ledger.check()

    def test_equal_slots_with_different_positions_per_head(self) -> None:
        """After a compaction heads may share slots and differ in what is there."""
        ledger = full_ledger()
        seq = filled(ledger, 8)
        ledger.evict_positions(seq, 0, [[1, 2], [5, 6]])
        ledger.compact(seq, 0)
        ledger.evict_positions(seq, 1, [[0, 7]])
        ledger.append(seq, [8])
        assert ledger.slots(seq, 0).positions.tolist() == [[0, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 7, 8]]

    def test_a_sequence_without_holes_is_left_alone(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        assert ledger.compact(seq, 0) == []
        assert ledger.is_dense(seq)

    def test_nothing_moves_while_one_head_is_full(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        ledger.evict_positions(seq, 0, [range(1, 5), [0]])
        assert ledger.compact(seq, 0) == []
        assert ledger.used_slots(seq, 0) == 6

    def test_shared_blocks_cost_new_ones_first_and_the_other_owner_keeps_his(self) -> None:
        ledger = full_ledger(num_blocks=6)
        a = filled(ledger, 12)
        b = ledger.fork(a)
        evict_everywhere(ledger, a, [1, 2, 3, 9])
        free = ledger.pool.num_free
        ops = ledger.compact(a, 0)
        assert ledger.table(a, 0) == (4, 5)
        assert ledger.pool.num_free == free - 2, "compaction of a shared prefix costs blocks, it frees none"
        assert {(op.layer, op.head, op.count) for op in ops} == {(0, 0, 8), (0, 1, 8), (1, 0, 8)}
        assert isinstance(ops[0], MoveSlots)
        assert ledger.table(b, 0) == (1, 2, 3)
        ledger.check()

    def test_it_takes_all_blocks_or_none(self) -> None:
        ledger = full_ledger(num_blocks=5)
        a = filled(ledger, 12)
        ledger.fork(a)
        evict_everywhere(ledger, a, [1])
        with pytest.raises(PoolExhausted, match="3 blocks needed, 1 free of 5"):
            ledger.compact(a, 0)
        assert ledger.table(a, 0) == (1, 2, 3)
        ledger.check()

    def test_a_sole_owner_compacts_in_a_full_pool(self) -> None:
        ledger = full_ledger(num_blocks=4)
        seq = filled(ledger, 12)
        evict_everywhere(ledger, seq, [0, 5, 6, 7, 8])
        ledger.compact(seq, 0)
        assert ledger.table(seq, 0) == (1, 2)
        assert ledger.pool.num_free == 1


class TestSegments:
    def test_encoded_tokens_leave_their_slots_and_stay_readable(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        segment = ledger.encode(seq, 0, [[3, 1], [0]], 24, "int4")
        assert ledger.slots(seq, 0).positions.tolist() == [[0, 2, 4, 5, -1], [1, 2, 3, 4, 5]]
        assert rows(ledger.live(seq, 0)) == [list(range(6))] * 2
        (view,) = ledger.segments(seq, 0)
        assert (view.id, view.kind, view.nbytes) == (segment, "int4", 24)
        assert view.positions.tolist() == view.slots.tolist() == [[1, 3], [0, -1]]
        assert view.alive.tolist() == [[True, True], [True, False]]
        assert ledger.segments(seq, 1) == ()
        assert ledger.pool.hash_of(1) is not None, "nothing was written"

    def test_encoding_every_head_of_every_layer_frees_the_block(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 9)
        for layer in FULL.layers:
            ledger.encode(seq, layer, np.arange(4), 8, "int4")
        assert ledger.reclaim(seq) == (1, 1)
        assert rows(ledger.live(seq, 0)) == [list(range(9))] * 2
        assert ledger.segment_bytes() == 16
        ledger.check()

    def test_forks_share_a_segment_and_the_last_owner_frees_it(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 6)
        ledger.encode(a, 0, np.array([1, 2]), 10, "int4")
        b = ledger.fork(a)
        assert ledger.segment_bytes() == 10
        ledger.evict_positions(a, 0, [[1], [2]])
        assert rows(ledger.live(a, 0)) == [[0, 2, 3, 4, 5], [0, 1, 3, 4, 5]]
        assert rows(ledger.live(b, 0)) == [list(range(6))] * 2
        ledger.evict_positions(a, 0, [[2], [1]])
        assert ledger.segments(a, 0) == ()
        assert ledger.segment_bytes() == 10
        ledger.check()
        ledger.free(b)
        assert ledger.segment_bytes() == 0

    def test_encoding_again_takes_tokens_out_of_the_older_segment(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 6)
        old = ledger.encode(seq, 0, np.array([1, 2]), 16, "int8")
        new = ledger.encode(seq, 0, [[1, 4], [1, 2]], 8, "int4")
        assert new != old
        views = {view.id: view for view in ledger.segments(seq, 0)}
        assert views[old].alive.tolist() == [[False, True], [False, False]]
        assert views[new].positions.tolist() == [[1, 4], [1, 2]]
        assert views[new].slots.tolist() == [[1, 4], [1, 2]], "the slots the tokens left first"
        assert rows(ledger.live(seq, 0)) == [list(range(6))] * 2
        ledger.check()

    def test_decode_returns_tokens_to_their_slots_copying_shared_blocks(self) -> None:
        ledger = full_ledger()
        a = filled(ledger, 6)
        segment = ledger.encode(a, 0, np.array([1, 5]), 10, "int4")
        b = ledger.fork(a)
        ledger.evict_positions(a, 0, [[5], []])
        assert ledger.decode(a, segment) == [CopyBlock(0, 1, 3), CopyBlock(0, 2, 4)]
        assert ledger.slots(a, 0).positions.tolist() == [[0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5]]
        assert len(ledger.segments(b, 0)) == 1
        with pytest.raises(IllegalEdit, match=r"does not own segment 0: it owns \[\]"):
            ledger.decode(a, segment)
        ledger.check()

    def test_decode_is_refused_when_the_slot_is_gone(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 9)
        segments = [ledger.encode(seq, layer, np.arange(4), 8, "int4") for layer in FULL.layers]
        ledger.reclaim(seq)
        with pytest.raises(IllegalEdit, match="layer 0 head 0: position 0 has no slot to return to"):
            ledger.decode(seq, segments[0])

    def test_the_last_readable_token_may_be_an_encoded_one(self) -> None:
        ledger = full_ledger()
        seq = filled(ledger, 3)
        ledger.encode(seq, 0, np.array([1]), 4, "int4")
        ledger.evict_positions(seq, 0, np.array([0, 2]))
        assert ledger.slots(seq, 0).counts.tolist() == [0, 0]
        assert rows(ledger.live(seq, 0)) == [[1], [1]]
        with pytest.raises(IllegalEdit, match="evicting 1 of 1 live tokens leaves none"):
            ledger.evict_positions(seq, 0, np.array([1]))
        ledger.check()

    def test_the_window_passes_over_segments_too(self) -> None:
        ledger = Ledger([FULL, SLIDING], 20)
        seq = filled(ledger, 4)
        ledger.encode(seq, 2, np.array([0, 1]), 8, "int4", allow_window=True)
        ledger.append(seq, range(4, 8))
        assert rows(ledger.live(seq, 2)) == [[2, 3, 4, 5, 6, 7]]
        ledger.append(seq, [8])
        assert ledger.segment_bytes() == 0

    @pytest.mark.parametrize(("positions", "nbytes"), [([[], []], 4), ([[1], [1]], 0)])
    def test_an_empty_segment_is_refused(self, positions, nbytes: int) -> None:
        ledger = full_ledger()
        with pytest.raises(IllegalEdit, match="a segment of"):
            ledger.encode(filled(ledger, 5), 0, positions, nbytes, "int4")
