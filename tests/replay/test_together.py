"""Policies that are fed many known tokens at once answer, and are charged, as if these came one by one."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from kvassay.policy.base import Policy
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.card import When
from kvassay.policy.registry import BUILT_IN, get, make, parse
from kvassay.replay.arms import Arm
from kvassay.replay.lane import Lane
from tests.replay.test_contract_builtin import built_in
from tests.replay.watch import Watch
from tests.replay.worlds import QUESTION, World

TOGETHER = [name for name in BUILT_IN if get(name).reads_together]
LATER = [
    *(make("paged-eviction"), make("kivi", residual=16, group=8), make("r-kv", interval=24), make("kara", interval=24)),
    *(parse("quest(dense_layers=0)+kivi(residual=16, group=8)"), parse("exact_mass+int8"), parse("snapkv+int8")),
]
"""Act on what is generated: every n tokens, when a group is full, or as it is written."""
WALL = {"policy_seconds"}


def budget(policy: Policy) -> Budget | None:
    units = {"keep_tokens": 128.0, "read_tokens": 96.0, "per_window": 0.9}
    return next((Budget(unit, size) for unit, size in units.items() if unit in policy.card.budgets), None)


def test_dense_once_more_is_another_split(llama: World, watch: Watch) -> None:
    """Otherwise its distance to dense, which is the noise of the machine, would be none."""
    fed: list[int] = []
    watch.each = lambda lane: fed.append(lane.length) if lane.arm.again else None
    dense = Arm(make("dense"))
    watch.run(llama, [dense, replace(dense, again=True)])
    context = llama.trace.prefix.tokens
    for branch in (0, 1):
        lengths = [length - context for length in fed]
        assert len([at for at in lengths if at < QUESTION]) >= 2, branch
    assert not torch.equal(watch.logits["dense", 0], watch.logits["dense'", 0])


def test_who_is_asked_so() -> None:
    assert set(TOGETHER) == {"exact_mass", "quest", "locks", "centroid", "m3-exact-mass", "m3-distilled"}


@pytest.mark.parametrize(
    ("world", "protection"),
    [("llama", Protection(4, 20)), ("gemma", Protection(0, 0))],
    indirect=["world"],
    ids=["llama, protected", "gemma, bare"],
)
def test_as_one_token_at_a_time(
    world: World, watch: Watch, protection: Protection, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[Policy] = [*(built_in(name) for name in TOGETHER), make("exact_mass", heads="q")]
    policies += [make("quest", dense_layers=0, block=32, heads="q"), make("locks", block=32, combine="peak")]
    arms = [Arm(make("dense"), None, protection)]
    arms += [Arm(policy, Budget("read_tokens", 128), protection) for policy in policies]
    arms += [Arm(policy, budget(policy), protection) for policy in LATER]
    at_once = watch.run(world, arms, free=3, calibration=world.calibration)
    logits, forwards = dict(watch.logits), watch.steps
    monkeypatch.setattr(Lane, "takes", lambda lane, tokens: min(1, tokens) if lane.arm.label != "dense" else tokens)
    one_by_one = watch.run(world, arms, free=3, calibration=world.calibration)
    assert watch.steps - forwards > forwards
    rounds = {arm.label for arm in arms if arm.policy.decides_at(When.ON_WRITE)}
    for key, expected in watch.logits.items():
        # A value on the edge between two codes may fall to either side of it, and all later ones with it.
        near = 1e-2 if key[0] in rounds else 2e-5
        torch.testing.assert_close(logits[key], expected, rtol=0, atol=near, msg=lambda text, key=key: f"{key}: {text}")
    assert any(not torch.equal(logits[arm.label, 0], logits["dense", 0]) for arm in arms)
    for mine, theirs in zip(at_once, one_by_one, strict=True):
        for field in fields(mine):
            if field.name not in WALL and (mine.arm not in rounds or "bytes" in field.name):
                found, expected = getattr(mine, field.name), getattr(theirs, field.name)
                same = found == (pytest.approx(expected, rel=1e-6, abs=1e-6) if isinstance(found, float) else expected)
                assert same, f"{mine.arm}, question {mine.branch}: {field.name} {found} is not {expected}"
