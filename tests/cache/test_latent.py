"""A latent layer (MLA) in the paged cache: a token has one row, key and in its beginning value; none is held twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Evict, LowRank, Merge, Quantize
from kvassay.cache.ops import CopyBlock, GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.errors import IllegalEdit
from kvassay.kernels.cpu import CpuKernel
from kvassay.kernels.reads import lane_reads, paged_layer
from kvassay.kernels.reference import attend, visible
from kvassay.layout.model import Component, Latent, Layer, Layout

DIM, ROPE, TOKENS, HEADS = 12, 4, 21, 3
LAYOUT = Layout("mla", (Layer(0, HEADS, (Component(Latent(DIM, ROPE)),), 0.25),), 8, 50, 512)
ROWS = torch.randn(1, 1, TOKENS, DIM + ROPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def cache() -> PagedCache:
    made = PagedCache(LAYOUT, [GroupSpec(0, (0,), (1,), 4)], 32, poison=True)
    seq, _ = made.create([])
    made.extend(seq, [0] * TOKENS)
    made.write(0, [seq], ROWS, ROWS[..., :DIM])
    return made


def edit(cache: PagedCache, *edits: object) -> None:
    cache.apply(0, Decision({0: list(edits)}))  # type: ignore[arg-type]
    cache.check()


def test_values_are_the_beginning_of_keys_in_the_same_memory(cache: PagedCache) -> None:
    keys, values = cache.store.keys(0), cache.store.values(0)
    assert keys.shape == (32, 1, 4, DIM + ROPE) and values.shape == (32, 1, 4, DIM)
    assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    assert keys.untyped_storage().nbytes() == 32 * 4 * (DIM + ROPE) * 4
    data = cache.layer(0, 0)
    assert data.one_side
    assert torch.equal(data.k, ROWS[0]) and torch.equal(data.v, ROWS[0, ..., :DIM])


def test_a_copied_block_is_counted_once(cache: PagedCache) -> None:
    assert cache.store.run([CopyBlock(0, 1, 9)]) == 4 * (DIM + ROPE)
    assert torch.equal(cache.store.values(0)[9], cache.store.values(0)[1])


def test_after_an_eviction_the_others_are_read(cache: PagedCache) -> None:
    keep = torch.ones(1, TOKENS, dtype=torch.bool)
    keep[0, [0, 5, 6, 20]] = False
    edit(cache, Evict(keep))
    data = cache.layer(0, 0)
    assert torch.equal(data.k, ROWS[0][:, keep[0]]) and torch.equal(data.v, ROWS[0][:, keep[0], :DIM])


@pytest.mark.parametrize("bits", [8, torch.full((1, TOKENS), 4)])
def test_a_code_is_held_once_and_read_for_both(cache: PagedCache, bits: int | Tensor) -> None:
    edit(cache, Quantize(bits, bits))
    (segment,) = cache.ledger.segments(0, 0)
    width = 8 if isinstance(bits, int) else 4
    payload = TOKENS * (DIM + ROPE) * width // 8
    assert segment.nbytes == payload + TOKENS * 4  # a float16 scale and zero per token
    data = cache.layer(0, 0)
    assert data.one_side and torch.equal(data.v, data.k[..., :DIM])
    step = (ROWS[0].amax(-1) - ROWS[0].amin(-1)) / (2**width - 1)
    assert bool(((data.k - ROWS[0]).abs().amax(-1) <= step * 0.51 + 2e-3).all())


@pytest.mark.parametrize("form", ["slots", "codes", "decoded codes"])
def test_the_kernel_reads_it_in_place(cache: PagedCache, form: str) -> None:
    if form != "slots":
        tokens = torch.zeros(1, TOKENS, dtype=torch.bool)
        tokens[0, :13] = True
        edit(cache, Quantize(8, 8, tokens=tokens))
    q = torch.randn(1, HEADS, 2, DIM + ROPE, generator=torch.Generator().manual_seed(1))
    paged = paged_layer(cache, LAYOUT.layers[0])
    assert paged.values.data_ptr() == cache.store.keys(0).data_ptr()
    found = CpuKernel().decode(paged, q, [lane_reads(cache, 0, 0, 2, fused=form == "codes")])[0, ..., :DIM]
    data = cache.stored(0, 0, 2)
    expected = attend(q[0].double(), data, visible(data, torch.tensor([TOKENS - 2, TOKENS - 1]), HEADS), scale=0.25)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_a_merge_is_of_whole_rows(cache: PagedCache) -> None:
    into, weight = torch.full((1, TOKENS), -1), torch.ones(1, TOKENS)
    into[0, 3], weight[0, 3] = 2, 3.0
    keep = torch.ones(1, TOKENS, dtype=torch.bool)
    keep[0, 3] = False
    with pytest.raises(IllegalEdit, match="Merge of values alone: the value of a latent is part of its key"):
        edit(cache, Merge(into, weight), Evict(keep))
    edit(cache, Merge(into, weight, values_only=False), Evict(keep))
    expected = (ROWS[0, 0, 2] + 3 * ROWS[0, 0, 3]) / 4
    data = cache.layer(0, 0)
    torch.testing.assert_close(data.k[0, 2], expected)
    assert torch.equal(data.v[0, 2], data.k[0, 2, :DIM])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Quantize(4, 8), "key_bits as value_bits"),
        (Quantize(4, 4, key_axis="channel"), "key_axis 'token'"),
        (Quantize(4, 4, group=5), "group=5 does not divide the key dimension 16"),
        (
            LowRank(((0,),), None, None, (torch.ones(12, 2),), (torch.ones(2, 12),)),
            "trained low-rank projection already",
        ),
    ],
)
def test_what_would_part_key_and_value_is_refused(cache: PagedCache, wrong: object, message: str) -> None:
    with pytest.raises(IllegalEdit, match=message):
        edit(cache, wrong)
    assert torch.equal(cache.layer(0, 0).k, ROWS[0])
