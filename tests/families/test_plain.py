"""Every family that caches plain keys and values: recorded, replayed dense, and under one policy of every kind."""

from __future__ import annotations

import pytest
import torch

from kvassay.cache.ops import group_specs
from kvassay.errors import PolicyError
from kvassay.policy.budget import Budget
from kvassay.policy.registry import make
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.lane import scope_of
from kvassay.replay.open import open_loop, output_errors
from kvassay.replay.protocol import Protocol
from tests.families import models, rules, world
from tests.families.arms import AGAIN, DENSE, PROTECTION, dense_is_the_recorded_model, recording_changes_no_bit
from tests.families.conftest import Recorded
from tests.replay import plain
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch
from tests.replay.worlds import World

KEEP, PAGES = 24, 3
EVICT = Arm(make("snapkv", window=4, kernel=3), Budget("keep_tokens", KEEP), PROTECTION)
SELECT = Arm(make("exact_mass"), Budget("read_tokens", KEEP), PROTECTION)
QUANTISE = Arm(make("kivi", group=16, residual=16), None, PROTECTION)

WINDOWED = "mistral"
"""A window on every layer: nothing that grows."""
GROWING = [family for family in models.PLAIN if family != WINDOWED]


@pytest.mark.parametrize("family", [*models.PLAIN, *models.WRAPPED])
def test_recording_changes_no_bit(family: str, recorded: Recorded) -> None:
    recording_changes_no_bit(recorded(family), family)


@pytest.mark.parametrize("family", [*models.PLAIN, *models.WRAPPED])
def test_dense_is_the_recorded_model(family: str, recorded: Recorded, watch: Watch) -> None:
    this = recorded(family)
    dense_is_the_recorded_model(this, watch, Oracle(this).answer(this.trace.branches[0]))


def paged(this: World) -> Arm:
    """Quest by pages of one block of the full layers, which is of 32 slots where they hold half as many heads."""
    page = max(
        group.block_size for group in group_specs(this.trace.layout, Protocol().block_size) if group.window is None
    )
    return Arm(make("quest", dense_layers=0, block=page), Budget("read_tokens", page * PAGES), PROTECTION)


def by_hand(arm: Arm, this: World) -> Oracle:
    """The float64 model under the arm's method."""
    oracle = Oracle(this)
    if arm is EVICT:
        rules.snapkv(this, oracle, KEEP, window=4, kernel=3)
    elif arm is QUANTISE:
        rules.Kivi(oracle, bits=2, group=16, residual=16)
    elif arm is SELECT:
        oracle.select = rules.ExactMass(this, KEEP)
    else:
        oracle.select = rules.Quest(arm.policy.parameters["block"], PAGES)
    return oracle


@pytest.mark.parametrize("family", GROWING)
def test_policies_are_the_methods_by_hand(family: str, recorded: Recorded, watch: Watch) -> None:
    this = recorded(family)
    arms = [EVICT, SELECT, paged(this), QUANTISE]
    rows = {row.arm: row for row in watch.run(this, [DENSE, *arms])}
    dense = watch.logits["dense", 0].double()
    for arm in arms:
        expected = by_hand(arm, this).answer(this.trace.branches[0])
        found = watch.logits[arm.label, 0].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3, msg=lambda m, arm=arm: f"{arm.label}: {m}")
        assert float((dense - expected).abs().max()) > 0.01 * float(dense.abs().max())
    fed = world.QUESTION + world.ANSWER - 1
    assert rows["dense"].selected_tokens == world.CONTEXT + (fed + 1) / 2
    assert rows[SELECT.label].selected_tokens == KEEP
    assert rows[EVICT.label].selected_tokens == KEEP + (fed + 1) / 2


@pytest.mark.parametrize("family", GROWING)
def test_every_layers_attention_under_eviction(family: str, recorded: Recorded) -> None:
    this = recorded(family)
    trace, oracle = this.trace, Oracle(this)
    rules.snapkv(this, oracle, KEEP, window=4, kernel=3)
    rows = open_loop(trace, [EVICT])
    assert [row.layer for row in rows] == [layer.index for layer in trace.layout.layers]
    for row in rows:
        owner = trace.layout.source(row.layer).index
        keep = None
        if owner in oracle.full:
            group = trace.layout.layers[row.layer].q_heads // len(oracle.alive[owner])
            keep = oracle.alive[owner].repeat_interleave(group, 0).expand(trace.branches[0].tokens, -1, -1)
        expected = plain.fidelity(trace, trace.branches[0], row.layer, keep)
        assert (row.output_error, row.retained_mass) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert (row.output_error > 0.02) == (keep is not None)


@pytest.mark.parametrize("family", models.PLAIN)
def test_dense_reproduces_every_layers_recorded_output(family: str, recorded: Recorded) -> None:
    assert max(found.error for found in output_errors(recorded(family).trace)) < 1e-5


def test_a_model_of_windows_alone_leaves_policies_nothing(recorded: Recorded, watch: Watch) -> None:
    this, arms = recorded(WINDOWED), [EVICT, SELECT, QUANTISE]
    reason = "it acts on full, the model has sliding"
    assert not_applicable(this.trace, [DENSE, AGAIN, *arms], 16) == {arm.label: reason for arm in arms}
    (row,) = watch.run(this, [DENSE, *arms])
    assert row.selected_tokens == this.trace.layout.layers[0].window
    assert (row.blocks_total, set(row.blocks_freed.values())) == (0, {0.0})
    with pytest.raises(PolicyError, match=f"policy 'snapkv' cannot act on mistral: {reason}"):
        scope_of(this.trace.layout, EVICT.policy)
