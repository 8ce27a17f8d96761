"""Gemma 4: layers that read another's cache, and keys that are the values' own, normed and rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kvassay.replay.bytes import held
from kvassay.replay.lane import Lane
from tests.families import rules
from tests.families.arms import DENSE
from tests.families.conftest import Recorded
from tests.families.test_plain import EVICT, KEEP, SELECT
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch
from tests.replay.worlds import World

SHARING = pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
STORING, SHARED = (0, 1, 2, 3), {4: 2, 5: 3}
"""Of six layers, sliding and full in turn: those that store a cache, and which one the others read."""


def tokens(this: World, layer: int, length: int) -> int:
    """What a layer's newest query sees of `length` tokens."""
    return min(length, this.trace.layout.source(layer).window or length)


def row_bytes(this: World, layer: int) -> float:
    """Bytes of one token of the cache that a layer reads."""
    return this.trace.layout.source(layer).kv.elements * this.trace.layout.element_bytes


@SHARING
def test_a_shared_cache_is_recorded_and_held_once_and_read_by_all(
    family: str, recorded: Recorded, watch: Watch
) -> None:
    this = recorded(family)
    trace, layers = this.trace, set[frozenset[int]]()
    assert {layer.index: layer.cache_of for layer in trace.layout.layers if layer.cache_of is not None} == SHARED
    for layer in range(6):
        assert set(trace.shapes[f"prefix/layer_{layer:03d}.safetensors"]) == ({"q"} if layer in SHARED else set("kvq"))
    watch.each = lambda lane: layers.add(frozenset(held(lane).layers))
    (row,) = watch.run(this, [DENSE])
    assert {layer for group in watch.replay.groups for layer in group.layers} == set(STORING)
    lengths = range(trace.prefix.tokens + 1, trace.prefix.tokens + trace.branches[0].tokens)
    assert row.retained_bytes == sum(tokens(this, i, lengths[-1]) * row_bytes(this, i) for i in STORING)
    read = [sum(tokens(this, i, length) * row_bytes(this, i) for i in range(6)) for length in lengths]
    assert row.read_bytes == sum(read) / len(lengths)
    assert layers == {frozenset(STORING)}


class OwnerAlone(Oracle):
    """What the logits would be if a decision stopped at the layer that stores the cache."""

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> Tensor:
        owner = self.layout.source(index).index
        alive = self.alive[owner]
        if owner != index:
            self.alive[owner] = torch.ones_like(alive)
        out = super().attend(index, q, k, v, given)
        if owner != index:
            self.alive[owner] = alive
        return out


@SHARING
def test_a_decision_is_taken_once_and_holds_for_all_readers(family: str, recorded: Recorded, watch: Watch) -> None:
    this = recorded(family)
    scopes = set[frozenset[int]]()
    watch.each = lambda lane: scopes.add(lane.scope)
    watch.run(this, [DENSE, EVICT])
    found, answers = watch.logits[EVICT.label, 0].double(), []
    for kind in (Oracle, OwnerAlone):
        oracle = kind(this)
        rules.snapkv(this, oracle, KEEP, window=4, kernel=3)
        answers.append(oracle.answer(this.trace.branches[0]))
    assert scopes == {frozenset({1, 3})}
    torch.testing.assert_close(found, answers[0], rtol=0, atol=1e-3)
    assert float((found - answers[1]).abs().max()) > 0.01


@SHARING
def test_every_reader_selects_by_its_own_query(family: str, recorded: Recorded, watch: Watch) -> None:
    this, chosen = recorded(family), dict[int, Any]()

    def each(lane: Lane) -> None:
        if lane.arm is SELECT:
            chosen.update({layer: read.index.sort().values for layer, read in lane.previous.items()})

    watch.each = each
    watch.run(this, [DENSE, SELECT])
    assert set(chosen) == {1, 3, 5}
    assert not torch.equal(chosen[3], chosen[5])


@pytest.mark.parametrize(("family", "tied"), [("gemma4", ()), ("gemma4_k_eq_v", (3,)), ("gemma4_unified", (1, 3))])
def test_tied_keys_and_values_are_both_held(family: str, tied: tuple[int, ...], recorded: Recorded) -> None:
    """The key is the value times the key norm's weight, rotated: an engine holds both, and so do trace and cache."""
    this = recorded(family)
    text = this.loaded.model.get_decoder()
    for layer in this.trace.layout.storing:
        attention = text.layers[layer.index].self_attn
        assert (attention.v_proj is None) == (layer.index in tied)
        k, v = this.trace.prefix.k(layer.index), this.trace.prefix.v(layer.index)
        assert k.shape == v.shape and not torch.allclose(k, v)
        at = torch.arange(len(k))[None]
        cos, sin = text.rotary_emb(k, at, this.loaded.model.config.layer_types[layer.index])
        turned = rotated(v * attention.k_norm.weight.detach(), cos[0, :, None], sin[0, :, None])
        assert torch.allclose(k, turned, atol=1e-5) == (layer.index in tied)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves of [tokens, heads, dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
