"""What a policy writes into what it is shown reaches no other arm, and not the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import Tensor

from kvassay.cache.edits import Decision
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.registry import make
from kvassay.policy.views import CacheView, LayerView
from kvassay.replay.arms import Arm
from kvassay.replay.closed import replay_trace
from tests.replay.worlds import World

DENSE = Arm(make("dense"), None, Protection())


@dataclass(frozen=True)
class Flips(Policy):
    """Keeps the tokens of least position, by turning its scores round where they lie."""

    card: ClassVar[Card] = Card(name="flips", effects=frozenset({Effect.EVICT}), source="test", summary="test")

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        return layer.positions.float()

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        for score in scores.values():
            score.neg_()
        return super().decide(cache, scores, memory, budget)


@dataclass(frozen=True)
class Scales(Policy):
    """Reads everything, and makes its query zero."""

    card: ClassVar[Card] = Card(
        name="scales",
        effects=frozenset({Effect.SELECT}),
        source="test",
        summary="test",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.QUERY}),
        budgets=frozenset(),
    )

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        query.mul_(0)
        return None


def nlls(world: World, arms: Sequence[Arm]) -> dict[str, list[float]]:
    """By arm: of each question, in nats."""
    rows = replay_trace(world.loaded, world.trace, arms)
    return {arm.label: [row.nll for row in rows if row.arm == arm.label] for arm in arms}


def test_scores_are_each_arms_own(llama: World) -> None:
    few, many = (Arm(Flips(), Budget("keep_tokens", share), Protection()) for share in (0.25, 0.5))
    together = nlls(llama, [DENSE, few, many])
    for arm in (few, many):
        assert together[arm.label] == nlls(llama, [DENSE, arm])[arm.label]


def test_the_models_query_is_the_models(llama: World) -> None:
    found = nlls(llama, [DENSE, Arm(Scales(), None, Protection())])
    assert found["scales"] == pytest.approx(found["dense"], abs=1e-5)
