"""Methods that encode: mixed widths per head and channel (as RDKV allots them), and low rank with an offline fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Decision, LowRank, Quantize
from kvassay.policy.base import Artefact, Calibration, Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Approximates, Card, Effect, Evidence, When
from kvassay.policy.registry import make
from kvassay.policy.views import CacheView, LayerView
from kvassay.replay.arms import Arm
from tests.replay.oracle import Oracle, code, turn
from tests.replay.watch import Watch
from tests.replay.worlds import World, fed

SINK, RECENT = 4, 16
PROTECTION = Protection(SINK, RECENT)
DENSE = Arm(make("dense"), None, PROTECTION)
WIDTHS = (0, 2, 4, 8, 16)
BOTH = frozenset({Approximates.KEYS, Approximates.VALUES})


def value_width(layer: int, head: int, position: int) -> int:
    """A made-up allotment that differs per layer and head; head 1 drops twice as much."""
    return (0, 2, 4, 8, 16, 8, 4, 0 if head else 2, 4, 2)[(7 * position + 3 * head + layer) % 10]


def channel_width(layer: int, head: int, channel: int) -> int:
    return WIDTHS[(channel + 3 * head + layer) % 5]


def value_widths(layer: LayerView) -> Tensor:
    heads = range(layer.kv_heads)
    return torch.tensor([[value_width(layer.index, h, p) for p in layer.positions[h].tolist()] for h in heads])


@dataclass(frozen=True)
class MixedBits(Policy):
    """Every unprotected token and every key channel at a width of its own, per head; 0 drops it."""

    group: int | None = None

    card: ClassVar[Card] = Card(
        name="mixed-bits",
        effects=frozenset({Effect.QUANTIZE}),
        source="test",
        summary="ragged mixed widths per head and channel",
        approximates=BOTH,
        budgets=frozenset({"bytes"}),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        edits = {}
        for index, layer in cache.layers.items():
            dim = layer.layer.kv.k_dim
            channels = [[channel_width(index, h, c) for c in range(dim)] for h in range(layer.kv_heads)]
            edits[index] = [
                Quantize(
                    value_widths(layer),
                    torch.tensor(channels),
                    key_axis="channel",
                    group=self.group,
                    tokens=~layer.protected,
                )
            ]
        return Decision(edits)


def chunks(row: Tensor, group: int | None) -> tuple[Tensor, ...]:
    return row.split(group or len(row))


def coded(row: Tensor, bits: int, group: int | None) -> Tensor:
    return row.double() if bits == 16 else torch.cat([code(part, bits) for part in chunks(row, group)])


def coded_bytes(length: int, bits: int, group: int | None, element: float) -> float:
    """Packed bits in whole bytes and 4 bytes of scale and zero per chunk; 4 bytes say which row it is."""
    if bits == 16:
        return length * element + 4
    return 4 + sum(-(-len(part) * bits // 8) + 4 for part in chunks(torch.zeros(length), group))


@pytest.mark.parametrize("group", [None, 8])
@pytest.mark.parametrize("world", ["llama", "gemma", "gemma_mqa"], indirect=True)
def test_ragged_mixed_widths_per_head_and_channel(world: World, watch: Watch, group: int | None) -> None:
    arm = Arm(MixedBits(group), Budget("bytes", 0.5), PROTECTION)
    rows = watch.run(world, [DENSE, arm])
    raw, encoded = 0.0, 0.0
    oracle = Oracle(world)
    coded_span = range(SINK, oracle.context - RECENT)
    for layer in oracle.full:
        before = encoded
        element, dim = world.trace.layout.element_bytes, oracle.k[layer].shape[2]
        for head in range(len(oracle.k[layer])):
            widths = {p: value_width(layer, head, p) for p in coded_span}
            held = [p for p in coded_span if widths[p]]
            oracle.alive[layer][head, [p for p in coded_span if not widths[p]]] = False
            for p in held:
                oracle.v[layer][head, p] = coded(oracle.v[layer][head, p].float(), widths[p], group)
                encoded += coded_bytes(dim, widths[p], group, element)
            for channel in range(dim):
                bits = channel_width(layer, head, channel)
                column = oracle.k[layer][head, held, channel].float()
                oracle.k[layer][head, held, channel] = coded(column, bits, group) if bits else 0.0
                encoded += coded_bytes(len(held), bits, group, element) if bits else 0.0
        encoded = before + round(encoded - before)
        raw += len(oracle.k[layer]) * 2 * dim * element  # bytes of one raw token
    for index, branch in enumerate(world.trace.branches):
        expected = fresh(oracle).answer(branch)
        torch.testing.assert_close(watch.logits[arm.label, index].double(), expected, rtol=0, atol=1e-3)
        assert float((watch.logits["dense", index].double() - expected).abs().max()) > 0.1
        (row,) = [row for row in rows if row.arm == arm.label and row.branch == index]
        assert row.retained_bytes_scope == (SINK + RECENT + fed(index)) * raw + encoded


def fresh(oracle: Oracle) -> Oracle:
    """The same compressed context again, for another question."""
    again = object.__new__(Oracle)
    again.__dict__ = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(oracle).items()}
    return again


@dataclass(frozen=True)
class FullBasis(Policy):
    """Keys before rotation and values of all heads on one basis per layer, from calibration text."""

    rank: float = 1.0

    card: ClassVar[Card] = Card(
        name="basis",
        effects=frozenset({Effect.LOW_RANK}),
        source="test",
        summary="low rank of all heads together, fitted offline",
        when=frozenset({When.OFFLINE, When.AFTER_PREFILL}),
        evidence=frozenset({Evidence.KEYS_UNROTATED, Evidence.VALUES}),
        approximates=BOTH,
        budgets=frozenset(),
    )

    def fit(self, source: Calibration) -> Artefact:
        found = {}
        for index, layer in source.layers():
            for side, rows in (("k", layer.keys_unrotated), ("v", layer.values)):
                flat = rows.transpose(0, 1).flatten(1)
                kept = int(self.rank * flat.shape[1])
                found[f"{side}{index}"] = torch.linalg.svd(flat, full_matrices=False).Vh[:kept]
        return Artefact(found, source.sha256)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        assert memory.artefact is not None
        found = memory.artefact.tensors
        edits = {}
        for i, layer in cache.layers.items():
            k, v = found[f"k{i}"], found[f"v{i}"]
            all_heads = (tuple(range(layer.kv_heads)),)
            edits[i] = [LowRank(all_heads, (k.T,), (k,), (v.T,), (v,), domain="pre_rope")]
        return Decision(edits)


def projected(world: World, rank: float) -> Oracle:
    """By hand, in float64: the basis from the calibration trace, the rotation with complex numbers."""
    oracle = Oracle(world)
    for layer in oracle.full:
        rope = world.trace.layout.layers[layer].rope
        assert rope is not None and rope.kind == "default"
        learnt = world.calibration.prefix
        for side, held in (("k", oracle.k), ("v", oracle.v)):
            text = getattr(learnt, side)(layer).transpose(0, 1).double()
            rows = held[layer]
            if side == "k":
                text = turn(text, torch.arange(text.shape[1]), rope.theta, -1)
                rows = turn(rows, torch.arange(rows.shape[1]), rope.theta, -1)
            flat = text.transpose(0, 1).flatten(1)
            basis = torch.linalg.svd(flat, full_matrices=False).Vh[: int(rank * flat.shape[1])]
            back = (rows.transpose(0, 1).flatten(1) @ basis.T @ basis).unflatten(1, (len(rows), -1)).transpose(0, 1)
            held[layer] = turn(back, torch.arange(back.shape[1]), rope.theta, 1) if side == "k" else back
    return oracle


@pytest.mark.parametrize("world", ["llama", "gemma", "gemma_mqa"], indirect=True)
def test_low_rank_fitted_offline_before_rotation(world: World, watch: Watch) -> None:
    arms = [DENSE, *(Arm(p, None, PROTECTION) for p in (FullBasis(), FullBasis(0.5), make("svd", rank=0.5)))]
    rows = watch.run(world, arms, calibration=world.calibration)
    for index, branch in enumerate(world.trace.branches):
        dense = watch.logits["dense", index].double()
        whole, half = watch.logits["basis", index].double(), watch.logits["basis(rank=0.5)", index].double()
        torch.testing.assert_close(whole, dense, rtol=0, atol=1e-4)
        torch.testing.assert_close(half, projected(world, 0.5).answer(branch), rtol=0, atol=1e-3)
        torch.testing.assert_close(watch.logits["svd", index].double(), half, rtol=0, atol=1e-3)
        assert float((half - dense).abs().max()) > 0.1
    layout = world.trace.layout
    raw = sum(layer.kv.elements for layer in layout.layers if layer.window is None) * layout.element_bytes
    held = [(world.trace.prefix.tokens / 2 + fed(branch)) * raw for branch in (0, 1)]
    assert [row.retained_bytes_scope for row in rows if row.arm == "basis(rank=0.5)"] == held
