"""Decode in place over slots against the float64 reference over the same tokens gathered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.kernels.cpu import paged_decode
from kvassay.kernels.reference import attend, visible

BLOCKS, SIZE = 8, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pools(kv_heads: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor]:
    return random(BLOCKS, kv_heads, SIZE, k_dim, seed=1), random(BLOCKS, kv_heads, SIZE, v_dim, seed=2)


def slot_lists(counts: list[list[int]], capacity: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Distinct random slots per (lane, head); what lies behind the count would crash or mislead if read."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.full((len(counts), len(counts[0]), capacity), -(10**6), dtype=torch.int32)
    for lane, row in enumerate(counts):
        for head, n in enumerate(row):
            slots[lane, head, :n] = torch.randperm(BLOCKS * SIZE, generator=rng)[:n].int()
    return slots, torch.tensor(counts, dtype=torch.int32)


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    count: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Gather the slots one by one, then the reference in float64."""
    lanes = []
    for lane in range(q.shape[0]):
        width = int(count[lane].max())
        rows = [torch.zeros(k.shape[1], width, side.shape[3], dtype=torch.float64) for side in (k, v)]
        positions = torch.full((k.shape[1], width), -1)
        for head in range(k.shape[1]):
            for at in range(int(count[lane, head])):
                block, offset = divmod(int(slots[lane, head, at]), SIZE)
                for row, side in zip(rows, (k, v), strict=True):
                    row[head, at] = side[block, head, offset].double()
                positions[head, at] = at
        data = LayerData.ragged(rows[0], rows[1], positions).stored
        seen = visible(data, torch.tensor([width]), q.shape[1])
        lanes.append(attend(q[lane, :, None].double(), data, seen, scale=scale, softcap=softcap, sinks=sinks)[:, 0])
    return torch.stack(lanes)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    count: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    scale = q.shape[-1] ** -0.5
    found = paged_decode(q, k, v, slots, count, scale=scale, softcap=softcap, sinks=sinks)
    assert found.shape == (*q.shape[:2], v.shape[3]) and found.dtype == torch.float32
    true = expected(q, k, v, slots, count, scale, softcap, sinks)
    torch.testing.assert_close(found.double(), true, rtol=0, atol=2e-6)


class TestAgainstReference:
    @pytest.mark.parametrize("group", [1, 3, 8])
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_group_sizes_and_head_dimensions(self, group: int, dim: int) -> None:
        k, v = pools(2, dim, dim)
        check(random(3, 2 * group, dim), k, v, *slot_lists([[9, 9], [30, 30], [1, 1]], 33))

    @pytest.mark.parametrize("softcap", [None, 0.5, 50.0])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_softcap_and_sinks(self, softcap: float | None, sinks: bool) -> None:
        k, v = pools(2, 16, 16)
        logits = torch.tensor([-2.0, 0.0, 1.0, 3.0, -50.0, 50.0]) if sinks else None
        check(4 * random(2, 6, 16), k, v, *slot_lists([[20, 20], [7, 7]], 20), softcap=softcap, sinks=logits)

    def test_ragged_heads_and_lanes(self) -> None:
        k, v = pools(3, 16, 16)
        check(random(3, 6, 16), k, v, *slot_lists([[1, 20, 5], [48, 2, 2], [3, 3, 4]], 48))

    def test_keys_and_values_of_other_widths(self) -> None:
        k, v = pools(2, 24, 8)
        check(random(2, 4, 24), k, v, *slot_lists([[5, 6], [7, 8]], 8))

    def test_strided_pools(self) -> None:
        """As the store lays them out: keys and values of a block behind each other in one buffer."""
        buffer = random(BLOCKS, 2 * SIZE * (16 + 8) + 5)
        k = buffer[:, : 2 * SIZE * 16].unflatten(1, (2, SIZE, 16))
        v = buffer[:, 2 * SIZE * 16 : 2 * SIZE * 24].unflatten(1, (2, SIZE, 8))
        assert not k.is_contiguous() and not v.is_contiguous()
        check(random(2, 4, 16), k, v, *slot_lists([[15, 3], [9, 9]], 15))

    def test_queries_that_are_a_view(self) -> None:
        """What the replay passes: [lanes, heads, tokens, dim] cut to one token."""
        k, v = pools(2, 16, 16)
        q = random(3, 4, 2, 16)[:, :, 1]
        assert not q.is_contiguous()
        check(q, k, v, *slot_lists([[5, 5]] * 3, 5))

    def test_lanes_that_share_slots(self) -> None:
        k, v = pools(2, 16, 16)
        slots, count = slot_lists([[12, 12]], 12)
        check(random(3, 4, 16), k, v, slots.repeat(3, 1, 1), count.repeat(3, 1))


class TestNumbers:
    def test_one_token_is_its_value(self) -> None:
        k, v = pools(1, 16, 16)
        out = paged_decode(random(1, 2, 16), k, v, torch.tensor([[[17]]]).int(), torch.tensor([[1]]).int(), scale=1.0)
        assert torch.equal(out[0, 0], v[2, 0, 5]) and torch.equal(out[0, 1], v[2, 0, 5])

    @pytest.mark.parametrize("size", [1e4, -1e4])
    def test_large_logits_do_not_overflow(self, size: float) -> None:
        k, v = pools(1, 16, 16)
        k[0, 0] = torch.ones(16)
        k[0, 0, 2] = 1.001
        out = paged_decode(
            torch.full((1, 1, 16), size), k, v, torch.arange(4)[None, None].int(), torch.tensor([[4]]).int(), scale=1.0
        )
        expect = v[0, 0, 2] if size > 0 else v[0, 0, [0, 1, 3]].mean(0)
        torch.testing.assert_close(out[0, 0], expect)

    def test_what_no_slot_names_is_never_read(self) -> None:
        k, v = pools(2, 16, 16)
        slots, count = slot_lists([[5, 9], [7, 7]], 9)
        named = torch.zeros(BLOCKS * SIZE, 2, dtype=torch.bool)
        for lane in range(2):
            for head in range(2):
                named[slots[lane, head, : count[lane, head]].long(), head] = True
        dead = ~named.view(BLOCKS, SIZE, 2).permute(0, 2, 1)
        q = random(2, 4, 16)
        clean = paged_decode(q, k, v, slots, count, scale=0.25)
        k[dead], v[dead] = torch.nan, torch.nan
        assert torch.equal(paged_decode(q, k, v, slots, count, scale=0.25), clean)
