"""EpiKV in the loop against its rule over an independent float64 run of the model, and where it does not apply."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvassay.errors import PolicyError
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.epikv import EpiKV
from kvassay.policy.motion import advance, z_score
from kvassay.policy.registry import make
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.lane import Lane
from tests.replay.oracle import Oracle
from tests.replay.watch import Watch
from tests.replay.worlds import World, fed

NONE = Protection(0, 0)
DENSE = Arm(make("dense"), None, NONE)
KEEP, WINDOW = 12, 5
POLICY = EpiKV(early=1, late=3, window=WINDOW, reading="generated")
ARM = Arm(POLICY, Budget("keep_tokens", KEEP), NONE)


class ByHand:
    """The rule over the oracle's hidden states, with masks instead of slots."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None
        self.moves: list[tuple[float, float]] = []
        self.scores: dict[int, float] = {}
        self.victims: list[int] = []

    def __call__(self, oracle: Oracle) -> None:
        now = oracle.hidden[1], oracle.hidden[3]
        position = oracle.length - 1
        if self.before is None:
            self.scores[position] = 0.0
        else:
            self.moves.append(tuple(float((a - b).norm()) for a, b in zip(now, self.before, strict=True)))  # type: ignore[arg-type]
            recent = np.array(self.moves[-WINDOW:])
            z = (recent[-1] - recent.mean(0)) / (recent.std(0) + 1e-6)
            self.scores[position] = float(z[0] - z[1])
        self.before = now
        if self.context + len(self.scores) >= self.context + KEEP:
            open_to = [p for p in self.scores if p < oracle.length - KEEP // 4]
            victim = min(open_to, key=lambda p: (self.scores[p], p))
            del self.scores[victim]
            self.victims.append(victim)
            for layer in oracle.full:
                oracle.alive[layer][:, victim] = False


@pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
def test_victims_and_logits_are_those_of_the_rule(world: World, watch: Watch) -> None:
    context = world.trace.prefix.tokens
    slots: dict[int, int] = {}

    def each(lane: Lane) -> None:
        if lane.arm.label == ARM.label:
            for layer in lane.scope:
                data = lane.cache.layer(lane.seq, layer)
                slots[lane.length] = max(slots.get(lane.length, 0), int(data.slots.max()) + 1)

    watch.each = each
    watch.run(world, [DENSE, ARM])
    for index, branch in enumerate(world.trace.branches):
        oracle, rule = Oracle(world), ByHand(context)
        oracle.after = rule
        answer = oracle.answer(branch)
        assert len(rule.victims) == max(0, fed(index) + 1 - KEEP + 1)  # the oracle also takes in the last token
        torch.testing.assert_close(watch.logits[ARM.label, index].double(), answer, rtol=0, atol=1e-4)
    assert max(slots.values()) <= context + KEEP


def test_the_window_holds_the_newest_changes_whatever_the_chunk() -> None:
    rng = torch.Generator().manual_seed(0)
    early, late = torch.randn(2, 20, 6, generator=rng)
    whole, scores = advance({}, torch.stack([early, late]), 7)
    state: dict[str, torch.Tensor] = {}
    parts = []
    for at in range(20):
        state, score = advance(state, torch.stack([early, late])[:, at : at + 1], 7)
        parts.append(score)
    torch.testing.assert_close(torch.cat(parts, 1), scores)
    for name, tensor in whole.items():
        torch.testing.assert_close(state[name], tensor, equal_nan=True)
    moves = np.linalg.norm(np.diff(early.numpy(), axis=0), axis=1)
    window = moves[12:19]
    assert float(z_score(whole["moves"])[0]) == pytest.approx((window[-1] - window.mean()) / window.std(), rel=1e-4)
    assert scores[:, 0].tolist() == [0, 0]


def test_a_window_without_change_scores_nothing() -> None:
    assert z_score(torch.full((2, 9), 3.0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    "reading, keep, longest, reason",
    [
        ("total", 400, 900, "the context's 404 tokens fill its budget of 400"),
        ("total", 500, 450, "at most 450 tokens come together"),
        ("total", 500, 528, "the 124 later ones are among the newest 125"),
        ("total", 500, 560, None),
        ("generated", 12, 430, None),
        ("generated", 12, 410, "at most 410 tokens come together"),
    ],
)
def test_where_it_has_nothing_to_do_it_says_so(reading: str, keep: int, longest: int, reason: str | None) -> None:
    policy = EpiKV(reading=reading)  # type: ignore[arg-type]
    said = policy.not_applicable(404, longest, Allowance.resolve(Budget("keep_tokens", keep), 404, NONE))
    assert said is None if reason is None else reason in str(said)


def test_an_arm_that_does_not_apply_has_no_rows_instead_of_perfect_ones(llama: World, watch: Watch) -> None:
    idle = Arm(POLICY, Budget("keep_tokens", 200), NONE)
    watch.proving = False
    rows = watch.run(llama, [DENSE, idle])
    assert {row.arm for row in rows} == {"dense"}
    assert list(not_applicable(llama.trace, [DENSE, idle, ARM], 16)) == [idle.label]


def test_layers_of_any_depth() -> None:
    assert EpiKV().taps_in(32) == {10, 21} and EpiKV().taps_in(30) == {9, 20}
    with pytest.raises(PolicyError, match=r"early=0\.31 and late=0\.35 are one layer of 4"):
        EpiKV(late=0.35).taps_in(4)
    with pytest.raises(PolicyError, match=r"early and late are both 0\.5"):
        EpiKV(early=0.5, late=0.5)
