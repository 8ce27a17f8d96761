"""Compositions: what is refused, what the card says, and that joined decisions are what two in a row would be."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Decision, Edit, Evict, LowRank, Quantize
from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.errors import BudgetError, KvassayError, PolicyError
from kvassay.layout.model import Layout
from kvassay.policy import registry
from kvassay.policy.base import Artefact, Memory, Policy, State
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Approximates, Card, Effect, Evidence, Prefill, When
from kvassay.policy.compose import Composed
from kvassay.policy.composition import Part
from kvassay.policy.describe import describe
from kvassay.policy.joining import joined
from kvassay.policy.views import BlockView, CacheView, LayerView, Meter, StepView
from kvassay.replay.arms import Arm
from tests.policy.build import allowance, cache, dense, layer, memory, ragged, random_kv, random_q, view


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("snapkv+knorm", PolicyError, "snapkv and knorm both evict; one part may"),
        ("snapkv+selkv", PolicyError, "snapkv and selkv both evict"),
        ("rdkv+int8", PolicyError, "rdkv and int8 both encode"),
        ("quest+locks", PolicyError, "quest and locks both select"),
        ("dense+int8", PolicyError, "'dense' does nothing to the cache"),
        ("int8+snapkv", PolicyError, r"snapkv would evict what int8 has encoded; write snapkv\+int8"),
        ("kara+int8", PolicyError, "kara evicts while decoding, from what int8 has encoded by then"),
        ("paged-eviction+kivi", PolicyError, "paged-eviction evicts while decoding"),
        ("selkv+think", PolicyError, "think looks at keys, queries, and what selkv merges"),
        ("snapkv+quest(read=0.5)", PolicyError, "quest describes blocks of consecutive tokens, and snapkv makes holes"),
        ("snapkv+exact_mass", BudgetError, r"both take a budget; give one its own, e.g. snapkv\(keep=0.5\)"),
        ("snapkv(read=0.5)+int8", BudgetError, "'snapkv' takes no read_tokens budget"),
        ("snapkv+int8(keep=0.5)", BudgetError, "'int8' takes no keep_tokens budget"),
        ("snapkv(keep=0.5,bytes=0.5)+int8", PolicyError, "one budget at most, not bytes=0.5 and keep=0.5"),
        ("snapkv+", PolicyError, r"policy 'snapkv\+': part 2 of 2 is empty"),
        ("+quest", PolicyError, r"policy '\+quest': part 1 of 2 is empty"),
        ("knorm+ +int8", PolicyError, r"policy 'knorm\+ \+int8': part 2 of 3 is empty"),
        ("snapkv+int9", PolicyError, r"unknown policy 'int9' \(did you mean 'int8'\?\)"),
    ],
)
def test_nonsense_is_refused(text: str, error: type[KvassayError], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.parse(text)


def test_the_card_is_the_union_and_keeps_each_parts_words() -> None:
    policy = registry.parse("selkv(window=8)+kivi(key_bits=4)")
    parts = [registry.get("selkv").card, registry.get("kivi").card]
    card = policy.card
    assert card.name == "selkv+kivi" and card.effects == {Effect.EVICT, Effect.MERGE, Effect.QUANTIZE}
    assert card.evidence == parts[0].evidence | parts[1].evidence
    assert card.when == {When.AFTER_PREFILL, When.EVERY_STEP}
    assert card.approximates == {Approximates.KEYS, Approximates.VALUES, Approximates.LOGITS}
    assert card.reconstruction and card.gaps == tuple(f"selkv: {gap}" for gap in parts[0].gaps)
    assert card.deviations == tuple(f"kivi: {text}" for text in parts[1].deviations)
    assert card.limits[-1] == "kivi sees only what selkv has left"
    assert card.budgets == {"keep_tokens"}  # a merge's bias has no size of its own to fit into bytes
    assert registry.parse("snapkv+kivi").card.budgets == {"keep_tokens", "bytes"}
    assert registry.parse("quest+kivi").card.budgets == {"read_tokens"}
    assert registry.parse("snapkv(keep=0.5)+exact_mass").card.budgets == {"read_tokens"}
    assert registry.parse("snapkv+exact_mass(read=0.5)").card.budgets == {"keep_tokens"}
    assert registry.parse("hindsight+int8").card.reference
    assert registry.parse("quest+fp8").card.prefill is Prefill.OWN
    assert policy.decides_at(When.EVERY_STEP) and not registry.parse("quest+think").decides_at(When.EVERY_STEP)
    assert describe(policy)["parameters"]["kivi.group"] == {"type": "int", "default": 32}


@pytest.mark.parametrize(
    "text",
    ["snapkv(window=32)+int8", "quest(read=0.1, block=32)+kivi(key_bits=4)", "random(keep=0.5)+exact_mass"],
)
def test_a_label_is_read_back_and_survives_another_process(text: str) -> None:
    policy = registry.parse(text)
    assert policy.label == text and registry.parse(policy.label) == policy == pickle.loads(pickle.dumps(policy))


def test_parts_may_be_plug_ins_and_twins(tmp_path: Path) -> None:
    source = "from dataclasses import dataclass, replace\nfrom kvassay.policy.knorm import KeyNorm\n\n"
    source += "@dataclass(frozen=True)\nclass Mine(KeyNorm):\n    '''Mine.'''\n"
    (tmp_path / "mine.py").write_text(source + "    card = replace(KeyNorm.card, name='mine')\n")
    policy = registry.parse("mine.py:Mine+int8", tmp_path)
    assert [type(part).__name__ for part in policy.parts] == ["Mine", "Int8"]
    assert registry.parse("knorm~flipped+kivi(key_bits=4)").card.name == "knorm~flipped+kivi"


def test_an_evictor_does_not_meet_its_encoder_in_a_prefill_of_its_own() -> None:
    policy = registry.parse("snapkv+int8")
    with pytest.raises(PolicyError, match=r"'snapkv\+int8' encodes as it prefills"):
        Arm(policy, Budget("keep_tokens", 0.5), prefill=Prefill.OWN)
    Arm(registry.parse("quest+int8"), Budget("read_tokens", 0.5), prefill=Prefill.OWN)
    assert Arm(policy, Budget("keep_tokens", 0.5)).label == "snapkv+int8 keep=0.5"


# -- joined decisions -------------------------------------------------------------------------------------

TOKENS, HEADS, DIM = 12, 2, 8


def paged(k: Tensor, v: Tensor) -> tuple[PagedCache, int]:
    made = PagedCache(Layout("tiny", (layer(),), 8, 8, 4096), [GroupSpec(0, (0,), (HEADS,), 4)], 128, poison=True)
    seq, _ = made.create([])
    made.extend(seq, list(range(k.shape[1])))
    made.write(0, [seq], k[None].float(), v[None].float())
    return made, seq


def contents(made: PagedCache, seq: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Per head the live positions with their keys and values."""
    data = made.layer(seq, 0)
    return [(p[p >= 0].tolist(), k[p >= 0], v[p >= 0]) for p, k, v in zip(data.positions, data.k, data.v, strict=True)]


