"""Drafting and verifying in the replay: what is drafted leaves no trace, what is accepted is what dense says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from kvassay.cache.edits import Decision, Evict
from kvassay.errors import ExperimentError, IllegalEdit
from kvassay.measure.acceptance import COMPRESSED, NGRAM, AcceptanceResult
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.registry import make, parse
from kvassay.policy.views import CacheView, StepView
from kvassay.replay import asking
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import fit_offline
from kvassay.replay.closed import Compressed, Replay
from kvassay.replay.drafting import Lookup, Pair, Speaker, Speculation, forked, free_running, propose
from kvassay.replay.feeding import feed
from kvassay.replay.lane import Lane
from kvassay.replay.protocol import Protocol
from kvassay.replay.speculation import replay_speculation
from tests.record import tiny
from tests.replay.watch import Watch, contents, same
from tests.replay.worlds import World

PROTECTION = Protection(2, 8)
DENSE = Arm(make("dense"), None, PROTECTION)
KNORM = Arm(make("knorm"), Budget("keep_tokens", 0.8), PROTECTION)
HOW = Speculation(k=4, tokens=6, ngram_min=1, ngram_max=3)


@dataclass(frozen=True)
class Restless(Policy):
    """Decides and observes at every step, by chance, by queries and by hidden states; reuses slots. Notes in its
    state how often it was asked, and the last position it saw."""

    card: ClassVar[Card] = Card(
        name="restless",
        effects=frozenset({Effect.EVICT}),
        source="test",
        summary="test",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.KEYS, Evidence.QUERIES, Evidence.HIDDEN}),
        taps=frozenset({1}),
        budgets=frozenset(),
    )

    def observe(self, state: State, step: StepView) -> State:
        asked = state.get("asked", torch.zeros(1))
        return {"asked": asked + 1, "seen": torch.tensor([step.positions[-1]]), "tap": step.hidden[1].sum(0)}

    def decide(
        self, cache: CacheView, scores: Mapping[int, torch.Tensor], memory: Memory, budget: Allowance
    ) -> Decision:
        layers = cache.layers
        first = next(iter(layers.values()))
        assert int(first.positions.max()) == int(memory.state["seen"]) == cache.length - 1
        queries = first.queries(64)
        assert int(queries.positions[-1]) == cache.length - 1 and len(queries.positions) == 64
        alive = first.positions[0]
        alive = alive[(alive >= 2) & (alive < cache.length - 8)]
        victim = int(alive[torch.randint(len(alive), (1,), generator=memory.generator())])
        return Decision({i: [Evict(layer.positions != victim)] for i, layer in layers.items()}, reuse=victim)


ARMS = [
    DENSE,
    KNORM,
    Arm(make("tova"), Budget("keep_tokens", 0.3), PROTECTION),
    Arm(make("quest", dense_layers=0), Budget("read_tokens", 0.5), PROTECTION),
    Arm(make("fp8"), None, PROTECTION),
    Arm(make("kivi", group=16, residual=32), None, PROTECTION),
    Arm(make("paged-eviction"), Budget("keep_tokens", 0.5), PROTECTION),
    Arm(Restless(), None, PROTECTION),
    Arm(parse("quest(dense_layers=0)+kivi(group=16, residual=32)"), Budget("read_tokens", 0.5), PROTECTION),
]


def started(world: World, arms: Sequence[Arm]) -> tuple[Replay, list[Compressed]]:
    artefacts = fit_offline([arm.policy for arm in arms], world.trace, world.calibration)
    replay = Replay(world.loaded, world.trace, arms, Protocol(free_tokens=16), artefacts, 4)
    return replay, [replay.compressed(arm) for arm in arms]


def state(lane: Lane) -> dict[str, Any]:
    """All that a policy or a later step could find in a lane, bit by bit; tensors as nested lists."""
    rng = lane.memory.generator().get_state()
    queries = {layer: (found.q.tolist(), found.positions.tolist()) for layer, found in lane.queries.items()}
    return {
        "tokens": lane.cache.ledger.tokens(lane.seq),
        "uncommitted": lane.uncommitted,
        "state": {name: x.tolist() for name, x in lane.memory.state.items()},
        "side": {layer: {name: x.tolist() for name, x in side.items()} for layer, side in lane.side.items()},
        "queries": queries,
        "previous": {layer: chosen.index.tolist() for layer, chosen in lane.previous.items()},
        "rng": rng.tolist(),
        "reuse": lane.reuse,
        "generated": lane.generated,
        "draft": lane.draft,
    }


def answer_lanes(replay: Replay, contexts: Sequence[Compressed], branch: Any) -> list[Lane]:
    lanes = replay.forks(contexts)
    feed(replay.engine, lanes, [branch.token_ids.tolist()[: branch.question_tokens]] * len(lanes), last=0)
    return lanes


@pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
def test_a_rejected_draft_leaves_no_trace(world: World, watch: Watch) -> None:
    arms = ARMS if world.trace.header.model.name.startswith("tiny-llama") else ARMS[:4]
    replay, compressed = started(world, arms)
    lanes = answer_lanes(replay, compressed, world.trace.branches[0])
    twins = [lane.fork() for lane in lanes]
    for token in world.trace.branches[0].token_ids.tolist()[-2:]:
        before = [state(lane) for lane in lanes]
        drafters = [Speaker(replay.engine, lane, [token]) for lane in lanes]
        propose(drafters, 3)
        assert [lane.uncommitted for lane in lanes] == [3] * len(lanes)
        for drafter, was in zip(drafters, before, strict=True):
            replay.engine.settle(drafter.lane, 0)
            assert state(drafter.lane) == was
        # One more draft, of which the first token stays; the twin never drafted.
        propose(drafters, 2)
        for drafter in drafters:
            drafter.settle([], 0, 0)
        feed(replay.engine, twins, [[token]] * len(twins), last=1)
        replay.cache.check()
        for lane, twin in zip(lanes, twins, strict=True):
            assert lane.arm is twin.arm
            if not lane.policy.decides_at(When.ON_WRITE):  # the twin's tokens are encoded before they read themselves
                assert same(contents(replay.cache, lane.seq), contents(replay.cache, twin.seq)), lane.arm.label
            else:
                held = replay.cache.layer(lane.seq, 0)
                assert held.encoded is not None and bool(held.encoded.all())
            assert state(lane) == state(twin), lane.arm.label
    assert watch.steps > 20


def test_a_draft_partly_accepted_leaves_what_was_accepted(llama: World, watch: Watch) -> None:
    arms = [DENSE, KNORM, ARMS[3]]  # what decides at every step decides once a round, so it may differ
    replay, compressed = started(llama, arms)
    lanes = answer_lanes(replay, compressed, llama.trace.branches[0])
    twins = [lane.fork() for lane in lanes]
    for lane, twin in zip(lanes, twins, strict=True):
        fed = [5, 6, 7, 8, 9]
        for token in fed:
            replay.engine.forward([lane], [[token]], 1, committed=False)
        replay.engine.settle(lane, 3)
        for token in fed[:3]:
            replay.engine.forward([twin], [[token]], 1)
        assert lane.length == twin.length and lane.uncommitted == 0
        assert same(contents(replay.cache, lane.seq), contents(replay.cache, twin.seq))
        assert state(lane) == state(twin)


def test_a_policy_of_every_step_is_asked_once_a_round_and_sees_what_is_committed(llama: World, watch: Watch) -> None:
    replay, compressed = started(llama, [DENSE, Arm(Restless(), None, PROTECTION)])
    lane = answer_lanes(replay, compressed, llama.trace.branches[0])[1]
    asked = float(lane.memory.state["asked"])
    for token in (5, 6, 7):
        replay.engine.forward([lane], [[token]], 1, committed=False)
    assert float(lane.memory.state["asked"]) == asked
    replay.engine.settle(lane, 2)  # Restless itself asserts that it sees position length - 1, and no later one
    assert float(lane.memory.state["asked"]) == asked + 1
    assert lane.memory.state["seen"].tolist() == [lane.length - 1]
    assert lane.reuse is not None


@dataclass(frozen=True)
class Often(Policy):
    """Is asked every four tokens, and changes nothing."""

    interval: int = 4

    card: ClassVar[Card] = Card(
        name="often",
        effects=frozenset({Effect.EVICT}),
        source="test",
        summary="test",
        when=frozenset({When.EVERY_N}),
        budgets=frozenset(),
    )

    def decide(
        self, cache: CacheView, scores: Mapping[int, torch.Tensor], memory: Memory, budget: Allowance
    ) -> Decision:
        return Decision()


def test_a_policy_of_every_n_tokens_is_asked_when_a_round_passes_the_nth(
    llama: World, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, compressed = started(llama, [DENSE, Arm(Often(), None, PROTECTION)])
    lane = answer_lanes(replay, compressed, llama.trace.branches[0])[1]
    asked: list[int] = []
    monkeypatch.setattr(asking, "decide", lambda lane, evidence, moment: asked.append(lane.generated))
    assert lane.generated == 6
    for accepted in (1, 2, 2, 0, 1, 4, 3):  # 7, 9, 11, 11, 12, 16, 19
        feed(replay.engine, [lane], [[5, 6, 7, 8]], last=1, committed=False)
        replay.engine.settle(lane, accepted)
    assert asked == [9, 12, 16]


def test_nobody_edits_while_tokens_are_uncommitted(llama: World, watch: Watch) -> None:
    replay, compressed = started(llama, [DENSE, ARMS[2], ARMS[3], ARMS[7]])
    _, lane, quest, restless = lanes = answer_lanes(replay, compressed, llama.trace.branches[0])
    feed(replay.engine, lanes, [[5]] * 4, last=1, committed=False)
    before = contents(replay.cache, lane.seq)
    evidence = asking.Evidences(recent=lambda layer: lane.queries[layer])
    refusals = {
        "edited": lambda: asking.decide(lane, evidence),
        "forked": lane.fork,
        "summarised": lambda: asking.summarize(quest),
        "observed": lambda: asking.observe(restless, [5], evidence, {}),
    }
    for what, act in refusals.items():
        with pytest.raises(IllegalEdit, match=rf"cannot be {what}: 1 of its 411 tokens are uncommitted"):
            act()
    layer = lane.cache.layer(lane.seq, 1)
    with pytest.raises(IllegalEdit, match="Evict drops 2 uncommitted tokens"):
        asking.apply(lane, Decision({1: [Evict(layer.positions < lane.length - 1)]}))
    with pytest.raises(IllegalEdit, match="uncommitted"):
        asking.apply(lane, Decision(reuse=int(layer.positions.min()) + 3))
    with pytest.raises(IllegalEdit, match="has 1 uncommitted tokens: settle them first"):
        replay.engine.forward([lane], [[6]], 1)
    assert same(contents(replay.cache, lane.seq), before)
    with pytest.raises(IllegalEdit, match="uncommitted tokens, not"):
        replay.engine.settle(lane, 2)
    replay.engine.settle(lane, 1)
    assert lane.uncommitted == 0


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The model's own greedy continuation, computed anew for every token."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(model(input_ids=torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
    return found[len(ids) :]


def text(world: World, branch: int) -> list[int]:
    """Context and question."""
    asked = world.trace.branches[branch]
    return [*world.trace.prefix.token_ids.tolist(), *asked.token_ids.tolist()[: asked.question_tokens]]


@pytest.mark.parametrize("world", ["llama", "gemma"], indirect=True)
def test_speculative_decoding_says_what_dense_says(world: World, watch: Watch) -> None:
    arms = [DENSE, KNORM, ARMS[2], ARMS[3]]
    replay, compressed = started(world, arms)
    whole = text(world, 0)
    wanted = greedy(world.loaded.model, whole, 10)
    lanes = replay.forks(compressed)
    feed(replay.engine, lanes, [whole[world.trace.prefix.tokens : -1]] * len(lanes), last=0)
    drafters = [*forked(replay.engine, lanes, whole[-1]), Lookup(list(whole), 1, 3)]
    pairs = [Pair(drafter, forked(replay.engine, lanes[:1], whole[-1])[0]) for drafter in drafters]
    free_running(pairs, 4, 10)
    assert [pair.emitted[:10] for pair in pairs] == [wanted] * 5
    # Dense drafting for dense is always right; others need not be, and still everything said is dense's.
    assert [(one.drafted, one.accepted) for one in pairs[0].rounds] == [(4, 4)] * 2
    assert sum(one.drafted for one in pairs[4].rounds) > 0
    if len(set(wanted)) > 1:
        assert all(len(pair.rounds) > 2 for pair in pairs[1:])
    for pair in pairs:
        assert sum(one.accepted + 1 for one in pair.rounds) == len(pair.emitted)
        assert replay.cache.ledger.tokens(pair.target.lane.seq) == tuple([*whole, *pair.emitted][:-1])
        pair.free()
    replay.cache.check()


def test_a_compressed_target_says_what_it_says_alone(llama: World, watch: Watch) -> None:
    arms = [DENSE, KNORM, ARMS[3]]
    replay, compressed = started(llama, arms)
    whole = text(llama, 0)
    watch.proving = False
    rows = watch.run(llama, arms, free=12)
    lanes = replay.forks(compressed)
    feed(replay.engine, lanes, [whole[llama.trace.prefix.tokens : -1]] * len(lanes), last=0)
    targets = forked(replay.engine, lanes, whole[-1])
    pairs = [Pair(Lookup(list(whole), 1, 3), target) for target in targets]
    free_running(pairs, 3, 12)
    alone = [[int(word) for word in row.generated.split()] for row in rows if row.branch == 0]
    assert [pair.emitted[:12] for pair in pairs] == alone
    assert alone[0] != alone[1]


@pytest.fixture(scope="module")
def measured(llama: World) -> list[AcceptanceResult]:
    return replay_speculation(llama.loaded, llama.trace, ARMS[:4], Protocol(), HOW, {COMPRESSED: None, NGRAM: None})


def test_rows_are_complete_and_positions_the_same_for_all_arms(llama: World, measured: list[AcceptanceResult]) -> None:
    found = [(r.branch, r.drafter, r.arm, r.mode, r.k) for r in measured]
    wanted = [
        (branch, drafter, arm.label, mode, k)
        for branch in (0, 1)
        for drafter in (COMPRESSED, NGRAM)
        for arm in ARMS[:4]
        for mode, k in (*(("teacher_forced", k) for k in range(1, 5)), ("free_running", 4))
    ]
    assert sorted(found) == sorted(wanted)
    for row in measured:
        assert row.target == ("dense" if row.drafter == COMPRESSED else row.arm)
        if row.mode == "teacher_forced":
            assert row.rounds == (6, 4)[row.branch]  # one per recorded position, at most `tokens`
    ngram = [r for r in measured if r.drafter == NGRAM and r.mode == "teacher_forced"]
    for one in ngram:  # the same text for all arms, so the same drafts
        same_place = [r for r in ngram if (r.branch, r.k) == (one.branch, one.k)]
        assert {r.num_draft_tokens_per_pos for r in same_place} == {one.num_draft_tokens_per_pos}
    dense = [r for r in measured if r.arm == "dense" and r.drafter == COMPRESSED]
    assert all(r.acceptance_rate == 1 and r.expected_acceptance == pytest.approx(1, abs=1e-5) for r in dense)


def test_the_first_draft_token_is_the_closed_loops(
    llama: World, watch: Watch, measured: list[AcceptanceResult]
) -> None:
    """At draft position 0 acceptance is what the teacher-forced logits of the same positions say."""
    watch.run(llama, ARMS[:4])
    for row in measured:
        if row.mode != "teacher_forced":
            continue
        dense, arm = (watch.logits[label, row.branch][:6].double() for label in ("dense", row.arm))
        ids = llama.trace.branches[row.branch].token_ids.tolist()
        if row.drafter == COMPRESSED:
            assert row.num_accepted_tokens_per_pos[0] == int((dense.argmax(-1) == arm.argmax(-1)).sum())
            overlap = torch.minimum(dense.softmax(-1), arm.softmax(-1)).sum(-1)
            assert row.overlap_per_pos[0] == pytest.approx(float(overlap.sum()), abs=1e-4)
        else:
            texts = [[*text(llama, row.branch), *ids[6 : 6 + at]] for at in range(len(arm))]
            drafts = [Lookup(words, 1, 3).lookup(1) for words in texts]
            hits = [int(best) in draft for best, draft in zip(arm.argmax(-1), drafts, strict=True)]
            assert row.num_accepted_tokens_per_pos[0] == sum(hits)
            likely = [float(p[draft].sum()) for p, draft in zip(arm.softmax(-1), drafts, strict=True)]
            assert row.overlap_per_pos[0] == pytest.approx(sum(likely), abs=1e-4)


def test_accepted_lengths_are_common_beginnings_of_greedy_texts(
    llama: World, watch: Watch, measured: list[AcceptanceResult]
) -> None:
    """Teacher-forced: what knorm would say alone from each position, against what dense would."""
    replay, compressed = started(llama, [DENSE, KNORM])
    ids = llama.trace.branches[0].token_ids.tolist()
    lengths = []
    for at in range(6):
        lanes = replay.forks(compressed)
        logits = feed(replay.engine, lanes, [ids[: 6 + at]] * 2, last=1)
        says = [[int(one[-1].argmax())] for one in logits]
        for _ in range(3):
            logits = feed(replay.engine, lanes, [mine[-1:] for mine in says], last=1)
            says = [[*mine, int(one[-1].argmax())] for mine, one in zip(says, logits, strict=True)]
        lengths.append(next((i for i in range(4) if says[0][i] != says[1][i]), 4))
    assert max(lengths) > 0
    for k in range(1, 5):
        row = next(r for r in measured if (r.arm, r.drafter, r.branch) == (KNORM.label, COMPRESSED, 0) and r.k == k)
        assert row.mode == "teacher_forced"
        assert row.num_accepted_tokens == sum(min(length, k) for length in lengths)


def test_a_second_model_drafts(llama: World, watch: Watch) -> None:
    watch.proving = False
    other = tiny.build("llama", seed=9)
    models = {
        "same": llama.loaded,
        "other": replace(llama.loaded, model=other, identity=replace(llama.loaded.identity, weights_sha256="9" * 64)),
    }
    found = replay_speculation(llama.loaded, llama.trace, [DENSE, KNORM], Protocol(), HOW, models)
    by = {(r.drafter, r.arm): r for r in found if (r.branch, r.mode, r.k) == (0, "teacher_forced", 4)}
    assert by["same", "dense"].acceptance_rate == 1 and by["other", "dense"].acceptance_rate < 0.5
    # Dense drafting for knorm is knorm drafting for dense, at the first token.
    own = replay_speculation(llama.loaded, llama.trace, [DENSE, KNORM], Protocol(), HOW, {COMPRESSED: None})
    mine = next(r for r in own if (r.branch, r.mode, r.k, r.arm) == (0, "teacher_forced", 4, KNORM.label))
    theirs = by["same", KNORM.label]
    assert mine.num_accepted_tokens_per_pos[0] == theirs.num_accepted_tokens_per_pos[0]
    assert mine.overlap_per_pos[0] == pytest.approx(theirs.overlap_per_pos[0], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tokenizer_sha256": "2" * 64},
            r"cannot draft for tiny-llama-2: its tokenizer \(222222222222\) is not the same",
        )
    ],
)
def test_a_draft_model_of_another_tokenizer_is_refused(
    llama: World, watch: Watch, change: dict[str, Any], words: str
) -> None:
    other = replace(llama.loaded, identity=replace(llama.loaded.identity, **change))
    with pytest.raises(ExperimentError, match=words):
        replay_speculation(llama.loaded, llama.trace, [DENSE], Protocol(), HOW, {"other": other})
