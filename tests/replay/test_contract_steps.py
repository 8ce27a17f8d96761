"""Methods that act at every step: slot reuse decided from hidden states (EpiKV), a window that compacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvassay.cache.edits import Decision, Evict
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance, Protection
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.registry import make
from kvassay.policy.views import CacheView, StepView
from kvassay.replay.arms import Arm
from kvassay.replay.lane import Lane
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch
from tests.replay.worlds import World, fed

WORLDS = pytest.mark.parametrize("world", ["llama", "gemma", "gemma_mqa"], indirect=True)
DENSE = Arm(make("dense"), None, Protection(0, 0))
FED = (fed(0), fed(1))
DECAY, KEEP = 0.8, 6


@dataclass(frozen=True)
class Episodes(Policy):
    """Keep the whole context and `KEEP` later tokens; the least surprising one gives its slot to the next token.

    Surprise: how much the hidden state turns between two layers, fading with age.
    """

    card: ClassVar[Card] = Card(
        name="episodes",
        effects=frozenset({Effect.EVICT}),
        source="test",
        summary="one victim for all layers from hidden states, slot reused",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.HIDDEN}),
        taps=frozenset({1, 3}),
        budgets=frozenset(),
    )

    def observe(self, state: State, step: StepView) -> State:
        alive = next(iter(step.cache.layers.values())).positions[0]
        old = state.get("positions", torch.empty(0, dtype=torch.long))
        held = torch.isin(old, alive)
        surprise = 1 - cosine_similarity(step.hidden[1], step.hidden[3])
        return {
            "positions": torch.cat([old[held], torch.tensor(step.positions)]),
            "surprise": torch.cat([state.get("surprise", torch.empty(0))[held] * DECAY, surprise]),
        }

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        positions, surprise = memory.state["positions"], memory.state["surprise"]
        if len(positions) <= KEEP:
            return Decision()
        victim = int(positions[surprise.argmin()])
        return Decision({i: [Evict(layer.positions != victim)] for i, layer in cache.layers.items()}, reuse=victim)


class EpisodesByHand:
    """The same rule over the oracle's own float64 hidden states, with masks instead of slots."""

    def __init__(self) -> None:
        self.surprise: dict[int, float] = {}
        self.victims: list[int] = []

    def __call__(self, oracle: Oracle) -> None:
        a, b = oracle.hidden[1], oracle.hidden[3]
        self.surprise = {p: s * DECAY for p, s in self.surprise.items()}
        self.surprise[oracle.length - 1] = 1 - float(a @ b / (a.norm() * b.norm()))
        if len(self.surprise) > KEEP:
            victim = min(self.surprise, key=self.surprise.__getitem__)
            del self.surprise[victim]
            self.victims.append(victim)
            for layer in oracle.full:
                oracle.alive[layer][:, victim] = False


@WORLDS
def test_slot_reuse_for_all_layers_from_two_hidden_states(world: World, watch: Watch) -> None:
    context = world.trace.prefix.tokens
    full = [layer.index for layer in world.trace.layout.layers if layer.window is None]
    slots: list[list[int]] = []
    victims: list[int] = []
    left: dict[tuple[int, int], np.ndarray] = {}

    def each(lane: Lane) -> None:
        if lane.arm.label != "episodes":
            return
        ledger, newest = lane.cache.ledger, lane.length - 1
        groups = [group.index for group in ledger.groups if group.window is None]
        slots.append([ledger.used_slots(lane.seq, group) for group in groups])
        for layer in full:
            data = lane.cache.layer(lane.seq, layer)
            assert data.positions[:, :context].tolist() == [list(range(context))] * len(data.positions)
            assert torch.equal(data.k[:, :context], world.trace.prefix.k(layer).transpose(0, 1))
            if newest in data.positions[0] and (lane.seq, layer) in left:
                where = data.slots[:, data.positions[0] == newest].flatten()
                assert where.tolist() == left[lane.seq, layer].tolist()
        if lane.reuse is not None:
            victims.append(lane.reuse)
            for layer in full:
                found = ledger.slots(lane.seq, layer)
                assert lane.reuse not in found.positions
                table = next(t for t in ledger._sequences[lane.seq].tables if layer in t.group.layers)
                dead = np.argwhere(ledger._sequences[lane.seq].entries(table, layer) == ~lane.reuse)
                left[lane.seq, layer] = dead[:, 1]

    watch.each = each
    watch.run(world, [DENSE, Arm(Episodes(), None, DENSE.protection)])
    expected = []
    for index, branch in enumerate(world.trace.branches):
        oracle, rule = Oracle(world), EpisodesByHand()
        oracle.after = rule
        answer = oracle.answer(branch)
        torch.testing.assert_close(watch.logits["episodes", index].double(), answer, rtol=0, atol=1e-4)
        assert float((watch.logits["dense", index].double() - answer).abs().max()) > 0.01
        expected += rule.victims[: FED[index] - KEEP]
    assert victims == expected and len(set(victims)) > 5
    counts = [context + min(n, KEEP + 1) for total in FED for n in range(1, total + 1)]
    assert slots == [[n] * len(slots[0]) for n in counts]


