"""Sequences over real bytes: what is written is read back, whatever happens to blocks in between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvassay.cache.edits import Bias, Decision, Evict, Merge, Quantize
from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import SHORT
from kvassay.errors import CacheError, IllegalEdit, LedgerCorrupt, PoolExhausted
from tests.cache.build import World, as_stored, bits_of, compare, layer, one_layer, read, world

LAYERS = [layer(0, 2, 6, 4), layer(1, 1, 8, 8, window=6), layer(2, 2, 6, 4)]
GROUPS = [GroupSpec(0, (0, 2), (2, 2), 4), GroupSpec(1, (1,), (1,), 8, window=6)]


def mixed(blocks: int = 64) -> World:
    return world(GROUPS, LAYERS, blocks)


def keep(seq_rows: dict[int, list[list[int]]], made: World, seq: int) -> Decision:
    """Evict all but these positions per layer and head, in the cache and in the model."""
    edits = {}
    for index, rows in seq_rows.items():
        positions = made.cache.layer(seq, index).positions
        mask = torch.stack([torch.isin(p, torch.tensor(row)) for p, row in zip(positions, rows, strict=True)])
        edits[index] = [Evict(mask)]
        made.keep(seq, index, rows)
    return Decision(edits)


class TestRoundTrip:
    @settings(max_examples=20, deadline=None)
    @given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6))
    def test_any_chunks_over_both_kinds_of_groups(self, chunks: list[int]) -> None:
        made = mixed()
        seq = made.create(0)
        for chunk in chunks:
            made.extend(seq, chunk)
            made.check(seq)
            made.check(seq, queries=chunk)

    def test_several_sequences_written_at_once(self) -> None:
        made = mixed()
        a, b = made.create(5), made.create(11)
        k, v = torch.randn(2, 2, 3, 6), torch.randn(2, 2, 3, 4)
        for seq in (a, b):
            made.cache.extend(seq, [1, 2, 3])
        made.cache.write(0, [b, a], k, v)
        for row, (seq, first) in enumerate(((b, 11), (a, 5))):
            found = read(made.cache, seq, 0)
            for head in range(2):
                for at in range(3):
                    assert torch.equal(found[head][first + at][0], k[row, head, at])
                    assert torch.equal(found[head][first + at][1], v[row, head, at])

    def test_a_chunk_of_queries_sees_what_its_first_query_sees(self) -> None:
        """Window 6, 20 tokens: the last query sees 14..19; the first of three sees back to 12."""
        made = mixed()
        seq = made.create(20)
        made.check(seq, queries=3)
        assert sorted(read(made.cache, seq, 1, 3)[0]) == list(range(12, 20))

    def test_encoded_tokens_too_are_shown_to_the_first_query_of_a_chunk(self) -> None:
        made = mixed()
        seq = made.create(10)
        made.cache.apply(seq, Decision({1: [Quantize(16, 16)]}), allow_window=True)
        made.extend(seq, 3)
        made.check(seq, queries=3)
        assert sorted(read(made.cache, seq, 1, 3)[0]) == list(range(5, 13))
        assert sorted(read(made.cache, seq, 1)[0]) == list(range(7, 13))

    def test_blocks_given_back_and_taken_again_hold_the_new_content(self) -> None:
        made = mixed(blocks=12)
        for _ in range(5):
            seq = made.create(17)
            made.check(seq)
            made.cache.free(seq)

    def test_speculation_rolls_back(self) -> None:
        made, seq = one_layer(6)
        before = {head: dict(row) for head, row in enumerate(made.truth[seq, 0])}
        made.extend(seq, 3, committed=False)
        made.check(seq)
        made.cache.ledger.rollback(seq, 3)
        made.truth[seq, 0] = [before[0], before[1]]
        made.check(seq)
        made.extend(seq, 2)
        made.check(seq)


class TestPoison:
    def test_memory_nobody_wrote_is_nan(self) -> None:
        made, _ = one_layer(0)
        seq, _ = made.cache.create([])
        made.cache.extend(seq, [1, 2])
        assert bool(torch.isnan(made.cache.layer(seq, 0).k).all())

    def test_evicted_slots_may_be_nan(self) -> None:
        """Evicted is masked, not zeroed: nothing that is read later may come from there."""
        made, seq = one_layer(10)
        made.cache.apply(seq, keep({0: [[0, 5, 9], [2, 9]]}, made, seq))
        view = made.cache.ledger.slots(seq, 0)
        live = {(h, int(b), int(o)) for h in range(2) for b, o in zip(view.block_ids[h], view.offsets[h], strict=True)}
        for block in made.cache.ledger.table(seq, 0):
            for head in range(2):
                for offset in range(4):
                    if (head, block, offset) not in live:
                        made.cache.store.keys(0)[block, head, offset] = torch.nan
                        made.cache.store.values(0)[block, head, offset] = torch.nan
        made.check(seq)


class TestFork:
    def test_a_fork_costs_no_block_and_no_copy(self) -> None:
        made = mixed()
        seq = made.create(9)
        free = made.cache.ledger.pool.num_free
        child = made.fork(seq)
        assert (made.cache.ledger.pool.num_free, made.cache.moved_elements) == (free, 0)
        made.check(seq, child)

    def test_extending_a_fork_leaves_the_sibling_bit_identical(self) -> None:
        made = mixed()
        seq = made.create(9)
        child, before = made.fork(seq), bits_of(made.cache, seq)
        made.extend(child, 6)
        assert bits_of(made.cache, seq) == before
        made.extend(seq, 1)
        made.check(seq, child)
        # Each group's last block was shared and partial: one copy of layers 0 and 2, one of layer 1.
        assert made.cache.moved_elements == 2 * 2 * 4 * 10 + 8 * 16

    def test_a_merge_in_a_fork_copies_the_block_first(self) -> None:
        made, seq = one_layer(8)
        child, before = made.fork(seq), bits_of(made.cache, seq)
        into = torch.full((2, 8), -1)
        into[:, 5] = 1
        made.cache.apply(child, Decision({0: [Merge(into, torch.ones(2, 8))]}))
        for head in range(2):
            k, v = made.truth[child, 0][head][1]
            made.truth[child, 0][head][1] = (k, (v + made.truth[child, 0][head][5][1]) / 2)
        made.check(seq, child, atol=1e-6)
        assert bits_of(made.cache, seq) == before
        assert made.cache.ledger.table(seq, 0)[1] == made.cache.ledger.table(child, 0)[1]
        assert made.cache.ledger.table(seq, 0)[0] != made.cache.ledger.table(child, 0)[0]

    def test_edits_of_a_fork_are_its_own(self) -> None:
        made = mixed()
        seq = made.create(12)
        child, before = made.fork(seq), bits_of(made.cache, seq)
        decision = Decision({0: [Quantize(4, 4), Bias(torch.ones(2, 12))], 2: [Evict(torch.arange(12) > 4)]})
        made.cache.apply(child, decision)
        assert bits_of(made.cache, seq) == before
        made.cache.check()
        grandchild = made.cache.fork(child)
        assert bits_of(made.cache, grandchild) == bits_of(made.cache, child)

    def test_evicting_encoded_tokens_of_a_fork_narrows_only_its_own_mask(self) -> None:
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(16, 16)]}))
        child, before = made.fork(seq), bits_of(made.cache, seq)
        made.cache.apply(child, keep({0: [[0, 7], [1, 2, 7]]}, made, child))
        made.check(seq, child)
        assert bits_of(made.cache, seq) == before and len(made.cache.encoded) == 1
        made.extend(seq, 1)  # and not because an old view was kept
        made.check(seq, child)


class TestSlotReuse:
    def test_the_new_token_takes_the_slot_and_keeps_its_position(self) -> None:
        made, seq = one_layer(8)
        slots = made.cache.layer(seq, 0).slots[0].tolist()
        rows = [[p for p in range(8) if p != 2]] * 2
        made.cache.apply(seq, keep({0: rows}, made, seq))
        made.extend(seq, 1, reuse=2)
        made.check(seq)
        data = made.cache.layer(seq, 0)
        assert data.positions[0].tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
        assert data.slots[0].tolist() == [s for s in slots if s != 2] + [2]

    def test_heads_may_hold_it_in_other_slots(self) -> None:
        """Compaction moves the heads apart, so that one position has a slot per head."""
        made, seq = one_layer(8)
        decision = keep({0: [[0, 1, 5, 6, 7], [1, 2, 3, 5, 6]]}, made, seq)
        made.cache.apply(seq, Decision(decision.edits, compact=True))
        made.check(seq)
        made.cache.apply(seq, keep({0: [[0, 1, 6, 7], [1, 2, 3, 6]]}, made, seq))
        made.extend(seq, 1, reuse=5)
        made.check(seq)
        newest = made.cache.layer(seq, 0)
        assert newest.slots[0, -1] != newest.slots[1, -1]

    def test_one_token_at_a_time(self) -> None:
        made, seq = one_layer(8)
        with pytest.raises(CacheError, match="slot reuse takes 1 token at a time, not 2"):
            made.cache.extend(seq, [1, 2], reuse=0)

    def test_a_live_slot_is_refused_when_it_is_asked_for(self) -> None:
        made, seq = one_layer(8)
        with pytest.raises(IllegalEdit, match="position 3 holds no dead slot to reuse"):
            made.cache.apply(seq, Decision(reuse=3))


class TestCompaction:
    def test_content_and_positions_stay_and_blocks_go(self) -> None:
        made = mixed()
        seq = made.create(16)
        ragged = [[0, 3, 7, 11, 15], [1, 2, 15]]
        decision = keep({0: ragged, 2: [[4, 15], [0, 1, 2, 3, 15]]}, made, seq)
        before = made.cache.ledger.pool.num_free
        made.cache.apply(seq, Decision(decision.edits, compact=True))
        assert len(made.cache.ledger.table(seq, 0)) == 2 and made.cache.ledger.pool.num_free == before + 2
        made.check(seq)
        made.extend(seq, 5)
        made.check(seq)

    def test_moves_are_counted(self) -> None:
        """Keep 0, 1, 6, 7 of 8 in both heads: two slots move per head, of 16 elements each."""
        made, seq = one_layer(8)
        decision = keep({0: [[0, 1, 6, 7]] * 2}, made, seq)
        made.cache.apply(seq, Decision(decision.edits, compact=True))
        assert made.cache.moved_elements == 2 * 2 * 16
        made.check(seq)

    def test_a_fork_is_not_moved(self) -> None:
        made, seq = one_layer(12)
        child, before = made.fork(seq), bits_of(made.cache, seq)
        decision = keep({0: [[0, 5, 11], [2, 3, 11]]}, made, child)
        made.cache.apply(child, Decision(decision.edits, compact=True))
        made.check(seq, child)
        assert bits_of(made.cache, seq) == before

    def test_refused_with_slot_reuse_or_before_speculation_settles(self) -> None:
        made, seq = one_layer(8)
        both = Decision({0: [Evict(torch.arange(8) > 2)]}, compact=True, reuse=0)
        made.extend(seq, 1, committed=False)
        before = bits_of(made.cache, seq)
        with pytest.raises(IllegalEdit, match="compacts or reuses a slot, not both"):
            made.cache.apply(seq, both)
        for decision in (Decision(both.edits, compact=True), Decision(both.edits, reuse=0)):
            with pytest.raises(IllegalEdit, match="1 uncommitted tokens: neither compaction nor slot reuse"):
                made.cache.apply(seq, decision)
        assert bits_of(made.cache, seq) == before


class TestSegments:
    def test_free_drops_segments_and_bias_with_the_last_owner(self) -> None:
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(8, 8), Bias(torch.ones(2, 8))]}))
        child = made.cache.fork(seq)
        made.cache.free(seq)
        made.cache.check()
        assert len(made.cache.encoded) == 1 and made.cache.layer(child, 0).bias is not None
        made.cache.free(child)
        made.cache.check()
        assert (made.cache.encoded, made.cache._bias) == ({}, {})
        assert made.cache.ledger.segment_bytes() == 0

    def test_a_segment_whose_last_token_is_evicted_goes_at_once(self) -> None:
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(8, 8, tokens=torch.arange(8) < 2)]}))
        assert len(made.cache.encoded) == 1
        made.cache.apply(seq, Decision({0: [Evict(torch.arange(8) >= 2)]}))
        assert made.cache.encoded == {}
        made.cache.check()

    def test_a_window_that_passes_a_segment_drops_it(self) -> None:
        made = mixed()
        seq = made.create(4)
        made.cache.apply(seq, Decision({1: [Quantize(8, 8)]}), allow_window=True)
        for _ in range(12):
            made.extend(seq, 1)
        assert made.cache.ledger.segments(seq, 1) == ()

    def test_tensors_without_an_owner_are_found(self) -> None:
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(8, 8)]}))
        made.cache.encoded[99] = next(iter(made.cache.encoded.values()))
        with pytest.raises(LedgerCorrupt, match=r"segments \[99\] have tensors or an owner, but not both"):
            made.cache.check()

    def test_many_short_segments_are_read_as_one_run(self) -> None:
        """A long one stays itself, the single tokens of later steps join: three runs with the raw slots."""
        made, seq = one_layer(SHORT, blocks=128)
        made.cache.apply(seq, Decision({0: [Quantize(16, 16)]}))
        for _ in range(5):
            made.extend(seq, 1)
            made.cache.apply(seq, Decision({0: [Quantize(16, 16)]}))
        stored = made.cache.stored(seq, 0)
        assert [run.tokens for run in stored.runs] == [SHORT, 5, 0]
        made.check(seq)
        made.cache.apply(seq, keep({0: [[0, SHORT, SHORT + 3], [1, SHORT + 4]]}, made, seq))
        made.check(seq)

    def test_a_block_let_go_cannot_take_its_tokens_back(self) -> None:
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(16, 16, tokens=torch.arange(8) < 4)]}))
        assert made.cache.ledger.table(seq, 0)[0] == 0  # the block they left is whole and free
        (segment,) = made.cache.ledger.segments(seq, 0)
        with pytest.raises(IllegalEdit, match="has no slot to return to"):
            made.cache.ledger.decode(seq, segment.id)
        made.check(seq)


class TestBytes:
    def test_segment_bytes_are_those_of_its_tensors(self) -> None:
        """4 bits: 2 heads x 8 tokens x (8 + 8) / 2 bytes of codes, a float16 scale and zero per row and side."""
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(4, 4)]}))
        (segment,) = made.cache.ledger.segments(seq, 0)
        assert segment.nbytes == 2 * 8 * 8 + 2 * 8 * 2 * 4 == made.cache.encoded[segment.id].size.total(2.0)

    def test_raw_elements_are_billed_at_the_layouts_dtype(self) -> None:
        made, seq = one_layer(8)
        made.cache.apply(seq, Decision({0: [Quantize(16, 16)]}))
        (segment,) = made.cache.ledger.segments(seq, 0)
        assert segment.nbytes == 2 * 8 * 16 * 2

    def test_bias_counts_live_tokens(self) -> None:
        made, seq = one_layer(8)
        assert made.cache.bias_elements(seq, 0) == 0
        made.cache.apply(seq, Decision({0: [Bias(torch.ones(2, 8)), Evict(torch.arange(8) >= 3)]}))
        assert made.cache.bias_elements(seq, 0) == 2 * 5

    def test_plain_means_slots_alone(self) -> None:
        made, seq = one_layer(8)
        assert made.cache.is_plain(seq, 0)
        made.cache.apply(seq, Decision({0: [Evict(torch.arange(8) >= 3)]}))
        assert made.cache.is_plain(seq, 0)
        biased, encoded = made.cache.fork(seq), made.cache.fork(seq)
        made.cache.apply(biased, Decision({0: [Bias(torch.ones(2, 5))]}))
        made.cache.apply(encoded, Decision({0: [Quantize(8, 8)]}))
        assert not made.cache.is_plain(biased, 0) and not made.cache.is_plain(encoded, 0)


class TestPool:
    def test_too_few_blocks_change_nothing(self) -> None:
        made, seq = one_layer(8, blocks=3)
        before = bits_of(made.cache, seq)
        with pytest.raises(PoolExhausted):
            made.cache.extend(seq, [1])
        assert bits_of(made.cache, seq) == before
        made.check(seq)

    def test_a_merge_that_cannot_copy_its_blocks_changes_no_content(self) -> None:
        """Two blocks shared with a fork, one block free: the second copy fails before anything is written."""
        made, seq = one_layer(8, blocks=4)
        child = made.fork(seq)
        into = torch.full((2, 8), -1)
        into[:, 0], into[:, 4] = 1, 5
        with pytest.raises(PoolExhausted, match="2 blocks needed, 1 free"):
            made.cache.apply(child, Decision({0: [Merge(into, torch.ones(2, 8)), Evict(torch.arange(8) > 0)]}))
        made.check(seq, child)

    def test_layers_without_a_cache_of_their_own_are_refused(self) -> None:
        made, seq = one_layer(4)
        with pytest.raises(CacheError, match="layer 7, which holds no cache of its own"):
            made.cache.apply(seq, Decision({7: [Evict(torch.ones(4).bool())]}))


def test_stored_and_view_agree_with_everything_at_once() -> None:
    """Codes of two kinds, a bias, ragged heads and new raw tokens in one layer."""
    made, seq = one_layer(20)
    made.cache.apply(seq, Decision({0: [Quantize(16, 16, tokens=torch.arange(20) < 6)]}))
    made.cache.apply(seq, keep({0: [[1, 4, 8, 9, 10, 19], list(range(3, 20))]}, made, seq))
    shown = made.cache.layer(seq, 0)
    fresh = (shown.positions > 12) & (shown.positions < 20)
    made.cache.apply(seq, Decision({0: [Quantize(16, 16, tokens=fresh), Bias(torch.ones(shown.positions.shape))]}))
    made.extend(seq, 3)
    made.check(seq)
    compare(as_stored(made.cache, seq, 0), made.truth[seq, 0])
    data = made.cache.layer(seq, 0)
    assert data.encoded is not None and data.bias is not None
    for head in range(2):
        for at, p in enumerate(data.positions[head].tolist()):
            if p >= 0:
                assert bool(data.encoded[head, at]) == (p < 6 or 12 < p < 20)
                assert float(data.bias[head, at]) == (1.0 if p < 20 else 0.0)
