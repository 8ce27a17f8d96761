"""Uncommitted tokens: no edit reads or writes them, and a rollback leaves cache and policy state as they were."""

from __future__ import annotations

import pytest
import torch

from kvassay.cache.edits import Bias, Decision, Evict, Quantize
from kvassay.cache.ops import group_specs
from kvassay.cache.paged import PagedCache
from kvassay.errors import IllegalEdit
from tests.replay.watch import contents, prove, same
from tests.replay.worlds import World

DRAFT = 5


def speculating(world: World) -> tuple[PagedCache, int, dict[int, tuple[torch.Tensor, ...]]]:
    """The recorded context, fp8 in its first half, and then `DRAFT` uncommitted tokens; with what was before them."""
    layout, prefix, branch = world.trace.layout, world.trace.prefix, world.trace.branches[0]
    cache = PagedCache(layout, group_specs(layout, 16), 400, poison=True)
    seq, _ = cache.create([])
    layers = [layer.index for layer in layout.layers]
    full = [layer.index for layer in layout.layers if layer.window is None]
    cache.extend(seq, prefix.token_ids.tolist())
    for layer in layers:
        cache.write(layer, [seq], *(x(layer).transpose(0, 1)[None] for x in (prefix.k, prefix.v)))
    half = torch.arange(prefix.tokens) < prefix.tokens // 2
    cache.apply(seq, Decision({layer: [Quantize(8, 8, number="fp8_e4m3", tokens=half)] for layer in full}))
    before = contents(cache, seq)
    cache.extend(seq, branch.token_ids[:DRAFT].tolist(), committed=False)
    for layer in layers:
        cache.write(layer, [seq], *(x(layer)[:DRAFT].transpose(0, 1)[None] for x in (branch.k, branch.v)))
    return cache, seq, before


@pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
def test_rollback_restores_every_bit(world: World) -> None:
    cache, seq, before = speculating(world)
    length = world.trace.prefix.tokens
    full = [layer.index for layer in world.trace.layout.layers if layer.window is None]
    assert cache.ledger.uncommitted(seq) == DRAFT
    for layer in full:
        data = cache.layer(seq, layer)
        assert data.positions[0, -DRAFT:].tolist() == list(range(length, length + DRAFT))
    cache.check()
    cache.ledger.rollback(seq, DRAFT)
    prove(cache)
    assert same(contents(cache, seq), before)
    # The same positions are given again, to other tokens.
    cache.extend(seq, [1])
    branch = world.trace.branches[1]
    for layer in world.trace.layout.layers:
        k, v = (x(layer.index)[:1].transpose(0, 1)[None] for x in (branch.k, branch.v))
        cache.write(layer.index, [seq], k, v)
        assert torch.equal(cache.layer(seq, layer.index).k[:, -1], k[0, :, 0])
        assert int(cache.layer(seq, layer.index).positions[0, -1]) == length
    prove(cache)


def test_no_edit_touches_uncommitted_tokens(llama: World) -> None:
    cache, seq, _ = speculating(llama)
    length = llama.trace.prefix.tokens
    positions = cache.layer(seq, 1).positions
    drafted = positions >= length
    held = contents(cache, seq)
    for edit, words in (
        (Evict(~drafted), "drops 10 uncommitted tokens"),
        (Quantize(4, 4, tokens=drafted), "uncommitted"),
        (Bias(drafted.float()), "uncommitted"),
    ):
        with pytest.raises(IllegalEdit, match=words):
            cache.apply(seq, Decision({1: [edit]}))
    with pytest.raises(IllegalEdit, match=r"5 uncommitted tokens: .*slot reuse"):
        cache.apply(seq, Decision(reuse=3))
    assert same(contents(cache, seq), held)
    # What an edit without a scope encodes is what is committed and raw.
    cache.apply(seq, Decision({1: [Quantize(4, 4)]}))
    encoded = cache.layer(seq, 1).encoded
    assert encoded is not None and torch.equal(encoded, ~drafted)
    cache.ledger.rollback(seq, DRAFT)
    prove(cache)
    assert cache.layer(seq, 1).positions.tolist() == [list(range(length))] * 2