@dataclass(frozen=True)
class RollingWindow(Policy):
    """Every `interval` tokens: only the first `sink` and last `window` tokens stay, packed to the front."""

    interval: int = 8
    sink: int = 4
    window: int = 60

    card: ClassVar[Card] = Card(
        name="rolling",
        effects=frozenset({Effect.EVICT}),
        source="test",
        summary="window that compacts every n tokens",
        when=frozenset({When.EVERY_N}),
        budgets=frozenset(),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        first = cache.length - self.window
        edits = {i: [Evict((x.positions < self.sink) | (x.positions >= first))] for i, x in cache.layers.items()}
        return Decision(edits, compact=True)


@WORLDS
def test_a_window_that_compacts_every_n_tokens(world: World, watch: Watch) -> None:
    policy = RollingWindow()
    held = policy.sink + policy.window
    seen: list[tuple[int, int, int]] = []
    """Tokens generated, blocks of the table, free blocks; of each pass, question by question."""

    def each(lane: Lane) -> None:
        if lane.arm.label != "rolling":
            return
        ledger = lane.cache.ledger
        full = [group for group in ledger.groups if group.window is None]
        tables = {len(ledger.table(lane.seq, group.index)) for group in full}
        assert len(tables) == 1
        seen.append((lane.generated, tables.pop(), ledger.pool.num_free))
        last = lane.generated - lane.generated % policy.interval + lane.allowance.context
        alive = list(range(lane.length))
        if lane.generated >= policy.interval:
            alive = [p for p in alive if p < policy.sink or p >= last - policy.window]
        for group in full:
            for layer in group.layers:
                positions = lane.cache.layer(lane.seq, layer).positions
                assert positions.tolist() == [alive] * len(positions)

    watch.each = each
    rows = watch.run(world, [DENSE, Arm(policy, None, DENSE.protection)])
    for index, branch in enumerate(world.trace.branches):
        oracle = Oracle(world)
        oracle.after = roll(policy)
        answer = oracle.answer(branch)
        torch.testing.assert_close(watch.logits["rolling", index].double(), answer, rtol=0, atol=1e-4)
        assert float((watch.logits["dense", index].double() - answer).abs().max()) > 0.1
    context, size = world.trace.prefix.tokens, watch.replay.protocol.block_size
    grown = [-(-(context + n) // size) for n in range(1, policy.interval)]
    packed = held // size
    cycle = [packed] + [packed + 1] * (policy.interval - 1)
    wanted = [*grown, *cycle, *cycle, *cycle]
    assert [blocks for _, blocks, _ in seen] == [wanted[generated - 1] for generated, _, _ in seen]
    # Fed until it acts, then the token after which it does.
    assert [generated for generated, _, _ in seen] == [6, 7, 8, 15, 16, 23, 24, 25, 6, 7, 8, 9]
    free = {generated: blocks for generated, _, blocks in seen[:8]}
    groups = sum(group.window is None for group in watch.replay.cache.ledger.groups)
    for at in (2 * policy.interval, 3 * policy.interval):
        assert free[at] - free[at - 1] >= groups  # the tail block of each full group went back to the pool
    assert all(row.policy_bytes > 0 for row in rows if row.arm == "rolling")
    for index, total in enumerate(FED):  # counted after the answer, of what dense then holds
        (mine,) = [row for row in rows if (row.arm, row.branch) == ("rolling", index)]
        (dense,) = [row for row in rows if (row.arm, row.branch) == ("dense", index)]
        assert mine.blocks_total == groups * -(-(context + total) // size)
        assert dense.blocks_total == groups * -(-context // size) and set(dense.blocks_freed.values()) == {0}
        assert mine.blocks_freed["compaction"] == mine.blocks_total - groups * wanted[total - 1]


def roll(policy: RollingWindow) -> object:
    def after(oracle: Oracle) -> None:
        if (oracle.length - oracle.context) % policy.interval == 0:
            for layer in oracle.full:
                oracle.alive[layer][:, policy.sink : oracle.length - policy.window] = False

    return after
