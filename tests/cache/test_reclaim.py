from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec, MoveSlots
from kvassay.cache.reclaim import MODES, Freed, count
from kvassay.errors import IllegalEdit

GROUP = GroupSpec(0, (0, 1), (2, 1), 4)


def keep_of(*heads: str) -> dict[int, np.ndarray]:
    """Masks from pictures, x = kept: two heads of layer 0, one of layer 1."""
    bits = [np.array([char == "x" for char in head if char != " "]) for head in heads]
    return {0: np.stack(bits[:2]), 1: np.stack(bits[2:])}


PICTURE = keep_of("xx.. .... .... x.", ".... ...x .... x.", "x... .... ...x .x")


class TestByHand:
    """14 tokens in blocks of 4: three full blocks, and a partial one that never goes."""

    def test_tables(self) -> None:
        result = count(PICTURE, [GROUP])
        assert result.blocks == 4
        assert result.bytes == 4 * 4 * 3
        assert result["whole_block"] == Freed(0, 0), "each block is read by some head"
        # Layer 0 (2 heads) lets go of block 2, layer 1 of block 1: 8 + 4 slots of 12 a shared block.
        assert result["per_layer_tables"] == Freed(1.0, 12.0)
        # Heads let go of blocks {1, 2}, {0, 2} and {1}: 5 head-blocks of 4 slots.
        assert result["per_head_tables"] == Freed(20 / 12, 20.0)
        assert result.fraction("per_head_tables") == 20 / 48

    def test_whole_block(self) -> None:
        keep = keep_of("x... .... .... xx", ".... ...x .... xx", "x... .... .... xx")
        assert count(keep, [GROUP])["whole_block"] == Freed(1.0, 12.0)

    def test_slot_reuse_is_bounded_by_the_head_that_keeps_most(self) -> None:
        """Dead slots: 11, 12 and 11 of 14, so 11 tokens find a place at every head: 33 slots, no copy."""
        assert count(PICTURE, [GROUP])["slot_reuse"] == Freed(33 / 12, 33.0)

    def test_compaction_pads_to_the_widest_and_charges_moves(self) -> None:
        """3, 2, 3 live: one block of four stays. Moves: 12->2; 7->0, 12->1; 11->1, 13->2."""
        assert count(PICTURE, [GROUP])["compaction"] == Freed(3, 36.0, moved_slots=5, moved_bytes=5.0)

    def test_bytes_follow_each_layers_own_price(self) -> None:
        result = count(PICTURE, [GROUP], slot_bytes={0: 10.0, 1: 100.0})
        assert result.bytes == 4 * 4 * (2 * 10 + 100)
        assert result["per_layer_tables"] == Freed(480 / 480, 4 * 20 + 4 * 100.0)
        assert result["per_head_tables"].bytes == 4 * (4 * 10 + 100)
        assert result["compaction"].moved_bytes == 3 * 10 + 2 * 100

    def test_keeping_all_frees_nothing(self) -> None:
        result = count(keep_of("x" * 14, "x" * 14, "x" * 14), [GROUP])
        assert {result[mode] for mode in MODES} == {Freed()}

    def test_a_layer_that_is_not_named_keeps_everything(self) -> None:
        result = count({0: PICTURE[0]}, [GROUP])
        assert result["whole_block"] == result["compaction"] == result["slot_reuse"] == Freed()
        assert result["per_layer_tables"].bytes == 8

    def test_an_empty_head_is_one_whose_tokens_are_encoded(self) -> None:
        keep = {0: np.zeros((2, 8), bool), 1: np.zeros((1, 8), bool)}
        result = count(keep, [GROUP])
        assert {result[mode] for mode in MODES} == {Freed(2.0, 24.0)}

    def test_groups_add_up_and_are_shown_apart(self) -> None:
        window = GroupSpec(1, (2,), (1,), 4, window=6)
        keep = PICTURE | {2: np.array([[False] * 13 + [True]])}
        result = count(keep, [GROUP, window])
        # 14 tokens, window 6: blocks 0 and 1 are gone by themselves; of 2 and 3 only 2 can be freed.
        assert result.groups[1]["whole_block"] == Freed(1.0, 4.0)
        assert result.groups[1]["compaction"] == result.groups[1]["slot_reuse"] == Freed()
        assert result.blocks == 4 + 2
        assert result["per_head_tables"].bytes == 20 + 4


