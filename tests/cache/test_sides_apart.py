"""A store with each side in memory of its own reads neighbouring slots where they lie, and nothing else differently."""

from __future__ import annotations

import torch

from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.layout.model import KV, Component, Layer, Layout

LAYOUT = Layout("one", (Layer(0, 2, (Component(KV(1, 4, 6)),), 0.5),), 8, 50, 1024)
SPEC = GroupSpec(0, (0,), (1,), 4)


def filled(apart: bool, gap: bool) -> tuple[PagedCache, int]:
    """A sequence of 22 tokens; with `gap` another one takes the blocks in its middle."""
    cache = PagedCache(LAYOUT, [SPEC], 40, poison=True, sides_apart=apart)
    seq, _ = cache.create([])
    other, _ = cache.create([])
    g = torch.Generator().manual_seed(0)
    for count in (10, 12):
        cache.extend(seq, [0] * count)
        cache.write(0, [seq], torch.randn(1, 1, count, 4, generator=g), torch.randn(1, 1, count, 6, generator=g))
        if gap:
            cache.extend(other, [0] * 9)
    return cache, seq


def test_rows_are_the_same_and_lie_where_they_were_written() -> None:
    for gap, runs in ((False, 1), (True, 2)):
        (one, seq), (two, same) = filled(True, gap), filled(False, gap)
        found, plain = one.stored(seq, 0), two.stored(same, 0)
        assert len(found.runs) == runs
        assert len(plain.runs) == 1
        assert torch.equal(torch.cat([run.k for run in found.runs], 1), plain.runs[0].k)
        assert torch.equal(torch.cat([run.v for run in found.runs], 1), plain.runs[0].v)
        assert torch.equal(one.layer(seq, 0).k, two.layer(same, 0).k)
        keys = one.store.keys(0)
        assert found.runs[0].k.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


def test_what_an_eviction_has_left_is_gathered_as_ever() -> None:
    (one, seq), (two, same) = filled(True, False), filled(False, False)
    for cache, which in ((one, seq), (two, same)):
        cache.ledger.evict_positions(which, 0, [torch.arange(3, 17).numpy().astype("int32")], allow_window=True)
    assert torch.equal(one.layer(seq, 0).k, two.layer(same, 0).k)
    assert torch.equal(one.layer(seq, 0).v, two.layer(same, 0).v)
    assert one.layer(seq, 0).positions.tolist() == [[0, 1, 2, *range(17, 22)]]
