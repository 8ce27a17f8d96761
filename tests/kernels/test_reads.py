"""Every kernel on what the cache really holds, against float64 attention over the policy's view of it.

The oracle shares nothing with a kernel but the cache: it reads the decoded tokens by position and masks by true
position. The cache is poisoned, so a slot that is read by mistake makes NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Edit, Evict, KeyNorm, LowRank, Merge, Quantize
from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.kernels.device import CodeRead, LaneRead, PagedLayer, SlotRead
from kvassay.kernels.gather import ReferenceKernel
from kvassay.kernels.reads import lane_reads, paged_layer
from kvassay.kernels.reference import attend, visible
from kvassay.layout.model import Layer, Rope
from tests.cache.build import World, layer, one_layer, world
from tests.kernels.devices import Device

HEADS, GROUP, DIM, N, TAIL = 2, 3, 8, 45, 5
Q_HEADS = HEADS * GROUP
REFERENCE = ReferenceKernel()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some(share: float, seed: int) -> Tensor:
    """bool [HEADS, N], ragged."""
    return torch.rand(HEADS, N, generator=torch.Generator().manual_seed(seed)) < share


def widths(shape: tuple[int, ...], allowed: Sequence[int], seed: int) -> Tensor:
    which = torch.randint(len(allowed), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(allowed)[which]


def low_rank(domain: str, *, keys: bool = True, groups: tuple[tuple[int, ...], ...] = ((0, 1),)) -> LowRank:
    wide = [len(group) * DIM for group in groups]
    encode = tuple(random(width, 5, seed=width) / width**0.5 for width in wide)
    decode = tuple(random(5, width, seed=width + 1) for width in wide)
    side = (encode, decode) if keys else (None, None)
    return LowRank(groups, *side, encode, decode, domain=domain, tokens=torch.arange(N) >= 3)  # type: ignore[arg-type]


WHOLE_VALUES: dict[str, Any] = {
    "value_groups": ((0, 1),),
    "value_encode": low_rank("pre_rope").value_encode,
    "value_decode": low_rank("pre_rope").value_decode,
}
FIRST, ODD = torch.arange(N) < 21, torch.arange(N) % 2 == 1
EDITS: dict[str, list[Edit]] = {
    "as written": [],
    "evicted, ragged": [Evict(some(0.5, 1))],
    "merged": [Merge(torch.where(ODD & some(0.3, 2), torch.arange(N) - 1, -1), torch.ones(HEADS, N))],
    "bias": [Bias(random(HEADS, N, seed=3))],
    "bias after the soft-cap": [Bias(random(HEADS, N, seed=3), before_softcap=False)],
    "both biases": [Bias(random(HEADS, N, seed=3), before_softcap=False), Bias(random(HEADS, N, seed=4))],
    "kivi 2": [Quantize(2, 2, key_axis="channel", group=4, tokens=FIRST)],
    "kivi 4": [Quantize(4, 4, key_axis="channel", group=8, tokens=FIRST)],
    "kivi 8, ragged": [Quantize(8, 8, key_axis="channel", group=4, tokens=some(0.6, 5))],
    "channels in one group": [Quantize(2, 4, key_axis="channel", tokens=FIRST)],
    "groups of odd size": [Quantize(8, 2, key_axis="channel", tokens=torch.arange(N) < 7)],
    "tokens 2": [Quantize(2, 2, tokens=FIRST)],
    "tokens 4, groups of 2": [Quantize(4, 4, group=2, tokens=FIRST)],
    "tokens 2, groups of 1": [Quantize(2, 2, group=1, tokens=FIRST)],
    "widths by token": [Quantize(widths((HEADS, N), (0, 2, 4, 8, 16), 6), widths((HEADS, N), (2, 8, 16), 7), group=4)],
    "widths by channel": [
        Quantize(8, widths((HEADS, DIM), (0, 2, 4, 8, 16), 8), key_axis="channel", group=4, tokens=FIRST)
    ],
    "widths by channel, ragged": [
        Quantize(4, widths((HEADS, DIM), (2, 4, 16), 9), key_axis="channel", group=4, tokens=some(0.7, 10))
    ],
    "fp8": [Quantize(8, 8, number="fp8_e4m3", tokens=FIRST)],
    "fp8, ragged": [Quantize(8, 8, number="fp8_e4m3", tokens=some(0.5, 11))],
    "16 bits": [Quantize(16, 16, tokens=FIRST)],
    "two segments": [Quantize(4, 2, key_axis="channel", group=4, tokens=FIRST), Quantize(8, 8, tokens=~FIRST)],
    "low rank": [low_rank("post_rope")],
    "low rank, own bases": [low_rank("post_rope", groups=((1,), (0,)))],
    "low rank, values alone": [low_rank("post_rope", keys=False)],
    "low rank before rotation": [low_rank("pre_rope")],
    "low rank, values grouped apart": [replace(low_rank("pre_rope", groups=((1,), (0,))), **WHOLE_VALUES)],
    "low rank, bias and norm put back": [
        replace(
            low_rank("pre_rope"),
            value_bias=random(HEADS, DIM, seed=20),
            key_norm=KeyNorm(random(DIM, seed=21), 0.1, random(HEADS, N, DIM, seed=22)),
        )
    ],
    "codes, bias and eviction": [
        Bias(random(HEADS, N, seed=12)),
        Quantize(4, 4, group=4, tokens=FIRST),
        Evict(some(0.5, 13) | (torch.arange(N) > 40)),
    ],
}  # fmt: skip


def made(edits: Sequence[Edit], **more: object) -> tuple[World, int]:
    """A cache of N edited tokens and TAIL more."""
    world, seq = one_layer(N, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, rope=Rope(10000.0, DIM), **more)
    if edits:
        world.cache.apply(seq, Decision({0: list(edits)}), allow_window=True)
    world.extend(seq, TAIL)
    return world, seq


def oracle(cache: PagedCache, seq: int, q: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention [q_heads, queries, v_dim] of the newest tokens, by position and in float64."""
    layer, queries = cache.layout.layers[0], q.shape[1]
    data = cache.layer(seq, 0, queries).stored
    length = cache.ledger.length(seq)
    seen = visible(data, torch.arange(length - queries, length), Q_HEADS, window=layer.window)
    wide = None if sinks is None else sinks.double()
    return attend(q.double(), data, seen, scale=layer.scale, softcap=layer.softcap, sinks=wide)


