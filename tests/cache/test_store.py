"""Where bytes lie, how they are gathered, and how the ledger's copies are carried out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.ops import CopyBlock, GroupSpec, MoveSlots, SlotView
from kvassay.cache.store import KVStore
from tests.cache.build import layer, layout

BLOCKS, SIZE = 10, 4


def filled(store: KVStore, index: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random content in every slot of a layer, and copies of it."""
    rng = torch.Generator().manual_seed(seed)
    for side in (store.keys(index), store.values(index)):
        side.copy_(torch.randn(side.shape, generator=rng))
    return store.keys(index).clone(), store.values(index).clone()


def one(kv_heads: int = 2, k_dim: int = 6, v_dim: int = 4) -> KVStore:
    only = layer(0, kv_heads, k_dim, v_dim)
    return KVStore(layout(only), [GroupSpec(0, (0,), (kv_heads,), SIZE)], BLOCKS, poison=True)


def view_of(rows: list[list[tuple[int, int]]]) -> SlotView:
    """A slot view of (block, offset) pairs per head, its flags worked out from the logical slots given by order."""
    width = max(map(len, rows))
    blocks, offsets, positions = (np.full((len(rows), width), -1, dtype=np.int32) for _ in range(3))
    for head, row in enumerate(rows):
        for at, (block, offset) in enumerate(row):
            blocks[head, at], offsets[head, at], positions[head, at] = block, offset, at
    uniform = all(row == rows[0] for row in rows)
    # The logical slots are consecutive if offsets run on within a block and start at 0 in the next.
    runs = all(
        after == (block, offset + 1) if offset + 1 < SIZE else after[1] == 0 and after[0] != block
        for (block, offset), after in zip(rows[0], rows[0][1:], strict=False)
    )
    counts = np.array([len(row) for row in rows], dtype=np.int32)
    return SlotView(positions, blocks, offsets, positions, counts, SIZE, uniform, uniform and runs)


def slots(blocks: list[int], first: int = 0, upto: int | None = None) -> list[tuple[int, int]]:
    return [(block, offset) for block in blocks for offset in range(SIZE)][first:upto]


CASES = {
    "consecutive blocks": [slots([3, 4, 5])] * 2,
    "consecutive, from the middle of a block to the middle of one": [slots([3, 4, 5], 2, 11)] * 2,
    "scattered blocks": [slots([7, 1, 9])] * 2,
    "scattered, partial": [slots([7, 1, 9], 3, 10)] * 2,
    "one block": [slots([2], 1, 3)] * 2,
    "holes": [[(1, 0), (1, 3), (4, 2)]] * 2,
    "heads apart": [[(1, 0), (2, 1), (8, 3)], [(8, 3), (1, 1), (2, 0)]],
    "ragged": [slots([6, 2], 1), [(5, 2)]],
    "one head empty": [[], [(5, 2), (6, 0)]],
    "the last slot of the pool": [[(9, 3)]] * 2,
}


class TestGather:
    @pytest.mark.parametrize("rows", CASES.values(), ids=CASES.keys())
    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_equals_the_loop(self, rows: list[list[tuple[int, int]]], kv_heads: int) -> None:
        store = one(kv_heads)
        k, v = filled(store, 0)
        rows = rows[:kv_heads] if kv_heads < len(rows) and rows[0] else rows[-kv_heads:]
        run = store.run_of(0, view_of(rows))
        for head, row in enumerate(rows):
            for at, (block, offset) in enumerate(row):
                assert torch.equal(run.k[head, at], k[block, head, offset])
                assert torch.equal(run.v[head, at], v[block, head, offset])
        assert run.k.shape == (kv_heads, run.tokens, 6) and run.v.shape == (kv_heads, run.tokens, 4)

    def test_cases_cover_both_paths(self) -> None:
        straight = {name for name, rows in CASES.items() if view_of(rows).is_identity}
        assert {"consecutive blocks", "scattered, partial", "one block"} <= straight
        assert not {"holes", "heads apart", "ragged"} & straight

    def test_nothing(self) -> None:
        run = one().run_of(0, view_of([[], []]))
        assert run.tokens == 0 and run.k.shape == (2, 0, 6) and run.v.shape == (2, 0, 4)

    def test_a_run_is_read_when_first_looked_at(self) -> None:
        store = one()
        filled(store, 0)
        run = store.run_of(0, view_of([[(1, 0), (1, 2)]] * 2))
        store.keys(0)[1, :, 0] = 7.0
        assert bool((run.k[:, 0] == 7).all())
        store.keys(0)[1, :, 0] = 8.0
        assert bool((run.k[:, 0] == 7).all())


