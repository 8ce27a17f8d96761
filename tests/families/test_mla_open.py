"""MLA in the open loop: attention error and mass of every layer by hand, float64, position by position."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvassay.policy.budget import Budget, Protection
from kvassay.policy.indexers import lightning_score
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.open import left_out, open_loop, output_errors
from kvassay.replay.protocol import Protocol
from tests.families import models
from tests.families.arms import DENSE
from tests.families.conftest import Recorded
from tests.families.mla_oracle import MlaOracle
from tests.families.test_mla_policies import EVICT, snapkv
from tests.families.world import both
from tests.replay.worlds import World

ROW, DIM, TOPK, INDEX_ROW = 32, 24, 6, 16


@pytest.mark.parametrize("family", models.LATENT)
def test_dense_is_the_models_own_attention(family: str, recorded: Recorded) -> None:
    errors = output_errors(recorded(family).trace)
    assert len(errors) == 8 and max(found.error for found in errors) < 3e-6


def chosen(this: World, index: int, t: int, alive: Tensor) -> list[int]:
    """What the query of position t reads of what is alive, bool [t + 1], by the index: its choice made anew."""
    layout = this.trace.layout
    selector = layout.selector(index)
    kept = [j for j in range(t + 1) if alive[j]]
    if selector is None:
        return kept
    if selector.index != index:  # the choice that layer made in the recording, of all tokens
        return [j for j in both(this.trace, "selection", index)[t, 0].tolist() if j in kept]
    score = lightning_score(
        both(this.trace, "index_queries", index)[t][:, None].double(),
        both(this.trace, "cache", index, "index_keys")[: t + 1].double(),
        both(this.trace, "index_weights", index)[t][None].double(),
    )[0]
    return sorted(kept, key=lambda j: float(score[j]), reverse=True)[:TOPK]


def attend(this: World, index: int, t: int, read: list[int]) -> tuple[Tensor, Tensor]:
    """Output over latents [q_heads, dim] and weights [q_heads, t + 1] of a recorded query over some positions."""
    rows = both(this.trace, "k", index)[: t + 1, 0].double()
    logits = both(this.trace, "q", index)[t].double() @ rows.T * this.trace.layout.layers[index].scale
    hidden = torch.ones(t + 1, dtype=torch.bool)
    hidden[read] = False
    weights = torch.softmax(logits.masked_fill(hidden, -math.inf), -1) if read else torch.zeros_like(logits)
    return weights @ rows[:, :DIM], weights


@pytest.mark.parametrize("family", models.LATENT)
def test_an_evicting_arm_by_hand(family: str, recorded: Recorded) -> None:
    this = recorded(family)
    trace, branch = this.trace, this.trace.branches[0]
    oracle = MlaOracle(this)
    snapkv(this, oracle)
    rows = {row.layer: row for row in open_loop(trace, [DENSE, EVICT]) if row.arm == EVICT.label}
    element = trace.layout.element_bytes
    for index in range(4):
        alive = torch.cat([oracle.alive[index][0], torch.ones(branch.tokens, dtype=torch.bool)])
        every = torch.ones_like(alive)
        error = norm = mass = read_bytes = dense_bytes = 0.0
        has_index = trace.layout.layers[index].index_keys is not None
        for t in range(branch.start, branch.start + branch.tokens):
            mine, theirs = chosen(this, index, t, alive), chosen(this, index, t, every)
            (out, _), (full, weights) = attend(this, index, t, mine), attend(this, index, t, theirs)
            error, norm = error + float((out - full).square().sum()), norm + float(full.square().sum())
            mass += float(weights[:, mine].sum(1).mean())
            held = int(alive[: t + 1].sum())
            read_bytes += element * (len(mine) * ROW + has_index * held * INDEX_ROW)
            dense_bytes += element * (len(theirs) * ROW + has_index * (t + 1) * INDEX_ROW)
        row = rows[index]
        assert row.output_error == pytest.approx(math.sqrt(error / norm), rel=1e-4)
        assert row.retained_mass == pytest.approx(mass / branch.tokens, rel=1e-4)
        assert row.read_bytes == pytest.approx(read_bytes / branch.tokens)
        assert row.dense_bytes == pytest.approx(dense_bytes / branch.tokens)
        assert row.output_error > 0.01


def test_what_has_no_place_is_not_covered(recorded: Recorded) -> None:
    units = {"quest": "read_tokens", "snapkv": "keep_tokens"}
    arms = [Arm(make(name), Budget(unit, 0.5), Protection(4, 4)) for name, unit in units.items()]
    reasons = left_out(recorded("deepseek_v32").trace, arms, Protocol(), calibrated=False)
    assert list(reasons) == [arms[0].label]
    assert reasons[arms[0].label].startswith("has no place here; redundant: the trained index already")
    assert not left_out(recorded("mistral4").trace, arms, Protocol(), calibrated=False)
