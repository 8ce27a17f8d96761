"""Every built-in policy under every law, at every step; a budget that covers all leaves everything as it is."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kvassay.policy.base import Policy
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.card import Effect, Prefill
from kvassay.policy.registry import BUILT_IN, make
from kvassay.replay.arms import Arm, grid
from kvassay.replay.lane import Lane
from tests.replay.watch import Watch
from tests.replay.worlds import World

PROTECTION = Protection(4, 16)
SMALL = {
    "snapkv": {"window": 16},
    "pyramidkv": {"window": 16},
    "adakv-snapkv": {"window": 16},
    "think": {"prune": 0.75},
    "kivi": {"group": 16, "residual": 32},
    "quest": {"dense_layers": 0},
    "m3-exact-mass": {"block": 16, "dense_layers": 0},
    "m3-distilled": {"block": 16, "dense_layers": 0},
    "rdkv": {"window": 16},
    "selkv": {"window": 16},
    "kara": {"interval": 4},
    "kvpress": {"options": "window_size=16"},
    "kvpress-critical": {"options": "window_size=16"},
    "epikv-uncal": {"reading": "generated"},
    "epikv": {"reading": "generated", "tokens": 100},
}
NAMES = list(BUILT_IN)
PROMPT_STAYS = {"kara", "epikv-uncal", "epikv"}
WHILE_DECODING = {"paged-eviction", "r-kv"}
TOKENS = {"keep_tokens", "read_tokens"}


def built_in(name: str) -> Policy:
    return make(name, **SMALL.get(name, {}))


def half(policy: Policy) -> list[Arm]:
    """The policy at half of what its unit counts."""
    if "per_window" in policy.card.budgets:  # a window as short as the answers, of which nothing is protected
        return [Arm(policy, Budget("per_window", 0.5), Protection(4, 0))]
    if policy.card.name in ("epikv-uncal", "epikv"):  # a few generated tokens: it never touches the prompt
        return [Arm(policy, Budget("keep_tokens", 8), Protection(4, 0))]
    unit = "bytes" if policy.card.budgets == {"bytes"} else "keep_tokens"
    return grid([policy], [Budget(unit, 0.5)], PROTECTION)


@pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
def test_every_built_in_policy_at_every_step(world: World, watch: Watch) -> None:
    arms = [arm for name in NAMES for arm in half(built_in(name))]
    arms.append(Arm(make("fp8"), None, PROTECTION, prefill=Prefill.OWN))
    windows = {layer.index: layer.window for layer in world.trace.layout.layers if layer.window is not None}

    def each(lane: Lane) -> None:
        for layer, window in windows.items():
            positions = lane.cache.layer(lane.seq, layer).positions
            assert positions.tolist() == [list(range(max(0, lane.length - window), lane.length))] * len(positions)
            assert lane.cache.is_plain(lane.seq, layer)

    watch.each = each
    rows = watch.run(world, arms, free=4, calibration=world.calibration)
    assert {row.arm.split()[0].split("(")[0] for row in rows} == set(NAMES)
    assert all(math.isfinite(row.nll) and math.isfinite(row.kl) and row.generated_tokens == 4 for row in rows)
    assert all(torch.isfinite(x).all() for x in watch.logits.values())
    assert watch.steps > 40
    for row in rows:
        policy = next(arm.policy for arm in arms if arm.label == row.arm)
        if policy.card.effects & {Effect.QUANTIZE, Effect.LOW_RANK, Effect.EVICT}:
            assert row.kl > 0
            assert row.retained_fraction_scope < 0.75 or policy.card.name in PROMPT_STAYS
        if Effect.SELECT in policy.card.effects:
            assert row.retained_fraction_scope >= 1 and row.kl > 0


@pytest.mark.parametrize("name", ["rdkv", "snapkv"])
def test_what_evicts_decides_once_when_its_own_prefill_is_through(llama: World, watch: Watch, name: str) -> None:
    """It then does what it does to a shared prefill, chunks or not: the context was read densely."""
    shared = half(built_in(name))[0]
    own = dataclasses.replace(shared, prefill=Prefill.OWN)
    watch.run(llama, [Arm(make("dense"), None, PROTECTION), shared, own])
    for branch in range(len(llama.trace.branches)):
        one, other = (watch.logits[arm.label, branch] for arm in (shared, own))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
        assert float((one - watch.logits["dense", branch]).abs().max()) > 1e-2


@pytest.mark.parametrize("amount", [1.0, 404, 5000])
def test_a_budget_of_everything_or_more_changes_no_bit(llama: World, watch: Watch, amount: float) -> None:
    policies = [
        p for p in map(built_in, NAMES) if p.card.effects & {Effect.EVICT, Effect.SELECT} and p.card.budgets & TOKENS
    ]
    assert len(policies) >= 10
    arms = [Arm(make("dense"), None, PROTECTION), *grid(policies, [Budget("keep_tokens", amount)], PROTECTION)]
    lanes = 0

    def each(lane: Lane) -> None:
        nonlocal lanes
        lanes += 1
        if amount == 404 and lane.policy.card.name in WHILE_DECODING and lane.length > 404:
            return  # they decide while decoding, when 404 tokens are less than there is
        for layer in lane.layers:
            data = lane.cache.layer(lane.seq, layer)
            assert data.positions.tolist() == [list(range(lane.length))] * len(data.positions)
            assert lane.cache.is_plain(lane.seq, layer)
            assert torch.equal(data.k[:, :404], llama.trace.prefix.k(layer).transpose(0, 1))
            assert torch.equal(data.v[:, :404], llama.trace.prefix.v(layer).transpose(0, 1))

    watch.each, watch.proving = each, False
    rows = watch.run(llama, arms, calibration=llama.calibration)
    assert lanes > 100
    for row in rows:
        if not (amount == 404 and row.arm.split()[0].split("(")[0] in WHILE_DECODING):
            dense = watch.logits["dense", row.branch]
            torch.testing.assert_close(watch.logits[row.arm, row.branch], dense, rtol=0, atol=1e-5)
