"""Methods that select what a query reads: large blocks on a small-block cache, lists per KV head or per query head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Card, Effect, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.registry import make
from kvassay.policy.views import BlockView, LayerView
from kvassay.replay.arms import Arm
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch
from tests.replay.worlds import World, fed

DENSE = Arm(make("dense"), None, Protection(0, 0))


@dataclass(frozen=True)
class MeanKeyBlocks(Policy):
    """The blocks of `unit` tokens whose mean key fits the query best, and always the one still filling.

    heads: "kv" or "q", whose list each is
    """

    unit: int = 128
    heads: str = "kv"

    card: ClassVar[Card] = Card(
        name="mean-key",
        effects=frozenset({Effect.SELECT}),
        source="test",
        summary="block lists by mean key",
        when=frozenset({When.BLOCK_FULL, When.EVERY_STEP}),
        unit="block",
        budgets=frozenset({"read_tokens"}),
    )

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        return {"mean": block.keys.mean(2)}

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        small = layer.side_data("mean").transpose(0, 1)
        per = self.unit // layer.block_size
        whole = small.shape[1] // per
        means = small[:, : whole * per].unflatten(1, (whole, per)).mean(2)
        filling = int(layer.slots.max()) // self.unit
        score = means @ query.unflatten(0, (layer.kv_heads, -1)).squeeze(2).mT
        score = score.sum(2) if self.heads == "kv" else score.mT.flatten(0, 1)
        take = budget.tokens // self.unit - 1
        best = score[:, :filling].topk(take, dim=1).indices
        index = torch.cat([best, torch.full((len(best), 1), filling)], 1)
        return ReadSet(index[None], unit=self.unit)


class ByHand:
    """The same rule over plain keys; counts what is read."""

    def __init__(self, unit: int, heads: str, blocks: int) -> None:
        self.unit, self.heads, self.blocks = unit, heads, blocks
        self.read: list[float] = []
        """Tokens per KV head, the union over its query heads, of each step and layer."""
        self.chosen: set[tuple[int, ...]] = set()

    def __call__(self, oracle: Oracle, layer: int, q: Tensor) -> Tensor | None:
        if layer not in oracle.full:
            return None
        k = oracle.k[layer]
        kv_heads, group = len(k), len(q) // len(k)
        last = (oracle.length - 1) // self.unit
        lists = []
        for head in range(len(q)):
            own = k[head // group]
            means = [own[b * self.unit : (b + 1) * self.unit].mean(0) for b in range(last)]
            query = q[head] if self.heads == "q" else q.view(kv_heads, group, -1)[head // group].sum(0)
            order = sorted(range(last), key=lambda b: -float(means[b] @ query))
            lists.append(sorted([*order[: self.blocks - 1], last]))
        allowed = torch.zeros(len(q), k.shape[1], dtype=torch.bool)
        for head, blocks in enumerate(lists):
            for b in blocks:
                allowed[head, b * self.unit : (b + 1) * self.unit] = True
        self.chosen.update(map(tuple, lists))
        self.read.append(float(allowed.view(kv_heads, group, -1).any(1).sum()) / kv_heads)
        return allowed


@pytest.mark.parametrize("heads", ["kv", "q"])
@pytest.mark.parametrize(
    ("world", "unit", "blocks"),
    [("llama", 128, 2), ("llama", 16, 5), ("gemma", 32, 2), ("gemma_mqa", 32, 3)],
    indirect=["world"],
)
def test_block_lists_per_head(world: World, watch: Watch, unit: int, blocks: int, heads: str) -> None:
    arm = Arm(MeanKeyBlocks(unit, heads), Budget("read_tokens", unit * blocks), Protection(0, 0))
    rows = watch.run(world, [DENSE, arm])
    for index, branch in enumerate(world.trace.branches):
        oracle, rule = Oracle(world), ByHand(unit, heads, blocks)
        oracle.select = rule
        answer = oracle.answer(branch)
        torch.testing.assert_close(watch.logits[arm.label, index].double(), answer, rtol=0, atol=1e-4)
        assert float((watch.logits["dense", index].double() - answer).abs().max()) > 0.1
        assert len(rule.chosen) > 1
        (row,) = [row for row in rows if row.arm == arm.label and row.branch == index]
        fed = rule.read[: -len(oracle.full)]  # the last answer token is never fed
        assert row.selected_tokens == pytest.approx(mean(fed), abs=1e-9)
        assert row.retained_fraction > 1  # selection keeps everything, and its summaries beside


def test_summarising_is_charged_the_keys_it_reads(llama: World, watch: Watch) -> None:
    arm = Arm(make("locks"), Budget("read_tokens", 96), Protection(0, 0))
    rows = watch.run(llama, [DENSE, arm])
    layout = llama.trace.layout
    for row in rows:
        blocks = (llama.trace.prefix.tokens + fed(row.branch)) // 16
        kv = layout.layers[0].kv
        keys = blocks * 16 * kv.kv_heads * kv.k_dim * len(layout.layers) * layout.element_bytes
        assert row.policy_bytes == (keys if row.arm == arm.label else 0)


def test_what_growing_layers_read_is_told_apart_from_the_windows(gemma: World, watch: Watch) -> None:
    arm = Arm(make("exact_mass"), Budget("read_tokens", 64), Protection(0, 0))
    rows = watch.run(gemma, [DENSE, arm])
    layout, context = gemma.trace.layout, gemma.trace.prefix.tokens
    for index in range(len(gemma.trace.branches)):
        dense, mine = (next(r for r in rows if (r.branch, r.arm) == (index, a.label)) for a in (DENSE, arm))
        seen = mean(range(context + 1, context + 1 + fed(index)))
        per_token = [layer.kv.elements * layout.element_bytes for layer in layout.layers]
        windows = sum(min(layer.window, seen) * per_token[layer.index] for layer in layout.layers if layer.window)
        full = sum(seen * per_token[layer.index] for layer in layout.layers if not layer.window)
        assert dense.read_bytes_growing == pytest.approx(full)
        assert dense.read_bytes - dense.read_bytes_growing == pytest.approx(windows)
        assert mine.read_bytes_growing < dense.read_bytes_growing
        assert mine.read_bytes - mine.read_bytes_growing == pytest.approx(windows)
