"""The dense arm is the model: the recorded logits, the float64 oracle, and itself in another batch split."""

from __future__ import annotations

import pytest
import torch

from kvassay.policy.budget import Protection
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.closed import replay_trace
from kvassay.replay.protocol import Protocol
from kvassay.trace.identity import context_sha256, question_sha256
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch
from tests.replay.worlds import World, sample

WORLDS = pytest.mark.parametrize("world", ["llama", "gemma", "gemma_mqa"], indirect=True)
DENSE = Arm(make("dense"), None, Protection(0, 0))
AGAIN = Arm(make("dense"), None, Protection(0, 0), again=True)


@WORLDS
def test_dense_is_the_recorded_model_the_oracle_and_itself_token_by_token(world: World, watch: Watch) -> None:
    rows = watch.run(world, [DENSE, AGAIN], free=6)
    for index, branch in enumerate(world.trace.branches):
        recorded = branch.logits[branch.question_tokens - 1 : -1]
        mine = watch.logits["dense", index]
        torch.testing.assert_close(mine, recorded, rtol=0, atol=1e-3)
        torch.testing.assert_close(mine.double(), Oracle(world).answer(branch), rtol=0, atol=1e-4)
        torch.testing.assert_close(watch.logits["dense'", index], mine, rtol=0, atol=1e-5)
        assert greedy_agrees(recorded, mine)
    again = [row for row in rows if row.arm == "dense'"]
    assert [(abs(row.kl) < 1e-6, row.agree, row.divergence) for row in again] == [(True, 1.0, None)] * 2
    assert all(row.retained_fraction == row.read_fraction == 1 for row in rows)


@WORLDS
def test_chunking_of_the_recorder_does_not_matter(world: World, watch: Watch) -> None:
    whole = world.record("one-chunk", sample(world.trace.prefix.tokens, 0), chunk=512)
    rows = replay_trace(world.loaded, whole, [DENSE], Protocol(free_tokens=0))
    assert {(row.task, row.generated_tokens, row.divergence) for row in rows} == {(None, 0, None)}, "none generated"
    said = {row.branch: (row.context_sha256, row.question_sha256) for row in rows}
    header = world.trace.header
    assert said == {index: (context_sha256(header), question_sha256(header, index)) for index in (0, 1)}
    assert said[0] != said[1], "of the other recording's tokens, and of each question its own"
    for index, branch in enumerate(world.trace.branches):
        recorded = branch.logits[branch.question_tokens - 1 : -1]
        torch.testing.assert_close(watch.logits["dense", index], recorded, rtol=0, atol=1e-3)
        assert greedy_agrees(recorded, watch.logits["dense", index])


def greedy_agrees(recorded: torch.Tensor, mine: torch.Tensor) -> bool:
    """Same greedy tokens up to the first row whose two best logits lie closer than 1e-3."""
    best = recorded.topk(2, dim=-1).values
    clear = (best[:, 0] - best[:, 1] >= 1e-3).long().cumprod(0).bool()
    assert int(clear.sum()) >= 4
    return bool((recorded.argmax(-1) == mine.argmax(-1))[clear].all())
