"""Dense and the protection of every family's arms, and what is asked of each family: exact recording, exact replay."""

from __future__ import annotations

import torch
from torch import Tensor

from kvassay.measure.result import BranchResult
from kvassay.policy.budget import Protection
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from tests.families import models, rules, world
from tests.record.conftest import run_chunks
from tests.replay.watch import Watch
from tests.replay.worlds import World

PROTECTION = Protection(rules.SINK, rules.RECENT)
DENSE = Arm(make("dense"), None, PROTECTION)
AGAIN = Arm(make("dense"), None, PROTECTION, again=True)


def recording_changes_no_bit(this: World, family: str) -> None:
    """The recorded branch's logits are those of the stock eager model, fed in the same passes."""
    stock = run_chunks(models.build(family, attention="eager"), world.ids(), world.chunks())
    assert torch.equal(this.trace.branches[0].logits, stock[world.CONTEXT :])


def dense_is_the_recorded_model(this: World, watch: Watch, exact: Tensor, free: int = 0) -> list[BranchResult]:
    """Replayed dense, twice, the answer's logits are the recorded ones, and `exact`, those of the float64 model."""
    rows = watch.run(this, [DENSE, AGAIN], free=free)
    branch = this.trace.branches[0]
    own = branch.logits[branch.question_tokens - 1 : -1]
    for arm in (DENSE, AGAIN):
        torch.testing.assert_close(watch.logits[arm.label, 0], own, rtol=0, atol=1e-4)
    torch.testing.assert_close(watch.logits["dense", 0].double(), exact, rtol=0, atol=5e-5)
    assert [row.agree for row in rows] == [1.0, 1.0]
    return rows