masks = st.lists(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS).filter(any), min_size=HEADS, max_size=HEADS)
widths = st.sampled_from([2, 4, 8, 16])


@settings(max_examples=40, deadline=None)
@given(keep=masks, data=st.data())
def test_a_joined_decision_is_what_two_in_a_row_would_be(keep: list[list[bool]], data: st.DataObject) -> None:
    k, v = random_kv(TOKENS, seed=3)
    evict = Decision({0: [Evict(torch.tensor(keep))]})
    made, seq = paged(k, v)
    made.apply(seq, evict)
    left = made.layer(seq, 0)
    width = left.positions.shape[1]
    bits = torch.tensor([[data.draw(widths) for _ in range(width)] for _ in range(HEADS)])
    scope = torch.tensor([[data.draw(st.booleans()) for _ in range(width)] for _ in range(HEADS)]) & left.alive
    axis: Any = data.draw(st.sampled_from(["token", "channel"]))
    key_bits = bits.flip(1) if axis == "token" else data.draw(widths)
    tokens = scope if bool(scope.any()) else None
    code = Quantize(bits, key_bits, key_axis=axis, tokens=tokens)
    made.apply(seq, Decision({0: [code]}))

    again, other = paged(k, v)
    shown = view(registry.make("knorm"), LayerData.dense(k.float(), v.float()))
    again.apply(other, joined(evict, Decision({0: [code]}), cache(shown)))
    for (p, a, b), (q, c, d) in zip(contents(made, seq), contents(again, other), strict=True):
        assert p == q and torch.equal(a, c) and torch.equal(b, d)
    assert again.code_bytes(other, 0) == made.code_bytes(seq, 0)
    again.check()