class TestShared:
    """The first two blocks belong to n requests; each holds the rest alone."""

    KEEP = keep_of("x... .... .... xx", "x... .... .... xx", "x... .... .... xx")

    @pytest.mark.parametrize(
        ("shared_by", "dropping", "blocks"),
        [(1, 1, 2), (3, 1, 1), (3, 2, 2), (3, 3, 4)],
    )
    def test_a_shared_block_is_freed_once_and_only_by_all(self, shared_by: int, dropping: int, blocks: int) -> None:
        """Blocks 1 (shared) and 2 (private) are dead: each dropper frees its own, all together one more."""
        result = count(self.KEEP, [GROUP], shared_by=shared_by, prefix_tokens=9, dropping=dropping)
        assert result["whole_block"].blocks == blocks
        assert result["per_layer_tables"].blocks == result["per_head_tables"].blocks == blocks

    def test_compaction_of_a_shared_prefix_costs_a_block(self) -> None:
        """3 live slots fit one block. Alone: 4 -> 1. Shared: blocks 0 and 1 stay with the others, so 2 -> 1."""
        alone = count(self.KEEP, [GROUP])["compaction"]
        assert (alone.blocks, alone.moved_slots, alone.new_blocks) == (3, 6, 0)
        shared = count(self.KEEP, [GROUP], shared_by=2, prefix_tokens=8)["compaction"]
        assert (shared.blocks, shared.moved_slots, shared.new_blocks) == (1, 9, 0)
        both = count(self.KEEP, [GROUP], shared_by=2, prefix_tokens=8, dropping=2)["compaction"]
        assert (both.blocks, both.moved_slots) == (4, 18), "2 private each of 2, 2 shared, 2 still needed: 6 - 2"

    def test_compaction_may_lose_blocks(self) -> None:
        """All shared, one hole: the request ends with three blocks of its own and frees none."""
        keep = keep_of(*["x.xx xxxx xxxx"] * 3)
        freed = count(keep, [GROUP], shared_by=2, prefix_tokens=12)["compaction"]
        assert (freed.blocks, freed.bytes, freed.new_blocks) == (-3, -36.0, 3)

    def test_slot_reuse_only_in_private_slots(self) -> None:
        freed = count(self.KEEP, [GROUP], shared_by=2, prefix_tokens=8)["slot_reuse"]
        assert freed.bytes == 4 * 3
        assert count(self.KEEP, [GROUP])["slot_reuse"].bytes == 11 * 3


class TestRefusals:
    @pytest.mark.parametrize(
        ("keep", "options", "message"),
        [
            ({}, {}, "keep names no layer"),
            ({0: np.ones((1, 5), bool)}, {}, r"layer 0: keep is bool\[1, 5\], bool\[2, 5\] needed"),
            ({0: np.ones((2, 5))}, {}, r"keep is float64\[2, 5\]"),
            ({0: np.ones((2, 5), bool), 7: np.ones((1, 5), bool)}, {}, r"no group holds layers \[7\]"),
            ({1: np.ones((1, 5), bool)}, {"shared_by": 2, "dropping": 3}, "dropping must be 1..2"),
            ({1: np.ones((1, 5), bool)}, {"prefix_tokens": 6}, "prefix_tokens must be 0..5, not 6"),
        ],
    )
    def test_wrong_input(self, keep, options, message: str) -> None:
        with pytest.raises(IllegalEdit, match=message):
            count(keep, [GROUP], **options)


