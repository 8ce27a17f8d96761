"""A value merge with a per-slot bias, as SelKV does it: written on copies, while the dense sibling stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Edit, Evict, Merge, Quantize
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Protection
from kvassay.policy.card import Approximates, Card, Effect
from kvassay.policy.registry import make
from kvassay.policy.views import CacheView, LayerView
from kvassay.replay.arms import Arm
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch, contents
from tests.replay.worlds import World

SINK, RECENT = 4, 16
DENSE = Arm(make("dense"), None, Protection(SINK, RECENT))


def stays(head: int, position: int, length: int) -> bool:
    """One token in three stays, others in each head; and what is protected."""
    return position < SINK or position >= length - RECENT or (position + head) % 3 == 0


def weight(position: int) -> float:
    return 1.0 + position % 4


@dataclass(frozen=True)
class FoldBack(Policy):
    """Each token that leaves is folded into the one before it that stays; its logit gains log(count).

    values_only: keys are left alone; encode: what stays is then moved to a 16-bit segment
    """

    values_only: bool = True
    encode: bool = False

    card: ClassVar[Card] = Card(
        name="fold-back",
        effects=frozenset({Effect.MERGE, Effect.EVICT, Effect.QUANTIZE}),
        source="test",
        summary="merges values and weighs the slot",
        approximates=frozenset(Approximates),
        budgets=frozenset(),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        return Decision({index: self.edits(layer, cache.length) for index, layer in cache.layers.items()})

    def edits(self, layer: LayerView, length: int) -> list[Edit]:
        rows = layer.positions.tolist()
        keep = torch.tensor([[stays(h, p, length) for p in row] for h, row in enumerate(rows)])
        index = torch.arange(layer.tokens).expand_as(keep)
        into = index.masked_fill(~keep, -1).cummax(1).values.masked_fill(keep, -1)
        count = torch.ones(keep.shape).scatter_add_(1, into.clamp(min=0), (into >= 0).float())
        weights = torch.tensor([[weight(p) for p in row] for row in rows])
        found: list[Edit] = [Merge(into, weights, self.values_only), Bias(count.log()), Evict(keep)]
        return [*found, Quantize(16, 16, tokens=keep)] if self.encode else found


def folded(world: World, values_only: bool) -> Oracle:
    oracle = Oracle(world)
    length = oracle.context
    for layer in oracle.full:
        for head in range(len(oracle.k[layer])):
            groups: list[list[int]] = []
            for position in range(length):
                if stays(head, position, length):
                    groups.append([])
                groups[-1].append(position)
            for target, *others in groups:
                members = [target, *others]
                w = torch.tensor([weight(p) for p in members], dtype=torch.float64)[:, None]
                for side in (oracle.v,) if values_only else (oracle.v, oracle.k):
                    side[layer][head, target] = (w * side[layer][head, members]).sum(0) / w.sum()
                oracle.bias[layer][head, target] = torch.tensor(float(len(members))).log()
                oracle.alive[layer][head, others] = False
    return oracle


@pytest.mark.parametrize("policy", [FoldBack(), FoldBack(encode=True), FoldBack(values_only=False)], ids=str)
@pytest.mark.parametrize("world", ["llama", "gemma", "gemma_mqa"], indirect=True)
def test_merge_with_bias_writes_on_copies(world: World, watch: Watch, policy: FoldBack) -> None:
    watch.run(world, [DENSE, Arm(policy, None, DENSE.protection)])
    for index, branch in enumerate(world.trace.branches):
        mine = watch.logits[policy.label, index].double()
        torch.testing.assert_close(mine, folded(world, policy.values_only).answer(branch), rtol=0, atol=1e-4)
        assert float((watch.logits["dense", index].double() - mine).abs().max()) > 0.1
    for layer, (positions, k, v) in contents(watch.replay.cache, watch.replay.dense).items():
        first = int(positions[0, 0])
        assert torch.equal(k, world.trace.prefix.k(layer)[first:].transpose(0, 1))
        assert torch.equal(v, world.trace.prefix.v(layer)[first:].transpose(0, 1))


def test_a_bias_before_the_soft_cap_is_capped_and_one_after_it_is_not() -> None:
    from kvassay.cache.data import LayerData
    from kvassay.cache.ops import GroupSpec
    from kvassay.cache.paged import PagedCache
    from kvassay.kernels.reference import attention_weights, visible
    from kvassay.layout.model import KV, Component, Layer, Layout

    layer = Layer(0, 1, (Component(KV(1, 2, 2)),), scale=1.0, softcap=2.0)
    query = torch.tensor([[[1.0, 0.0]]])
    keys = torch.tensor([[[[3.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]]])
    for before, logits in ((True, [3.0, 1.0 + 5.0, -1.0]), (False, [3.0, 1.0, -1.0])):
        cache = PagedCache(Layout("tiny", (layer,), 2, 2, 64), [GroupSpec(0, (0,), (1,), 4)], 8, poison=True)
        seq, _ = cache.create([])
        cache.extend(seq, [1, 2, 3])
        cache.write(0, [seq], keys, keys)
        cache.apply(seq, Decision({0: [Bias(torch.tensor([[0.0, 5.0, 0.0]]), before_softcap=before)]}))
        child = cache.fork(seq)
        cache.free(seq)
        capped = 2 * torch.tanh(torch.tensor(logits) / 2) + torch.tensor([0.0, 0.0 if before else 5.0, 0.0])
        views: list[LayerData] = [cache.layer(child, 0)]
        for stored in (cache.stored(child, 0), views[0].stored):
            seen = visible(stored, torch.tensor([2]), 1)
            found = attention_weights(query, stored, seen, scale=1.0, softcap=2.0)
            torch.testing.assert_close(found[0, 0], capped.softmax(0))
