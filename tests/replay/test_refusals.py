"""What the closed loop refuses before it replays anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import Tensor

from kvassay.cache.edits import Decision, Quantize
from kvassay.errors import BudgetError, ExperimentError, IllegalEdit, PolicyError
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Approximates, Card, Effect, When
from kvassay.policy.compose import Composed
from kvassay.policy.composition import Part
from kvassay.policy.registry import make, parse
from kvassay.policy.views import CacheView
from kvassay.replay.arms import Arm
from kvassay.replay.closed import replay_trace
from kvassay.replay.open import open_loop
from kvassay.trace.reader import Trace
from kvassay.trace.schema import Subset

from .worlds import World

DENSE = [Arm(make("dense"), None, Protection())]


def of(trace: Trace, **identity: str) -> Trace:
    """The same trace as if another model or tokenizer had made it."""
    model = trace.header.model.model_copy(update=identity)
    return Trace(trace.path, trace.header.model_copy(update={"model": model}), trace.digest)


def test_a_trace_of_other_weights(llama: World) -> None:
    with pytest.raises(ExperimentError, match=r"from tiny-llama-2 \(weights f{12}\), not from tiny-llama-2 \(2"):
        replay_trace(llama.loaded, of(llama.trace, weights_sha256="f" * 64), DENSE)


def test_a_trace_of_another_tokenizer(llama: World) -> None:
    with pytest.raises(ExperimentError, match=r"token ids are of tokenizer f{12}, tiny-llama-2 comes with 1{12}"):
        replay_trace(llama.loaded, of(llama.trace, tokenizer_sha256="f" * 64), DENSE)


def test_no_dense_arm(llama: World) -> None:
    with pytest.raises(ExperimentError, match="needs the arm 'dense'"):
        replay_trace(llama.loaded, llama.trace, [Arm(make("dense"), None, Protection(), again=True)])


def test_a_trace_of_a_part_of_the_model(llama: World) -> None:
    part = Subset(layers=tuple(range(len(llama.trace.layout.layers))), kv_heads=(0,))
    narrow = Trace(llama.trace.path, llama.trace.header.model_copy(update={"subset": part}), llama.trace.digest)
    with pytest.raises(ExperimentError, match="holds a part of the model; the closed loop needs the whole"):
        replay_trace(llama.loaded, narrow, DENSE)


@dataclass(frozen=True)
class FiveBits(Policy):
    """Asks for a width that there is none of."""

    card: ClassVar[Card] = Card(
        name="five-bits",
        effects=frozenset({Effect.QUANTIZE}),
        source="test",
        summary="an edit that the cache refuses",
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        budgets=frozenset(),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        return Decision({index: [Quantize(5, 5)] for index in cache.layers})


@dataclass(frozen=True)
class LateFiveBits(FiveBits):
    """The same while decoding."""

    card: ClassVar[Card] = replace(FiveBits.card, name="late-five-bits", when=frozenset({When.EVERY_STEP}))


@pytest.mark.parametrize("policy", [FiveBits(), LateFiveBits()])
def test_an_edit_that_breaks_a_law_names_the_arm(llama: World, policy: Policy) -> None:
    name = policy.card.name
    with pytest.raises(IllegalEdit, match=rf"^arm '{name}': layer 0: Quantize.value_bits holds widths \[5\], [^\n]*$"):
        replay_trace(llama.loaded, llama.trace, [*DENSE, Arm(policy)])


def test_so_does_one_that_a_composition_would_size_by_bytes(llama: World) -> None:
    arm = Arm(Composed((Part(make("knorm")), Part(FiveBits()))), Budget("bytes", 0.5))
    with pytest.raises(IllegalEdit, match=r"^arm 'knorm\+five-bits bytes=0.5': layer 0: Quantize.value_bits holds"):
        replay_trace(llama.loaded, llama.trace, [*DENSE, arm])


def test_so_does_one_of_the_open_loop(llama: World) -> None:
    with pytest.raises(IllegalEdit, match=r"^arm 'five-bits': layer 0: Quantize.value_bits holds widths \[5\]"):
        open_loop(llama.trace, [Arm(FiveBits())])


def test_parts_that_cannot_follow_each_other_are_named(llama: World) -> None:
    """Whether they can depends on the model: with one KV head all heads keep the same tokens."""
    arm = Arm(parse("snapkv+svd"), Budget.parse("keep=0.5"), Protection())
    with pytest.raises(
        PolicyError, match=r"^policy 'snapkv\+svd': a low-rank code takes the same tokens of every head"
    ):
        replay_trace(llama.loaded, llama.trace, [*DENSE, arm], calibration=llama.calibration)


@dataclass(frozen=True)
class Liar(Policy):
    """Encodes under an evictor's card."""

    card: ClassVar[Card] = Card(
        name="liar", effects=frozenset({Effect.EVICT}), source="test", summary="test", budgets=frozenset()
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        return Decision({index: [Quantize(2, 2)] for index in cache.layers})


def test_a_part_is_held_to_its_own_card(llama: World) -> None:
    """Not to that of the whole, where another part's may say what it does."""
    arm = Arm(Composed((Part(Liar()), Part(make("int8")))))
    with pytest.raises(PolicyError, match=r"^policy 'liar' answers with Quantize, and its card's effects are evict"):
        replay_trace(llama.loaded, llama.trace, [*DENSE, arm])


@pytest.mark.parametrize("policy", ["knorm", "knorm(keep=0.5)+exact_mass"])
def test_a_budget_that_leaves_nothing_of_a_context_names_the_arm(llama: World, policy: str) -> None:
    unit = "keep_tokens" if policy == "knorm" else "read_tokens"
    arm = Arm(parse(policy), Budget(unit, 0.001))
    with pytest.raises(BudgetError, match=r"budget (keep|read)=0.001 of 404 tokens leaves none") as one:
        replay_trace(llama.loaded, llama.trace, [*DENSE, arm])
    assert str(one.value).startswith(f"arm '{arm.label}': ")