def test_a_low_rank_code_takes_what_all_heads_have_kept() -> None:
    k, v = random_kv(TOKENS)
    shown = view(registry.make("knorm"), LayerData.dense(k, v))
    basis = (torch.eye(DIM), torch.eye(DIM))
    code = LowRank(((0,), (1,)), basis, basis, None, None)
    keep = torch.arange(TOKENS) % 3 == 0
    (_, edit) = joined(Decision({0: [Evict(keep)]}), Decision({0: [code]}), cache(shown)).edits[0]
    assert isinstance(edit, LowRank) and edit.tokens is not None and torch.equal(edit.tokens, keep)
    uneven = torch.stack([keep, keep.roll(1)])
    with pytest.raises(PolicyError, match="each head has kept others"):
        joined(Decision({0: [Evict(uneven)]}), Decision({0: [code]}), cache(shown))


# -- parts at work ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeepFirst(Policy):
    """Keeps the first tokens; counts its steps."""

    card: ClassVar[Card] = Card(
        "first", frozenset({Effect.EVICT}), "test", "keeps the first", evidence=frozenset({Evidence.KEYS})
    )

    def observe(self, state: State, step: StepView) -> State:
        return {"steps": state.get("steps", torch.zeros(1)) + len(step.token_ids)}

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        return -layer.positions.double()


@dataclass(frozen=True)
class Greedy(Policy):
    """Encodes what it sees, to a width that its state says, and wants to know its keys only if `curious`."""

    curious: bool = False

    card: ClassVar[Card] = Card(
        "greedy",
        frozenset({Effect.QUANTIZE}),
        "test",
        "encodes all",
        when=frozenset({When.OFFLINE, When.AFTER_PREFILL}),
        approximates=frozenset({Approximates.VALUES}),
        evidence=frozenset({Evidence.VALUES}),
        budgets=frozenset(),
    )

    def fit(self, source: Any) -> Artefact:
        return Artefact({"bits": torch.tensor([4])}, "hash")

    def observe(self, state: State, step: StepView) -> State:
        return {"steps": state.get("steps", torch.zeros(1)) + 100}

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        assert memory.artefact is not None and budget.budget is None
        edits: dict[int, list[Edit]] = {}
        for index, shown in cache.layers.items():
            _ = shown.keys if self.curious else shown.values
            edits[index] = [Quantize(int(memory.artefact.tensors["bits"]), 16)]
        return Decision(edits)


def test_a_part_sees_what_is_left_under_its_own_card_and_its_own_artefact() -> None:
    meter = Meter(2.0)
    policy = Composed((Part(KeepFirst()), Part(Greedy())))
    artefact = policy.fit(type("Text", (), {"sha256": "of the text"})())
    assert list(artefact.tensors) == ["1:greedy/bits"] and artefact.source_sha256 == "of the text"
    shown = view(policy, dense(10), meter=meter)
    decision = policy.decide(cache(shown), {}, Memory(artefact=artefact), allowance(4, 10))
    evict, code = decision.edits[0]
    assert isinstance(evict, Evict) and evict.keep.tolist() == [[True] * 4 + [False] * 6] * 2
    assert isinstance(code, Quantize) and code.value_bits == 4 and torch.equal(code.tokens, evict.keep)  # type: ignore[arg-type]
    assert meter.touched == {"values": 2 * 4 * 8 * 2.0}  # four tokens a head, not ten
    curious = Composed((Part(KeepFirst()), Part(Greedy(curious=True))))
    with pytest.raises(KvassayError, match=r"policy 'greedy' touched keys of layer 0 without declaring it"):
        curious.decide(cache(view(curious, dense(10))), {}, Memory(artefact=artefact), allowance(4, 10))


def test_each_part_is_asked_at_its_own_moments() -> None:
    policy = registry.parse("knorm+int8")
    shown = cache(view(policy, dense(10)))
    edits = policy.decide(shown, {}, memory(), allowance(4, 10)).edits[0]
    assert [type(edit).__name__ for edit in edits] == ["Evict", "Quantize"]
    step = CacheView(shown.layers, 10, 8, When.ON_WRITE)
    (edit,) = policy.decide(step, {}, memory(), allowance(4, 10)).edits[0]
    assert isinstance(edit, Quantize) and edit.tokens is not None and bool(edit.tokens.all())