def check(
    on: Device,
    cache: PagedCache,
    seq: int,
    reads: Callable[[int], LaneRead],
    sinks: Tensor | None = None,
    queries: int = 3,
) -> None:
    for many in {1, queries}:
        q = random(Q_HEADS, many, DIM, seed=many)
        layer, lane = paged_layer(cache, cache.layout.layers[0], sinks), reads(many)
        true = oracle(cache, seq, q, sinks)
        for kernel in (on, REFERENCE):
            found = kernel.decode(layer, q[None], [lane])
            assert found.shape == (1, Q_HEADS, many, DIM) and found.dtype == torch.float32
            torch.testing.assert_close(found[0].double(), true, rtol=0, atol=4e-6)


class TestEveryForm:
    @pytest.mark.parametrize("name", EDITS)
    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
    def test_as_the_policy_sees_it(self, on: Device, name: str, fused: bool) -> None:
        world, seq = made(EDITS[name])
        check(on, world.cache, seq, lambda queries: lane_reads(world.cache, seq, 0, queries, fused=fused))

    @pytest.mark.parametrize("name", ["as written", "both biases", "kivi 2", "fp8, ragged", "low rank before rotation"])
    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
    def test_with_sinks_soft_cap_and_window(self, on: Device, name: str, fused: bool) -> None:
        world, seq = made(EDITS[name], softcap=0.7, window=47, sinks=True)
        sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0, -30.0, 0.5])
        check(on, world.cache, seq, lambda queries: lane_reads(world.cache, seq, 0, queries, fused=fused), sinks)

    @pytest.mark.parametrize("window", [None, 20])
    @pytest.mark.parametrize("number", [{}, {"number": "fp8_e4m3"}], ids=["int8", "fp8"])
    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
    def test_a_chunk_encoded_as_it_was_written(
        self, on: Device, window: int | None, number: dict[str, Any], fused: bool
    ) -> None:
        """Queries of one chunk read codes of its own tokens, each up to itself."""
        world, seq = made([] if window else [Quantize(8, 8, tokens=FIRST)], window=window)
        held = world.cache.layer(seq, 0)
        world.cache.apply(
            seq, Decision({0: [Quantize(8, 8, tokens=held.positions[0] >= N, **number)]}), allow_window=True
        )
        check(on, world.cache, seq, lambda queries: lane_reads(world.cache, seq, 0, queries, fused=fused), queries=TAIL)

    def test_a_code_stays_packed_and_a_copy_does_not(self) -> None:
        world, seq = made(EDITS["kivi 2"])
        slots, code = lane_reads(world.cache, seq, 0)
        assert isinstance(slots, SlotRead) and isinstance(code, CodeRead)
        # 21 tokens in groups of 4 and one of 1: 2 bits each, whole bytes per group; 16 bits for scale and zero
        keys = HEADS * DIM * (5 * 1 + 1) + 4 * HEADS * DIM * 6
        values = HEADS * 21 * (DIM // 4) * (1 + 4)
        assert (code.keys.nbytes, code.values.nbytes) == (keys, values)
        assert all(isinstance(read, SlotRead) for read in lane_reads(world.cache, seq, 0, fused=False))

    def test_segments_of_single_tokens_are_one_read(self, on: Device) -> None:
        world, seq = one_layer(6, kv_heads=HEADS)
        for _ in range(6):
            world.cache.apply(seq, Decision({0: [Quantize(8, 8, number="fp8_e4m3", tokens=None)]}))
            world.extend(seq, 1)
        assert len(world.cache.ledger.segments(seq, 0)) == 6
        reads = lane_reads(world.cache, seq, 0)
        assert len(reads) == 2
        check(on, world.cache, seq, lambda queries: lane_reads(world.cache, seq, 0, queries), queries=1)

    @pytest.mark.parametrize("name", EDITS)
    @pytest.mark.parametrize("fused", [True, False], ids=["fused", "decoded"])
    def test_a_selection_per_head(self, on: Device, name: str, fused: bool) -> None:
        world, seq = made(EDITS[name], softcap=0.7)  # a bias before it is another than one after it
        data = world.cache.stored(seq, 0)
        selected = torch.rand(data.positions.shape, generator=torch.Generator().manual_seed(5)) < 0.3
        selected[1, 8:40] = False  # nothing of a whole tile
        selected = (selected | (data.positions == N + TAIL - 1)) & (data.positions >= 0)
        layer, q = paged_layer(world.cache, world.cache.layout.layers[0]), random(Q_HEADS, 1, DIM)
        reads = lane_reads(world.cache, seq, 0, fused=fused, selected=selected)
        seen = visible(data, torch.tensor([N + TAIL - 1]), Q_HEADS, allowed=selected.repeat_interleave(GROUP, 0)[None])
        true = attend(q.double(), data, seen, scale=layer.scale, softcap=layer.softcap)
        for kernel in (on, REFERENCE):
            found = kernel.decode(layer, q[None], [reads])[0]
            torch.testing.assert_close(found.double(), true, rtol=0, atol=4e-6)


class TestManyLanes:
    def test_lanes_of_every_form_in_one_call(self, on: Device) -> None:
        """What a replay step asks: forks of one sequence, each edited in its own way."""
        world, first = made([])
        layer = paged_layer(world.cache, world.cache.layout.layers[0])
        lanes, expected = [], []
        q = random(len(EDITS), Q_HEADS, 2, DIM)
        for at, edits in enumerate(EDITS.values()):
            seq = world.fork(first)
            world.cache.apply(seq, Decision({0: [_widened(edit) for edit in edits]}))
            lanes.append(lane_reads(world.cache, seq, 0, 2, fused=at % 2 == 0))
            expected.append(oracle(world.cache, seq, q[at], None))
        found = on.decode(layer, q, lanes)
        torch.testing.assert_close(found.double(), torch.stack(expected), rtol=0, atol=4e-6)

    def test_a_lane_without_reads_is_zero_and_leaves_the_others_alone(self, on: Device) -> None:
        world, seq = made([])
        layer, q = paged_layer(world.cache, world.cache.layout.layers[0]), random(2, Q_HEADS, 1, DIM)
        reads = lane_reads(world.cache, seq, 0)
        found = on.decode(layer, q, [[], reads])
        assert not found[0].any()
        assert torch.equal(found[1:], on.decode(layer, q[1:], [reads]))


def _widened(edit: Edit) -> Edit:
    """The edit for N + TAIL tokens, of which it leaves the last alone."""
    if isinstance(edit, Quantize) and edit.tokens is None:
        edit = replace(edit, tokens=torch.ones(N, dtype=torch.bool))
    if isinstance(edit, LowRank) and edit.key_norm is not None:
        rows = torch.nn.functional.pad(edit.key_norm.rows, (0, 0, 0, TAIL))
        edit = replace(edit, key_norm=replace(edit.key_norm, rows=rows))

    def wide(name: str, x: Tensor) -> Tensor:
        if name.endswith("_bias") or (name == "key_bits" and getattr(edit, "key_axis", "") == "channel"):
            return x
        fill = {"keep": True, "into": -1, "weight": 1, "tokens": False, "log_weight": 0}.get(name, 16)
        return torch.cat([x, torch.full((*x.shape[:-1], TAIL), fill, dtype=x.dtype)], -1)

    changed = {
        f.name: wide(f.name, getattr(edit, f.name)) for f in fields(edit) if torch.is_tensor(getattr(edit, f.name))
    }
    return replace(edit, **changed)


def test_a_layer_that_reads_another_ones_cache_has_that_pool() -> None:
    made_world = world([GroupSpec(0, (0,), (2,), 4)], [layer(0), Layer(1, 4, (), scale=0.25, cache_of=0)])
    found = paged_layer(made_world.cache, made_world.cache.layout.layers[1])
    assert isinstance(found, PagedLayer) and found.scale == 0.25
    assert found.keys.data_ptr() == made_world.cache.store.keys(0).data_ptr()
