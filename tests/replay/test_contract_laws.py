"""What breaks the contract is refused with a typed error that carries the numbers, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Evict, LowRank, Merge, Quantize
from kvassay.errors import EvidenceMissing, IllegalEdit, KvassayError, PolicyError
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Approximates, Card, Effect, Evidence, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.registry import make
from kvassay.policy.views import BlockView, CacheView, LayerView, StepView
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.lane import scope_of
from tests.replay.watch import Watch, contents, prove, same
from tests.replay.worlds import World

N = 404
PROTECTION = Protection(4, 16)
NONE = Protection(0, 0)
"""Of arms that break another law than protection."""
ARMS = [
    Arm(make("dense"), None, PROTECTION),
    Arm(make("knorm"), Budget("keep_tokens", 0.5), PROTECTION),
    Arm(make("nearest-merge"), Budget("keep_tokens", 0.5), PROTECTION),
]


EDITS = frozenset(Effect) - {Effect.NONE, Effect.SELECT}


def card_of(**more: Any) -> Card:
    """A card that declares all edits there are, so that it is another law that is broken."""
    given = {"effects": EDITS, "approximates": frozenset(Approximates), "budgets": frozenset(), **more}
    return Card(name="bad", source="test", summary="breaks a law", **given)


def scorer(score: Callable[[LayerView], Tensor], **more: Any) -> Policy:
    @dataclass(frozen=True)
    class Bad(Policy):
        card: ClassVar[Card] = card_of(**more)

        def score(self, layer: LayerView, memory: Memory) -> Tensor:
            return score(layer)

    return Bad()


def decider(decide: Callable[[CacheView], Decision], **more: Any) -> Policy:
    @dataclass(frozen=True)
    class Bad(Policy):
        card: ClassVar[Card] = card_of(**more)

        def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
            return decide(cache)

    return Bad()


def editor(edit: Callable[[LayerView], Any], **more: Any) -> Policy:
    """A good edit of layer 0 and a bad one of layer 2: neither may happen."""
    return decider(
        lambda cache: Decision(
            {0: [Evict(cache.layers[0].positions % 2 == 0)], 2: [edit(cache.layers[2])]},
        ),
        **more,
    )


def reader(read: Callable[[LayerView], ReadSet]) -> Policy:
    @dataclass(frozen=True)
    class Bad(Policy):
        card: ClassVar[Card] = card_of(effects=frozenset({Effect.SELECT}), when=frozenset({When.EVERY_STEP}))

        def read(
            self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
        ) -> ReadSet | None:
            return read(layer)

    return Bad()


def observer(observe: Callable[[StepView], object], **more: Any) -> Policy:
    @dataclass(frozen=True)
    class Bad(Policy):
        card: ClassVar[Card] = card_of(when=frozenset({When.EVERY_STEP}), **more)

        def observe(self, state: State, step: StepView) -> State:
            observe(step)
            return state

    return Bad()


def summariser(summarize: Callable[[BlockView], Any]) -> Policy:
    @dataclass(frozen=True)
    class Bad(Policy):
        card: ClassVar[Card] = card_of(
            effects=frozenset({Effect.SELECT}),
            when=frozenset({When.BLOCK_FULL, When.EVERY_STEP}),
            evidence=frozenset({Evidence.KEYS}),
        )

        def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
            found: Mapping[str, Tensor] = summarize(block)
            return found

    return Bad()


def observing(state: Callable[[StepView], Any]) -> Policy:
    @dataclass(frozen=True)
    class Bad(Policy):
        card: ClassVar[Card] = card_of(when=frozenset({When.EVERY_STEP}))

        def observe(self, held: State, step: StepView) -> State:
            found: State = state(step)
            return found

    return Bad()


def undeclared(
    edit: Callable[[LayerView], Any], *effects: Effect, approximates: Collection[Approximates] = ()
) -> Policy:
    return editor(edit, effects=frozenset({Effect.EVICT, *effects}), approximates=frozenset(approximates))


def with_nan(layer: LayerView) -> Tensor:
    score = layer.positions.float()
    score[1, :3] = torch.nan
    return score


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def one_dropped_head(layer: LayerView) -> Quantize:
    widths = torch.full((2, N), 4)
    widths[1] = 0
    return Quantize(widths, 4)


def beside(layer: LayerView) -> LowRank:
    return LowRank(((0, 1),), (ones(16, 4).float(),), (ones(4, 16).float(),), None, None)


WHEN_COMPRESSED = {
    "side data that is a list": (summariser(lambda block: [block.keys]), PolicyError, r"summarize returned list, not"),
    "side data of one block": (
        summariser(lambda block: {"means": block.keys[:1, :, 0]}),
        PolicyError,
        r"side data 'means' has shape \[1, 2, 16\], \[25 blocks, \.\.\.\] needed",
    ),
    "undeclared values": (
        scorer(lambda layer: layer.values.norm(dim=-1)),
        EvidenceMissing,
        r"touched values of layer 0 without declaring",
    ),
    "undeclared keys": (
        scorer(lambda layer: layer.keys.norm(dim=-1), evidence=frozenset({Evidence.KEYS_UNROTATED})),
        EvidenceMissing,
        r"touched keys of layer 0",
    ),
    "undeclared attention": (
        scorer(lambda layer: layer.group_sum(layer.attention(4).sum(1)), evidence=frozenset({Evidence.QUERIES})),
        EvidenceMissing,
        r"touched attention of layer 0",
    ),
    "future queries": (
        scorer(lambda layer: layer.future_queries().q[:2, 0], evidence=frozenset({Evidence.QUERIES})),
        EvidenceMissing,
        r"touched future_queries of layer 0",
    ),
    "score too wide": (
        scorer(lambda layer: ones(2, N + 1).float(), budgets=frozenset({"keep_tokens"})),
        PolicyError,
        r"scored layer 0 with shape \[2, 405\], \[2, 404\] needed",
    ),
    "no score at all": (
        scorer(lambda layer: None, budgets=frozenset({"keep_tokens"})),  # type: ignore[arg-type, return-value]
        PolicyError,
        r"^policy 'bad' scored layer 0 with NoneType, a tensor \[2, 404\] needed$",
    ),
    "a fault of its own in score": (
        scorer(lambda layer: layer.positions / (1 // 0), budgets=frozenset({"keep_tokens"})),
        PolicyError,
        r"^policy 'bad', score of layer 0: ZeroDivisionError: .* \(.*test_contract_laws\.py:\d+\)$",
    ),
    "a fault of its own in decide": (
        decider(lambda cache: Decision({7: [Evict(cache.layers[77].alive)]})),
        PolicyError,
        r"^policy 'bad', decide: KeyError: 77 \(.*test_contract_laws\.py:\d+\)$",
    ),
    "NaN scores": (
        scorer(with_nan, budgets=frozenset({"keep_tokens"})),
        PolicyError,
        r"scored 3 of 808 tokens of layer 0 NaN",
    ),
    "scores in whole numbers": (
        scorer(lambda layer: layer.positions, budgets=frozenset({"keep_tokens"})),
        PolicyError,
        r"^policy 'bad' scored layer 0 in torch.int64, floating point needed$",
    ),
    "edits that are no list": (
        decider(lambda cache: Decision({0: Evict(cache.layers[0].alive)})),  # type: ignore[dict-item]
        PolicyError,
        r"the edits of layer 0 must be a list, got Evict",
    ),
    "an edit that is none": (editor(lambda layer: layer.alive), PolicyError, r"layer 2 has a Tensor among its edits"),
    "codes under an evictor's card": (
        undeclared(lambda layer: Quantize(2, 2)),
        PolicyError,
        r"answers with Quantize, and its card's effects are evict: declare 'quantize'",
    ),
    "codes that pass for exact": (
        undeclared(lambda layer: Quantize(2, 2), Effect.QUANTIZE),
        PolicyError,
        r"answers with Quantize, which changes keys and values: its card's `approximates` must say so",
    ),
    "keys encoded where values were declared": (
        undeclared(lambda layer: Quantize(2, 2), Effect.QUANTIZE, approximates={Approximates.VALUES}),
        PolicyError,
        r"answers with Quantize, which changes keys: ",
    ),
    "low rank that passes for exact": (undeclared(beside, Effect.LOW_RANK), PolicyError, r"which changes keys: "),
    "a merge under an evictor's card": (
        undeclared(lambda layer: Merge(ones(2, N).long() * -1, ones(2, N).float())),
        PolicyError,
        r"declare 'merge'",
    ),
    "keys merged where values were declared": (
        undeclared(
            lambda layer: Merge(ones(2, N).long() * -1, ones(2, N).float(), values_only=False),
            Effect.MERGE,
            approximates={Approximates.VALUES},
        ),
        PolicyError,
        r"answers with Merge, which changes keys: ",
    ),
    "a bias that passes for exact": (
        undeclared(lambda layer: Bias(ones(2, N).float())),
        PolicyError,
        r"answers with Bias, which changes logits: ",
    ),
    "layer out of scope": (
        decider(lambda cache: Decision({99: [Evict(ones(2, N))]})),
        PolicyError,
        r"edits layer 99, which its card does not act on \(full\)",
    ),
    "mask too short": (editor(lambda layer: Evict(ones(2, 7))), IllegalEdit, r"layer 2: .*\[2, 7\], bool \[2, 404\]"),
    "mask of floats": (editor(lambda layer: Evict(ones(2, N).float())), IllegalEdit, r"float32 \[2, 404\], bool"),
    "nothing kept": (
        editor(lambda layer: Evict(layer.positions < 0)),
        IllegalEdit,
        r"layer 2: KV head 0 would keep 0 of 404 tokens",
    ),
    "a head with 0 bits": (
        editor(one_dropped_head),
        IllegalEdit,
        r"layer 2: KV head 1 would keep 0 of 404",
    ),
    "widths": (editor(lambda layer: Quantize(3, 4)), IllegalEdit, r"layer 2: Quantize.value_bits holds widths \[3\]"),
    "group": (editor(lambda layer: Quantize(4, 4, group=5)), IllegalEdit, r"group=5 does not divide .* 16"),
    "basis": (editor(beside), IllegalEdit, r"\[16, 4\] and \[4, 16\], \[32, rank\]"),
    "merge into nobody": (
        editor(lambda layer: Merge(torch.full((2, N), N + 5), ones(2, N).float())),
        IllegalEdit,
        r"Merge.into names token 409 of 404",
    ),
    "merge with itself": (
        editor(lambda layer: Merge(torch.zeros(2, N, dtype=torch.long), ones(2, N).float())),
        IllegalEdit,
        r"merged away and merged into at once",
    ),
    "NaN bias": (editor(lambda layer: Bias(torch.full((2, N), torch.nan))), IllegalEdit, r"Bias.log_weight"),
}


@pytest.mark.parametrize("law", WHEN_COMPRESSED)
def test_refused_when_the_context_is_compressed(llama: World, watch: Watch, law: str) -> None:
    policy, error, words = WHEN_COMPRESSED[law]
    budget = Budget("keep_tokens", 0.5) if policy.card.budgets else None
    before = refused(llama, watch, Arm(policy, budget, NONE), error, words)
    # The bad lane itself, too, is what it was when it forked from the dense context.
    bad = max(watch.replay.cache.ledger.sequences())
    assert bad not in before
    assert same(contents(watch.replay.cache, bad), before[watch.replay.dense])


def but(layer: LayerView, *positions: int) -> Tensor:
    """Everything but these positions, in the second head alone."""
    mask = ones(2, N)
    mask[1] = ~torch.isin(layer.positions[1], torch.tensor(positions))
    return mask


UNPROTECTED = {
    "evicted": (lambda layer: Evict(but(layer, 3, 200)), 1),
    "evicted in all heads": (lambda layer: Evict(layer.positions[0] < N - 2), 4),
    "given 0 bits": (lambda layer: Quantize(torch.where(but(layer, 0, 388, 403), 4, 0), 4), 3),
    "keys given 0 bits": (lambda layer: Quantize(4, torch.where(but(layer, 1), 4, 0)), 1),
    "merged away": (
        lambda layer: Merge(torch.where(but(layer, 2), -1, 100), ones(2, N).float()),
        1,
    ),
}


@pytest.mark.parametrize("way", UNPROTECTED)
def test_no_arm_drops_a_protected_token(llama: World, watch: Watch, way: str) -> None:
    edit, lost = UNPROTECTED[way]
    bad = decider(lambda cache: Decision({2: [edit(cache.layers[2])]}))
    words = rf"drops {lost} of 40 protected tokens of layer 2 \(sink 4, recent 16"
    refused(llama, watch, Arm(bad, None, PROTECTION), PolicyError, words)


def test_what_is_not_protected_may_go(llama: World, watch: Watch) -> None:
    fair = decider(lambda cache: Decision({2: [Evict(but(cache.layers[2], 4, 200, 387))]}))
    rows = watch.run(llama, [*ARMS, Arm(fair, None, PROTECTION)])
    assert any(row.arm == "bad" and row.retained_fraction < 1 for row in rows)


WHEN_DECODING = {
    "hidden state of another layer": (
        observer(lambda step: step.hidden[2], taps=frozenset({1}), evidence=frozenset({Evidence.HIDDEN})),
        EvidenceMissing,
        r"hidden state of layer 2, it taps \[1\]",
    ),
    "hidden state without taps": (observer(lambda step: step.hidden[0]), EvidenceMissing, r"it taps none"),
    "future queries": (
        observer(lambda step: step.cache.layers[0].future_queries()),
        EvidenceMissing,
        r"touched future_queries",
    ),
    "a living victim": (
        decider(lambda cache: Decision(reuse=7), when=frozenset({When.EVERY_STEP})),
        IllegalEdit,
        r"position 7 holds no dead slot to reuse",
    ),
    "a victim of another sequence": (
        decider(lambda cache: Decision(reuse=9999), when=frozenset({When.EVERY_STEP})),
        IllegalEdit,
        r"position 9999 holds no dead slot",
    ),
    "eviction in the middle of a pass": (
        decider(
            lambda cache: Decision({i: [Evict(layer.positions >= 2)] for i, layer in cache.layers.items()}),
            when=frozenset({When.ON_WRITE}),
        ),
        PolicyError,
        r"answers with Evict as tokens are written",
    ),
    "compaction in the middle of a pass": (
        decider(lambda cache: Decision(compact=True), when=frozenset({When.ON_WRITE})),
        PolicyError,
        r"answers with compaction as tokens are written",
    ),
    "a foreign block": (
        reader(lambda layer: ReadSet(torch.tensor([[[999]]]), unit=16)),
        PolicyError,
        r"names block 999 of 26",
    ),
    "a foreign token": (reader(lambda layer: ReadSet(torch.tensor([[[5000]]]))), PolicyError, r"5000 of 405"),
    "a list per wrong head": (
        reader(lambda layer: ReadSet(torch.zeros(1, 3, 2, dtype=torch.long))),
        PolicyError,
        r"shape \[1, 3, 2\]",
    ),
    "lists for more queries": (
        reader(lambda layer: ReadSet(torch.zeros(2, 1, 2, dtype=torch.long))),
        PolicyError,
        r"\[2, 1, 2\], expected \[1 queries",
    ),
    "an empty list": (
        reader(lambda layer: ReadSet(torch.zeros(1, 2, 0, dtype=torch.long))),
        PolicyError,
        r"\[1, 2, 0\].* k at least 1",
    ),
    "a mask for a list": (
        reader(lambda layer: ReadSet(ones(1, 2, 26), unit=16)),
        PolicyError,
        r"index must be int64 ordinals, is torch.bool",
    ),
    "a block before the first": (
        reader(lambda layer: ReadSet(torch.tensor([[[-5]]]), unit=16)),
        PolicyError,
        r"names block -5; -1 is unused, 0 the first",
    ),
    "no unit": (reader(lambda layer: ReadSet(torch.tensor([[[0]]]), unit=0)), PolicyError, r"unit 0 is not 1"),
    "side data that nobody wrote": (
        reader(lambda layer: layer.side_data("means")),  # type: ignore[arg-type, return-value]
        PolicyError,
        r"no side data 'means' \(there is none: `summarize` writes it",
    ),
    "side data of another shape": (
        summariser(lambda block: {"means": torch.zeros(*block.keys.shape[:2], len(block.keys))}),
        PolicyError,
        r"returned \{'means': \(torch.float32, 2, 1\)\}, and \{'means': \(torch.float32, 2, 25\)\} of the blocks",
    ),
    "side data of another name": (
        summariser(lambda block: {f"of {len(block.keys)}": block.keys[:, :, 0]}),
        PolicyError,
        r"summarize returned \{'of 1': .* and \{'of 25': ",
    ),
    "a state that is a list": (
        observing(lambda step: [1.0]),
        PolicyError,
        r"observe returned list, not a dict of tensors by name",
    ),
    "a state of numbers": (observing(lambda step: {"seen": 1.0}), PolicyError, r"not a dict of tensors by name"),
    "an odd unit": (
        reader(lambda layer: ReadSet(torch.zeros(1, 1, 1, dtype=torch.long), unit=24)),
        PolicyError,
        r"unit 24 is not 1 or a multiple of 16",
    ),
    "no interval": (
        decider(lambda cache: Decision(), when=frozenset({When.EVERY_N})),
        PolicyError,
        r"needs a field interval",
    ),
}


@pytest.mark.parametrize("law", WHEN_DECODING)
def test_refused_while_decoding(llama: World, watch: Watch, law: str) -> None:
    policy, error, words = WHEN_DECODING[law]
    refused(llama, watch, Arm(policy, None, NONE), error, words)


def refused(world: World, watch: Watch, arm: Arm, error: type[KvassayError], words: str) -> Mapping[int, Any]:
    """Replay with a bad arm; every compressed lane, and the dense context, must be as it was. Returns them."""
    with pytest.raises(error, match=words) as caught:
        watch.run(world, [*ARMS, arm])
    assert type(caught.value) is error and "\n" not in str(caught.value)
    prove(watch.replay.cache)
    assert len(watch.compressed) >= 1 + len(ARMS)
    for seq, was in watch.compressed.items():
        assert same(contents(watch.replay.cache, seq), was)
    return watch.compressed


def test_window_layers_are_out_of_bounds_unless_the_card_names_them(gemma: World, watch: Watch) -> None:
    seen: list[int] = []

    def thin(cache: CacheView) -> Decision:
        seen.extend(cache.layers)
        return Decision({index: [Evict(layer.positions % 2 == 0)] for index, layer in cache.layers.items()})

    named = decider(thin, acts_on=frozenset({"sliding"}))
    watch.run(gemma, [ARMS[0], Arm(named, None, NONE)])
    assert seen == [0, 2, 3, 5]
    unnamed = decider(lambda cache: Decision({0: [Evict(ones(2, 24))]}))
    with pytest.raises(PolicyError, match="edits layer 0, which its card does not act on"):
        watch.run(gemma, [ARMS[0], Arm(unnamed, None, NONE)])


def test_a_card_must_agree_with_itself_and_with_the_model(llama: World, watch: Watch) -> None:
    with pytest.raises(PolicyError, match="only a reference may ask for future queries"):
        card_of(evidence=frozenset({Evidence.FUTURE_QUERIES}))
    with pytest.raises(PolicyError, match=r"taps layers \[1\] without the evidence 'hidden'"):
        card_of(taps=frozenset({1}))
    beyond = observer(lambda step: None, taps=frozenset({9}), evidence=frozenset({Evidence.HIDDEN}))
    with pytest.raises(PolicyError, match="taps layer 9, the model has 4 layers"):
        watch.run(llama, [ARMS[0], Arm(beyond, None, PROTECTION)])
    nowhere = decider(lambda cache: Decision(), acts_on=frozenset({"latent"}))
    arm, reason = Arm(nowhere, None, PROTECTION), "it acts on latent, the model has full"
    assert not_applicable(llama.trace, [ARMS[0], arm], 16) == {arm.label: reason}
    with pytest.raises(PolicyError, match=reason):
        scope_of(llama.trace.layout, nowhere)


def test_summaries_of_blocks_that_edits_have_torn_are_refused(llama: World, watch: Watch) -> None:
    @dataclass(frozen=True)
    class Torn(Policy):
        interval: int = 4
        card: ClassVar[Card] = card_of(when=frozenset({When.EVERY_N, When.BLOCK_FULL}))

        def summarize(self, block: Any) -> Mapping[str, Tensor]:
            return {"mean": block.keys.mean(2)}

        def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
            return Decision({i: [Evict(x.positions >= 32)] for i, x in cache.layers.items()}, compact=True)

    refused(llama, watch, Arm(Torn(), None, NONE), PolicyError, r"edits have left 384 of 416 tokens")
