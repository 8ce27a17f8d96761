"""Policies that are fed many known tokens at once answer, and are charged, as if these came one by one."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kvassay.policy.base import Policy
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import BUILT_IN, get, make
from kvassay.replay.arms import Arm
from kvassay.replay.lane import Lane
from tests.replay.test_contract_builtin import built_in
from tests.replay.watch import Watch
from tests.replay.worlds import World

TOGETHER = [name for name in BUILT_IN if get(name).reads_together]
LATER = [make("paged-eviction"), make("kivi", residual=16, group=8), make("r-kv", interval=24)]
"""Act on what is generated: every n tokens, or when a group is full."""
WALL = {"policy_seconds"}


def test_who_is_asked_so() -> None:
    assert set(TOGETHER) == {"exact_mass", "quest", "locks", "centroid", "m3-exact-mass", "m3-distilled"}


@pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
@pytest.mark.parametrize("protection", [Protection(4, 20), Protection(0, 0)], ids=["protected", "bare"])
def test_as_one_token_at_a_time(
    world: World, watch: Watch, protection: Protection, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[Policy] = [*(built_in(name) for name in TOGETHER), make("exact_mass", heads="q")]
    policies += [make("quest", dense_layers=0, block=32, heads="q"), make("locks", block=32, combine="peak")]
    arms = [Arm(make("dense"), None, protection)]
    arms += [Arm(policy, Budget("read_tokens", 128), protection) for policy in policies]
    arms += [Arm(policy, Budget("keep_tokens", 128) if policy.card.budgets else None, protection) for policy in LATER]
    at_once = watch.run(world, arms, free=3, calibration=world.calibration)
    logits, forwards = dict(watch.logits), watch.steps
    monkeypatch.setattr(Lane, "takes", lambda lane, tokens: min(1, tokens) if lane.arm.label != "dense" else tokens)
    one_by_one = watch.run(world, arms, free=3, calibration=world.calibration)
    assert watch.steps - forwards > forwards
    for key, expected in watch.logits.items():
        torch.testing.assert_close(logits[key], expected, rtol=0, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert any(not torch.equal(logits[arm.label, 0], logits["dense", 0]) for arm in arms)
    for mine, theirs in zip(at_once, one_by_one, strict=True):
        for field in fields(mine):
            if field.name not in WALL:
                found, expected = getattr(mine, field.name), getattr(theirs, field.name)
                same = found == (pytest.approx(expected, rel=1e-6, abs=1e-6) if isinstance(found, float) else expected)
                assert same, f"{mine.arm}, question {mine.branch}: {field.name} {found} is not {expected}"