def test_states_are_kept_apart() -> None:
    policy = Composed((Part(KeepFirst()), Part(Greedy())))
    step = StepView((1, 2), (8, 9), cache(view(policy, dense(10))))
    once = policy.observe({}, step)
    twice = policy.observe(once, step)
    assert {name: int(value) for name, value in once.items()} == {"0:first/steps": 2, "1:greedy/steps": 100}
    assert {name: int(value) for name, value in twice.items()} == {"0:first/steps": 4, "1:greedy/steps": 200}


def test_the_selector_gets_its_own_side_data_and_budget() -> None:
    policy = registry.parse("quest(dense_layers=0, block=4)+int8")
    quest = registry.parse("quest(dense_layers=0, block=4)")
    k, v = random_kv(16)
    blocks = BlockView(layer(), *(x.unflatten(1, (4, 4)).transpose(0, 1) for x in (k, v)))
    side = quest.summarize(blocks)
    for name, made in policy.summarize(blocks).items():
        assert torch.equal(made, side[name])
    query, budget = random_q(1).float(), allowance(12, 16, unit="read_tokens")
    shown = view(policy, LayerData.dense(k, v), side=side)
    mine = policy.read(shown, query, memory(), budget, None)
    theirs = quest.read(view(quest, LayerData.dense(k, v), side=side), query, memory(), budget, None)
    assert mine is not None and theirs is not None and torch.equal(mine.index, theirs.index)
    own = registry.parse("quest(read=8, dense_layers=0, block=4)+int8")
    fewer = own.read(shown, query, memory(), Allowance(None, 16, 16, Protection(0, 0)), None)
    assert fewer is not None and fewer.index.shape[-1] == 2


# -- a budget in bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
@pytest.mark.parametrize("code", ["int8", "fp8", "kivi(group=8, residual=16)"])
def test_a_bytes_budget_is_for_the_whole(code: str, share: float) -> None:
    policy = registry.parse(f"knorm+{code}")
    tokens, sink, recent = 400, 2, 6
    shown = view(policy, dense(tokens), sink=sink, recent=recent)
    budget = Allowance.resolve(Budget("bytes", share), tokens, Protection(sink, recent))
    decision = policy.decide(cache(shown), {}, memory(), budget)
    kept = int(decision.facts["keep_tokens"])
    k, v = random_kv(tokens)
    made, seq = paged(k, v)
    made.apply(seq, decision)
    raw = float(made.ledger.slots(seq, 0).counts.sum())
    element = 2.0
    held = raw * 16 * element + sum(segment.nbytes for segment in made.ledger.segments(seq, 0))
    dense_bytes = 2 * tokens * 16 * element
    assert share * 0.97 * dense_bytes < held <= share * dense_bytes
    if code != "kivi(group=8, residual=16)":
        token = 16 + (8 if code == "int8" else 0)  # codes, and a float16 scale and zero for keys and for values
        assert kept == math.floor(share * dense_bytes / (2 * token))


def test_bytes_that_hold_everything_evict_nothing_and_too_few_are_refused() -> None:
    policy = registry.parse("knorm+int8")
    shown = view(policy, dense(40), sink=4, recent=8)

    def decide(share: float) -> list[Edit]:
        budget = Allowance(Budget("bytes", share), math.floor(share * 40), 40, Protection(4, 8))
        return list(policy.decide(cache(shown), {}, memory(), budget).edits[0])

    assert [type(edit).__name__ for edit in decide(0.76)] == ["Quantize"]  # 24 of 32 bytes a token
    with pytest.raises(BudgetError, match=r"bytes=0.2 is 512 bytes, .* come to .*; raise the budget or protect fewer"):
        decide(0.2)


def test_holes_of_an_earlier_eviction_stay_out_of_what_follows() -> None:
    policy = registry.parse("knorm+int8")
    data = ragged(dense(12), [[0, 1, 3, 4, 6, 9], [0, 5, 9]])
    shown = view(policy, data, length=12)
    evict, code = policy.decide(cache(shown), {}, memory(), allowance(4, 12)).edits[0]
    assert isinstance(evict, Evict) and isinstance(code, Quantize) and code.tokens is not None
    assert evict.keep.sum(1).tolist() == [4, 3] and torch.equal(code.tokens, evict.keep & data.alive)