class TestWrite:
    def test_lands_where_it_is_told_and_nowhere_else(self) -> None:
        store = one()
        k, v = torch.randn(2, 2, 3, 6), torch.randn(2, 2, 3, 4)
        blocks = np.array([[[1, 1, 2], [1, 1, 2]], [[5, 7, 5], [8, 3, 3]]])
        offsets = np.array([[[2, 3, 0], [2, 3, 0]], [[0, 1, 3], [2, 2, 0]]])
        store.write(0, blocks, offsets, k, v)
        named = torch.zeros(BLOCKS, 2, SIZE, dtype=torch.bool)
        for lane in range(2):
            for head in range(2):
                for at in range(3):
                    block, offset = blocks[lane, head, at], offsets[lane, head, at]
                    named[block, head, offset] = True
                    assert torch.equal(store.keys(0)[block, head, offset], k[lane, head, at])
                    assert torch.equal(store.values(0)[block, head, offset], v[lane, head, at])
        for side in (store.keys(0), store.values(0)):
            assert torch.equal(torch.isnan(side).all(-1), ~named) and torch.equal(~torch.isnan(side).any(-1), named)

    def test_one_side_of_one_head(self) -> None:
        store = one()
        k, v = filled(store, 0)
        new = torch.randn(2, 4)
        store.write_at(0, 1, np.array([3, 8]), np.array([1, 0]), None, new)
        v[3, 1, 1], v[8, 1, 0] = new
        assert torch.equal(store.keys(0), k) and torch.equal(store.values(0), v)
        new = torch.randn(1, 6)
        store.write_at(0, 0, np.array([2]), np.array([2]), new, None)
        k[2, 0, 2] = new
        assert torch.equal(store.keys(0), k) and torch.equal(store.values(0), v)


class TestAliasing:
    """Layers at the same place in their groups share memory, as in vLLM: a block id means one buffer for all."""

    def make(self) -> KVStore:
        layers = [layer(0, 2, 6, 4), layer(1, 2, 6, 4), layer(2, 1, 8, 8), layer(3, 1, 8, 8)]
        groups = [GroupSpec(0, (0, 1), (2, 2), SIZE), GroupSpec(1, (2, 3), (1, 1), SIZE)]
        return KVStore(layout(*layers), groups, BLOCKS, poison=True)

    def test_first_layers_share_a_buffer_and_second_layers_another(self) -> None:
        store = self.make()
        store.keys(0)[4] = 5.0
        assert bool((store.keys(2)[4] == 5).all()) and bool(torch.isnan(store.keys(1)).all())
        assert bool(torch.isnan(store.keys(3)).all()) and bool(torch.isnan(store.keys(2)[3]).all())

    def test_keys_and_values_of_a_block_do_not_overlap(self) -> None:
        store = self.make()
        for index in range(4):
            store.keys(index)[:] = 1.0
            store.values(index)[:] = 2.0
            assert bool((store.keys(index) == 1).all()) and bool((store.values(index) == 2).all())

    def test_layers_of_other_sizes_gather_right(self) -> None:
        store = self.make()
        k, v = filled(store, 3)
        run = store.run_of(3, view_of([[(9, 3), (1, 2)]]))
        assert torch.equal(run.k[0], torch.stack([k[9, 0, 3], k[1, 0, 2]]))
        assert torch.equal(run.v[0], torch.stack([v[9, 0, 3], v[1, 0, 2]]))


class TestOps:
    def test_copy_takes_all_layers_of_the_group_and_counts_elements(self) -> None:
        layers = [layer(0, 2, 6, 4), layer(1, 2, 6, 4)]
        store = KVStore(layout(*layers), [GroupSpec(0, (0, 1), (2, 2), SIZE)], BLOCKS, poison=True)
        before = {index: filled(store, index, index) for index in range(2)}
        assert store.run([CopyBlock(0, 3, 7)]) == 2 * 2 * SIZE * (6 + 4)
        for index, (k, v) in before.items():
            k[7], v[7] = k[3], v[3]
            assert torch.equal(store.keys(index), k) and torch.equal(store.values(index), v)

    def test_move_reads_all_before_it_writes(self) -> None:
        """Slots 4, 5, 6 to 5, 6, 4: a loop that copies one by one would smear the first over all."""
        store = one()
        k, v = filled(store, 0)
        moved = store.run([MoveSlots(0, 1, np.array([4, 5, 6]), np.array([5, 6, 4]))])
        assert moved == 3 * (6 + 4)
        k[1, 1, [1, 2, 0]], v[1, 1, [1, 2, 0]] = k[1, 1, [0, 1, 2]], v[1, 1, [0, 1, 2]]
        assert torch.equal(store.keys(0), k) and torch.equal(store.values(0), v)

    def test_ops_run_in_order(self) -> None:
        store = one()
        k, _ = filled(store, 0)
        store.run([CopyBlock(0, 1, 2), CopyBlock(0, 2, 3)])
        assert torch.equal(store.keys(0)[3], k[1])