class TestPublishedFigures:
    def test_clusters_free_80_52_and_0_percent(self) -> None:
        """30 layers x 3 heads keep 10 % in runs of 13 tokens, each head its own, in 8192 tokens of block 16."""
        rng, tokens, run = np.random.default_rng(1), 8192, 13
        group = GroupSpec(0, tuple(range(30)), (3,) * 30, 16)
        keep = {}
        for layer in range(30):
            mask = np.zeros((3, tokens), dtype=bool)
            for head in mask:
                while head.mean() < 0.1:
                    start = rng.integers(tokens - run)
                    head[start : start + run] = True
            keep[layer] = mask
        result = count(keep, [group])
        assert 0.77 < result.fraction("per_head_tables") < 0.83
        assert 0.49 < result.fraction("per_layer_tables") < 0.55
        assert result["whole_block"].blocks == 0
        assert result.fraction("compaction") > 0.85
        assert result["compaction"].moved_slots > 0.09 * tokens * 90

    @pytest.mark.parametrize(("ratio", "size"), [(0.9, 16), (0.5, 4), (0.95, 8)])
    def test_random_keeping_frees_ratio_to_the_block_size(self, ratio: float, size: int) -> None:
        """One head, i.i.d.: a block is free with probability r**B (r=0.9, B=16: 18.5 %)."""
        blocks = 40_000
        kept = np.random.default_rng(0).random((1, blocks * size)) >= ratio
        found = count({0: kept}, [GroupSpec(0, (0,), (1,), size)]).fraction("whole_block")
        expected = ratio**size
        assert abs(found - expected) < 5 * (expected * (1 - expected) / blocks) ** 0.5


masks = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))


class TestAgainstTheLedger:
    """The counts are what the ledger does when it does it."""

    @settings(max_examples=150, deadline=None)
    @given(
        rng=masks, tokens=st.integers(2, 30), share=st.sampled_from([0.1, 0.5, 0.9, 0.98]), prefix=st.integers(0, 30)
    )
    @pytest.mark.parametrize("owners", [1, 2, 3])
    def test_reclaim_and_compaction(self, owners: int, rng, tokens: int, share: float, prefix: int) -> None:
        prefix = min(prefix, tokens)
        base = rng.random(tokens) > share
        keep = {0: np.stack([base, base]), 1: base[None]}
        for mask in keep.values():
            mask |= rng.random(mask.shape) < 0.05
            mask[:, -1] = True
        ledger, seqs = self.build(owners, tokens, prefix)
        for dropping in range(1, owners + 1):
            options = {"shared_by": owners, "prefix_tokens": prefix, "dropping": dropping}
            counted = count(keep, [GROUP], **options)
            evicted, more = self.build(owners, tokens, prefix)
            free = evicted.pool.num_free
            for seq in more[:dropping]:
                self.evict(evicted, seq, keep)
                evicted.reclaim(seq)
            assert evicted.pool.num_free - free == counted["whole_block"].blocks
        free, first = ledger.pool.num_free, seqs[0]
        self.evict(ledger, first, keep)
        ops = ledger.compact(first, 0)
        counted = count(keep, [GROUP], shared_by=owners, prefix_tokens=prefix)["compaction"]
        assert ledger.pool.num_free - free == counted.blocks
        assert sum(op.count for op in ops if isinstance(op, MoveSlots)) == counted.moved_slots
        for seq in seqs[1:]:
            self.evict(ledger, seq, keep)
            ledger.compact(seq, 0)
        together = count(keep, [GROUP], shared_by=owners, prefix_tokens=prefix, dropping=owners)
        assert ledger.pool.num_free - free == together["compaction"].blocks

    @staticmethod
    def build(owners: int, tokens: int, prefix: int) -> tuple[Ledger, list[int]]:
        """Requests that share the full blocks of a prefix, and hold copies of the rest."""
        ledger = Ledger([GROUP], 200)
        seqs = []
        for _ in range(owners):
            start = prefix // GROUP.block_size * GROUP.block_size
            if seqs:
                seq, cached = ledger.create([*range(start), -1])
                assert cached == start
            else:
                seq, _ = ledger.create([])
                ledger.append(seq, range(start)) if start else None
            ledger.append(seq, [1000 * len(seqs) + i for i in range(start, tokens)])
            seqs.append(seq)
        return ledger, seqs

    @staticmethod
    def evict(ledger: Ledger, seq: int, keep) -> None:
        for layer, mask in keep.items():
            ledger.evict(seq, layer, ~mask)
