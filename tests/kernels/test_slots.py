"""Slots in place on every device: by block table, by list, per head and query, against the float64 reference."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numba
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kvassay.kernels.cpu import SHORTEST
from kvassay.kernels.device import LaneRead, PagedLayer, SlotRead
from kvassay.kernels.gather import ReferenceKernel
from tests.kernels.devices import Device

BLOCKS, SIZE = 8, 6
REFERENCE = ReferenceKernel()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pools(kv_heads: int, k_dim: int, v_dim: int, blocks: int = BLOCKS, size: int = SIZE) -> tuple[Tensor, Tensor]:
    return random(blocks, kv_heads, size, k_dim, seed=1), random(blocks, kv_heads, size, v_dim, seed=2)


def slot_list(counts: list[int], seed: int = 3, **more: Tensor) -> SlotRead:
    """Distinct random slots per head; what lies behind the count would crash or mislead if read."""
    rng = torch.Generator().manual_seed(seed)
    entries = torch.full((len(counts), max(counts)), -(10**6), dtype=torch.int32)
    for head, n in enumerate(counts):
        entries[head, :n] = torch.randperm(BLOCKS * SIZE, generator=rng)[:n].int()
    return SlotRead(entries, torch.tensor([counts], dtype=torch.int32), **more)


def ints(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def check(on: Device, q: Tensor, layer: PagedLayer, lanes: list[LaneRead], atol: float = 2e-6) -> Tensor:
    found = on.decode(layer, q, lanes)
    assert found.shape == (*q.shape[:3], layer.values.shape[3]) and found.dtype == torch.float32
    torch.testing.assert_close(found, REFERENCE.decode(layer, q, lanes), rtol=0, atol=atol)
    return found


class TestAgainstReference:
    @pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_group_sizes_and_head_dimensions(self, on: Device, group: int, dim: int) -> None:
        k, v = pools(2, dim, dim)
        lanes: list[LaneRead] = [[slot_list([9, 9])], [slot_list([30, 30])], [slot_list([1, 1])]]
        check(on, random(3, 2 * group, 1, dim), PagedLayer(k, v, dim**-0.5), lanes)

    @pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_softcap_and_sinks(self, on: Device, softcap: float | None, sinks: bool) -> None:
        k, v = pools(2, 16, 16)
        logits = torch.tensor([-2.0, 0.0, 1.0, 3.0, -50.0, 50.0]) if sinks else None
        layer = PagedLayer(k, v, 0.25, softcap, logits)
        check(on, 4 * random(2, 6, 1, 16), layer, [[slot_list([20, 20])], [slot_list([7, 7])]], 4e-6)

    def test_ragged_heads_and_lanes(self, on: Device) -> None:
        layer = PagedLayer(*pools(3, 16, 16), 0.25)
        lanes: list[LaneRead] = [[slot_list([1, 20, 5])], [slot_list([48, 2, 2])], [slot_list([3, 3, 4])]]
        check(on, random(3, 6, 1, 16), layer, lanes)

    def test_keys_and_values_of_other_widths(self, on: Device) -> None:
        layer = PagedLayer(*pools(2, 24, 8), 0.25)
        check(on, random(2, 4, 1, 24), layer, [[slot_list([5, 6])], [slot_list([7, 8])]])

    def test_strided_pools(self, on: Device) -> None:
        """As the store lays them out: keys and values of a block behind each other in one buffer."""
        buffer = random(BLOCKS, 2 * SIZE * (16 + 8) + 5)
        k = buffer[:, : 2 * SIZE * 16].unflatten(1, (2, SIZE, 16))
        v = buffer[:, 2 * SIZE * 16 : 2 * SIZE * 24].unflatten(1, (2, SIZE, 8))
        assert not k.is_contiguous() and not v.is_contiguous()
        check(on, random(2, 4, 1, 16), PagedLayer(k, v, 0.25), [[slot_list([15, 3])], [slot_list([9, 9])]])

    def test_rows_elsewhere_in_any_layout(self, on: Device) -> None:
        """Rows decoded earlier, here transposed, beside the pool."""
        k, v = random(2, 16, 11, seed=4).transpose(1, 2), random(2, 11, 16, seed=5)
        rows = SlotRead(ints([0, 3, 4, 5, 10], [1, 2, 3, 9, 0]), ints([5, 4]), keys=k[None], values=v[None])
        check(on, random(1, 4, 1, 16), PagedLayer(*pools(2, 16, 16), 0.25), [[slot_list([9, 4]), rows]])

    def test_queries_that_are_a_view(self, on: Device) -> None:
        q = random(3, 4, 2, 16)[:, :, 1:]
        assert not q.is_contiguous()
        check(on, q, PagedLayer(*pools(2, 16, 16), 0.25), [[slot_list([5, 5])]] * 3)

    def test_a_block_table_from_the_middle_of_a_block(self, on: Device) -> None:
        """Two queries of one lane, with a window that has passed the first three tokens."""
        table = SlotRead(ints([5, 2, 7]), ints([14, 14], [15, 15]), first=ints([3, 3], [4, 4]), unit=SIZE)
        check(on, random(1, 4, 2, 16), PagedLayer(*pools(2, 16, 16), 0.25), [[table]])

    def test_a_block_list_per_head(self, on: Device) -> None:
        table = SlotRead(ints([5, 2, 7, 0], [1, 3, -9, -9]), ints([24, 11]), unit=SIZE)
        check(on, random(1, 6, 1, 16), PagedLayer(*pools(2, 16, 16), 0.25), [[table]])

    def test_a_block_table_is_the_list_of_its_slots(self, on: Device) -> None:
        layer, q = PagedLayer(*pools(2, 16, 16), 0.25), random(1, 4, 1, 16)
        blocks = torch.tensor([5, 2, 7])
        slots = (blocks[:, None] * SIZE + torch.arange(SIZE)).flatten()[None].int()
        by_block = SlotRead(blocks[None].int(), ints([15, 15]), unit=SIZE)
        assert torch.equal(on.decode(layer, q, [[by_block]]), on.decode(layer, q, [[SlotRead(slots, ints([15, 15]))]]))


class TestPieces:
    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_long_context_is_cut_and_merged(self, on: Device, threads: int) -> None:
        """7,001 tokens of one KV head, so that no piece is as long as another; weights span many powers of two."""
        if threads > (numba.config.NUMBA_NUM_THREADS if on.name == "cpu" else 1):
            pytest.skip("one processor" if on.name == "cpu" else "its work is not cut by the CPU's threads")
        numba.set_num_threads(threads)
        k, v = pools(1, 16, 16, blocks=440, size=16)
        blocks = torch.randperm(440, generator=torch.Generator().manual_seed(1))[None].int()
        table = SlotRead(blocks, ints([7001]), unit=16)
        assert SHORTEST < 7001 / 4
        for size in (1.0, 20.0):
            q, sinks = size * random(2, 3, 1, 16), torch.tensor([0.0, 5.0, -5.0])
            check(on, q, PagedLayer(k, v, 0.25, sinks=sinks), [[table], [table]], 1e-5 * size)

    def test_a_piece_that_weighs_nothing_leaves_nothing(self, on: Device) -> None:
        """The greatest logit is in the last of many pieces; all before it must vanish, not overflow."""
        k, v = torch.zeros(300, 1, 16, 16), torch.full((300, 1, 16, 16), 7.0)
        k[-1, 0, -1], v[-1, 0, -1] = 1.0, 3.0
        table = SlotRead(torch.arange(300)[None].int(), ints([4800]), unit=16)
        out = on.decode(PagedLayer(k, v, 1.0), torch.full((1, 1, 1, 16), 1000.0), [[table]])
        assert torch.equal(out.flatten(), torch.full((16,), 3.0))


def test_any_ragged_lanes(on: Device) -> None:
    """Heads, groups, dimensions, queries, empty rows, ranges, biases, soft-cap and sinks in any mixture."""
    many = settings(max_examples=60 if on.name == "cpu" else 12, deadline=None)
    many(given(st.data())(lambda data: ragged_lanes(on, data)))()


def ragged_lanes(on: Device, data: st.DataObject) -> None:
    draw = data.draw
    kv_heads, group, queries = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    k_dim, v_dim = draw(st.sampled_from([1, 8, 20, 33])), draw(st.sampled_from([1, 8, 17]))
    k, v = pools(kv_heads, k_dim, v_dim)
    softcap = draw(st.sampled_from([None, 1.5]))
    sinks = random(kv_heads * group, seed=9) if draw(st.booleans()) else None
    lanes: list[LaneRead] = []
    count = draw(st.integers(1, 3))
    for _ in range(count):
        reads = []
        for _ in range(draw(st.integers(0, 2))):
            unit = draw(st.sampled_from([1, SIZE]))
            units = draw(st.integers(1, BLOCKS * SIZE // unit))
            rows = draw(st.sampled_from([1, kv_heads]))
            entries = torch.tensor([draw(st.permutations(range(BLOCKS * SIZE // unit)))[:units] for _ in range(rows)])
            tokens = units * unit
            end = st.tuples(st.integers(0, tokens), st.integers(0, tokens)).map(sorted)
            ends = torch.tensor([[draw(end) for _ in range(kv_heads)] for _ in range(queries)]).int()
            bias, inner = (random(kv_heads, tokens, seed=s) if draw(st.booleans()) else None for s in (7, 8))
            reads.append(SlotRead(entries.int(), ends[..., 1], ends[..., 0], unit, bias, inner))
        lanes.append(reads)
    q = 3 * random(count, kv_heads * group, queries, k_dim)
    found = check(on, q, PagedLayer(k, v, k_dim**-0.5, softcap, sinks), lanes, 5e-6)
    for lane, head, query in itertools.product(range(count), range(kv_heads * group), range(queries)):
        if all(int((r.last - r.first)[query, head // group]) == 0 for r in lanes[lane]):  # type: ignore[operator,union-attr]
            assert not found[lane, head, query].any()


class TestNumbers:
    def test_one_token_is_its_value(self, on: Device) -> None:
        k, v = pools(1, 16, 16)
        out = on.decode(PagedLayer(k, v, 1.0), random(1, 2, 1, 16), [[SlotRead(ints([17]), ints([1]))]])
        assert torch.equal(out[0, 0, 0], v[2, 0, 5]) and torch.equal(out[0, 1, 0], v[2, 0, 5])

    @pytest.mark.parametrize("size", [1e4, -1e4])
    def test_large_logits_do_not_overflow(self, on: Device, size: float) -> None:
        k, v = pools(1, 16, 16)
        k[0, 0] = torch.ones(16)
        k[0, 0, 2] = 1.001
        read = SlotRead(torch.arange(4)[None].int(), ints([4]))
        out = on.decode(PagedLayer(k, v, 1.0), torch.full((1, 1, 1, 16), size), [[read]])
        expect = v[0, 0, 2] if size > 0 else v[0, 0, [0, 1, 3]].mean(0)
        torch.testing.assert_close(out[0, 0, 0], expect)

    def test_a_bias_of_log_three_weighs_threefold(self, on: Device) -> None:
        k, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[0.0], [1.0]]]])
        read = SlotRead(ints([0, 1]), ints([2]), bias=torch.tensor([[0.0, 3.0]]).log1p() * torch.tensor([0.0, 1.0]))
        heavy = on.decode(PagedLayer(k, v, 1.0), torch.ones(1, 1, 1, 1), [[read]])
        assert heavy.item() == pytest.approx(0.8)  # 4 / (1 + 4)

    def test_a_bias_of_minus_infinity_hides_a_token(self, on: Device) -> None:
        k, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[5.0], [1.0]]]])
        read = SlotRead(ints([0, 1]), ints([2]), bias=torch.tensor([[-torch.inf, 0.0]]))
        assert on.decode(PagedLayer(k, v, 1.0), torch.ones(1, 1, 1, 1), [[read]]).item() == 1.0

    def test_what_no_slot_names_is_never_read(self, on: Device) -> None:
        k, v = pools(2, 16, 16)
        reads = [slot_list([5, 9]), slot_list([7, 7], seed=4)]
        named = torch.zeros(BLOCKS * SIZE, 2, dtype=torch.bool)
        for read, head in itertools.product(reads, range(2)):
            named[read.entries[head, : read.last[0, head]].long(), head] = True
        dead = ~named.view(BLOCKS, SIZE, 2).permute(0, 2, 1)
        q, lanes = random(2, 4, 1, 16), [[read] for read in reads]
        clean = on.decode(PagedLayer(k, v, 0.25), q, lanes)
        k[dead], v[dead] = torch.nan, torch.nan
        assert torch.equal(on.decode(PagedLayer(k, v, 0.25), q, lanes), clean)

    @pytest.mark.parametrize("side", ["keys", "values"])
    def test_a_nan_that_is_read_shows(self, on: Device, side: str) -> None:
        k, v = pools(1, 16, 16)
        (k if side == "keys" else v)[0, 0, 3] = torch.nan
        read = SlotRead(torch.arange(20)[None].int(), ints([20]))
        assert bool(torch.isnan(on.decode(PagedLayer(k, v, 0.25), random(1, 1, 1, 16), [[read]])).all())
