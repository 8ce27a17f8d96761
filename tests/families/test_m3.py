"""MiniMax-M3: blocks that a trained index selects, recorded, derived again, replayed, and under policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Evict
from kvassay.errors import PolicyError
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Budget
from kvassay.policy.card import Card, Effect, Prefill
from kvassay.policy.indexers import m3_blocks
from kvassay.policy.registry import make
from kvassay.policy.views import CacheView
from kvassay.record.calling import cache_keyword, new_cache
from kvassay.record.derivation import underived
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.lane import scope_of
from kvassay.replay.latency import time_arms
from kvassay.replay.open import open_loop, output_errors
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.trace.verify import verify
from tests.families import models, rules, world
from tests.families.arms import DENSE, PROTECTION, dense_is_the_recorded_model, recording_changes_no_bit
from tests.families.conftest import Recorded
from tests.families.m3_oracle import M3Oracle, blocks_of
from tests.families.world import both
from tests.replay.oracle import code
from tests.replay.plain import top
from tests.replay.watch import Watch
from tests.replay.worlds import World

FAMILY = "minimax_m3"
SPARSE = [1, 2, 3]
BLOCK, TOPK, HEADS, INDEX_DIM, ROW = 4, 3, 2, 16, 32
KEEP, WINDOW, KERNEL = 24, 4, 3
EVICT = Arm(make("snapkv", window=WINDOW, kernel=KERNEL), Budget("keep_tokens", KEEP), PROTECTION)
NORM = Arm(make("knorm"), Budget("keep_tokens", KEEP), PROTECTION)
QUANTISE = Arm(make("int8"), None, PROTECTION)
FED = world.QUESTION + world.ANSWER - 1
TOKENS = world.CONTEXT + world.QUESTION + world.ANSWER


@pytest.fixture
def m3(recorded: Recorded) -> World:
    return recorded(FAMILY)


class TestRecording:
    def test_changes_no_bit(self, m3: World) -> None:
        recording_changes_no_bit(m3, FAMILY)

    def test_rows_and_selection_are_the_models_own(self, m3: World) -> None:
        """Against the stock model's cache, and what its indexers return, one pass over all tokens."""
        model = models.build(FAMILY, attention="eager")
        found: dict[int, Tensor] = {}
        for index in SPARSE:
            module = model.get_decoder().layers[index].self_attn.indexer
            module.register_forward_hook(lambda m, a, out, i=index: found.__setitem__(i, out[0].clone()))
        cache = new_cache(model)
        with torch.inference_mode():
            model(input_ids=torch.tensor([world.ids()]), **{cache_keyword(model): cache})
        for index, held in enumerate(cache.layers):
            torch.testing.assert_close(both(m3.trace, "k", index).transpose(0, 1), held.keys[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(both(m3.trace, "v", index).transpose(0, 1), held.values[0], rtol=0, atol=1e-4)
        for index in SPARSE:
            keys = both(m3.trace, "cache", index, "index_keys")
            torch.testing.assert_close(keys, cache.layers[index].idx_keys[0, 0], rtol=0, atol=1e-4)
            assert listed(both(m3.trace, "selection", index)) == listed(found[index].transpose(0, 1))

    def test_every_selection_rederives(self, m3: World) -> None:
        rows = 0
        for index in SPARSE:
            keys = both(m3.trace, "cache", index, "index_keys")
            queries = both(m3.trace, "index_queries", index).transpose(0, 1)
            positions = torch.arange(TOKENS)
            derived = m3_blocks(queries, keys, positions, block=BLOCK, topk=TOPK, local_blocks=1)
            chosen = listed(both(m3.trace, "selection", index))
            assert listed(derived) == chosen
            for t in range(TOKENS):
                for head in range(HEADS):
                    score = keys[: t + 1].double() @ queries[head, t].double()
                    assert chosen[t][head] == blocks_of(score, torch.ones(t + 1, dtype=torch.bool), BLOCK, TOPK)
                    rows += 1
        assert rows == len(SPARSE) * HEADS * TOKENS
        assert any(row[0] != row[1] for row in chosen)  # each KV head has a list of its own

    def test_outputs_are_masked_attention_over_the_rows(self, m3: World) -> None:
        for layer in m3.trace.layout.layers:
            expected = by_rows(m3, layer.index)
            tap = both(m3.trace, "tap", f"output_{layer.index:03d}").double()
            assert float((tap - expected).abs().max()) < 1e-5 * float(expected.abs().max())

    def test_index_keys_are_stored_once_for_all_heads(self, m3: World) -> None:
        shapes = m3.trace.shapes["prefix/layer_001.safetensors"]
        assert {name: spec.shape for name, spec in shapes.items()} == {
            "k": (world.CONTEXT, HEADS, 16),
            "v": (world.CONTEXT, HEADS, 16),
            "q": (world.CONTEXT, 4, 16),
            "index_keys": (world.CONTEXT, INDEX_DIM),
            "index_queries": (world.CONTEXT, HEADS, INDEX_DIM),
            "selection": (world.CONTEXT, HEADS, TOPK),
        }
        assert "index_keys" not in m3.trace.shapes["prefix/layer_000.safetensors"]


def listed(selection: Tensor) -> list[list[list[int]]]:
    """Blocks by query and head, -1 left out, in order."""
    return [[sorted(b for b in row if b >= 0) for row in rows] for rows in selection.tolist()]


def by_rows(this: World, index: int, alive: Tensor | None = None, first: int = 0) -> Tensor:
    """float64 outputs [tokens, q_heads, v_dim] from recorded rows alone: selected AND causal AND what is `alive`.

    alive: bool [kv_heads, context], what a method keeps; where it drops something the choice is made again
    first: position of the first output
    """
    layer = this.trace.layout.layers[index]
    k, v, q = (both(this.trace, name, index).double() for name in "kvq")
    held = torch.ones(HEADS, TOKENS, dtype=torch.bool)
    if alive is not None:
        held[:, : world.CONTEXT] = alive
    scores = torch.zeros(HEADS, TOKENS, TOKENS, dtype=torch.float64)
    if index in SPARSE:
        keys = both(this.trace, "cache", index, "index_keys").double()
        scores = both(this.trace, "index_queries", index).transpose(0, 1).double() @ keys.T
    out = torch.zeros(TOKENS, 4, 16, dtype=torch.float64)
    for t in range(first, TOKENS):
        for of in range(HEADS):
            mask = held[of, : t + 1].clone()
            if index in SPARSE:
                allowed = torch.zeros_like(mask)
                for b in blocks_of(scores[of, t, : t + 1], mask, BLOCK, TOPK):
                    allowed[b * BLOCK : (b + 1) * BLOCK] = True
                mask &= allowed
            logits = q[t, 2 * of : 2 * of + 2] @ k[: t + 1, of][mask].T * layer.scale
            out[t, 2 * of : 2 * of + 2] = torch.softmax(logits, -1) @ v[: t + 1, of][mask]
    return out[first:]


def attention(this: World, index: int, head: int, t: int) -> Tensor:
    """What the recorded query of position t gives the tokens up to its own, as the model's index let it: [t + 1]."""
    layer, prefix, of = this.trace.layout.layers[index], this.trace.prefix, head // 2
    logits = prefix.k(index)[: t + 1, of].double() @ prefix.q(index)[t, head].double() * layer.scale
    if index in SPARSE:
        hidden = torch.ones(t + 1, dtype=torch.bool)
        selection = prefix.selection(index)
        assert selection is not None
        for b in selection[t, of].tolist():
            hidden[b * BLOCK : (b + 1) * BLOCK] &= b < 0
        logits[hidden] = -math.inf
    return torch.softmax(logits, 0)


def snapkv(this: World, index: int) -> Tensor:
    """bool [kv_heads, context]: what SnapKV keeps of a layer."""
    length = world.CONTEXT
    score = torch.zeros(HEADS, length, dtype=torch.float64)
    for t in range(length - WINDOW, length):
        for head in range(4):
            score[head // 2, : t + 1] += attention(this, index, head, t) / (2 * WINDOW)
    score[:, length - WINDOW :] = 0
    pooled = torch.stack([rules.smooth(row, KERNEL) for row in score])
    pooled[:, length - WINDOW :] = math.inf
    return top(pooled, KEEP, rules.SINK, rules.RECENT, length)


def int8(oracle: M3Oracle) -> None:
    """Every token's keys and values are rounded to 8 bits per head as they are written."""

    def round_off(index: int, position: int) -> None:
        for side in (oracle.k[index], oracle.v[index]):
            for head in range(HEADS):
                side[head, position] = code(side[head, position].float(), 8)

    for position in range(world.CONTEXT):
        for index in range(4):
            round_off(index, position)
    oracle.written = lambda oracle, index: round_off(index, oracle.length - 1)


def by_hand(arm: Arm, this: World) -> M3Oracle:
    """The float64 model under the arm's method."""
    oracle = M3Oracle(this)
    if arm is EVICT:
        oracle.alive = {index: snapkv(this, index) for index in oracle.alive}
    elif arm is NORM:
        score = {index: -k.norm(dim=-1) for index, k in oracle.k.items()}
        oracle.alive = {i: top(s, KEEP, rules.SINK, rules.RECENT, world.CONTEXT) for i, s in score.items()}
    elif arm is QUANTISE:
        int8(oracle)
    return oracle


def test_dense_is_the_recorded_model(m3: World, watch: Watch) -> None:
    dense_is_the_recorded_model(m3, watch, M3Oracle(m3).answer(m3.trace.branches[0]))


def test_a_prefill_of_its_own_is_dense_again(m3: World, watch: Watch) -> None:
    own = Arm(make("dense"), None, PROTECTION, prefill=Prefill.OWN)
    watch.run(m3, [DENSE, own])
    torch.testing.assert_close(watch.logits[own.label, 0], watch.logits["dense", 0], rtol=0, atol=1e-4)


def test_policies_are_the_methods_by_hand(m3: World, watch: Watch) -> None:
    arms = [EVICT, NORM, QUANTISE]
    rows = {row.arm: row for row in watch.run(m3, [DENSE, *arms])}
    dense, branch = watch.logits["dense", 0].double(), m3.trace.branches[0]
    for arm in [DENSE, *arms]:
        oracle = by_hand(arm, m3)
        expected, found = oracle.answer(branch), watch.logits[arm.label, 0].double()
        worst = float((found - expected).abs().max())
        assert worst < 1e-3, f"{arm.label}: {worst}"
        if arm is not DENSE:
            far = 0.003 if arm is QUANTISE else 0.02
            assert float((dense - expected).abs().max()) > far * float(dense.abs().max())
        steps = torch.tensor([oracle.read[index][:FED] for index in range(4)]).double()
        assert rows[arm.label].selected_tokens == pytest.approx(float(steps.mean()))


def test_an_evicted_token_is_masked_and_wins_its_block_no_place(m3: World) -> None:
    """In the oracle that the replay equals: blocks with holes are read, and the choice is not the model's own."""
    branch, holes, changed = m3.trace.branches[0], 0, 0
    dense, evicted = M3Oracle(m3), by_hand(NORM, m3)
    kept = {index: alive.clone() for index, alive in evicted.alive.items()}
    for oracle in (dense, evicted):
        oracle.answer(branch)
    for index in SPARSE:
        changed += sum(a != b for a, b in zip(dense.chosen[index], evicted.chosen[index], strict=True))
        for lists in evicted.chosen[index]:
            for head, blocks in enumerate(lists):
                inside = [kept[index][head, b * BLOCK : (b + 1) * BLOCK] for b in blocks]
                assert all(bool(part.any()) for part in inside if len(part))  # no block is read for dead tokens alone
                holes += sum(not bool(part.all()) for part in inside)
    assert holes > 20 and changed > 10


def test_index_bytes_are_counted_apart(m3: World, watch: Watch) -> None:
    rows = {row.arm: row for row in watch.run(m3, [DENSE, NORM, QUANTISE])}
    element, held, seen = m3.trace.layout.element_bytes, world.CONTEXT + FED, world.CONTEXT + (FED + 1) / 2
    dense = rows["dense"]
    assert dense.index_bytes == element * 3 * held * INDEX_DIM
    assert dense.retained_bytes == element * 4 * held * HEADS * ROW + dense.index_bytes
    assert dense.index_read_bytes == element * 3 * seen * INDEX_DIM
    assert dense.pooled_bytes == 0
    assert rows[QUANTISE.label].index_bytes == dense.index_bytes  # a code is still scored by its token's index key
    kept = by_hand(NORM, m3).alive
    union = sum(int(kept[index].any(0).sum()) + FED for index in SPARSE)  # a key goes when no KV head holds its token
    assert rows[NORM.label].index_bytes == element * union * INDEX_DIM < dense.index_bytes


def test_the_open_loop_reads_what_the_index_selects(m3: World) -> None:
    assert max(found.error for found in output_errors(m3.trace)) < 1e-6
    rows = {(row.arm, row.layer): row for row in open_loop(m3.trace, [DENSE, EVICT])}
    for index in range(4):
        dense = by_rows(m3, index, first=world.CONTEXT)
        evicted = by_rows(m3, index, snapkv(m3, index), first=world.CONTEXT)
        error = float((evicted - dense).norm() / dense.norm())
        assert rows["dense", index].output_error == 0
        assert rows[EVICT.label, index].output_error == pytest.approx(error, rel=1e-4)
        assert rows[EVICT.label, index].in_scope


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("locks", "redundant: the trained index already selects blocks per KV head"),
        ("quest", "redundant: the trained index already selects blocks per KV head"),
        ("exact_mass", "redundant: the trained index already selects blocks per KV head"),
        ("m3-exact-mass", "redundant: the trained index already selects blocks per KV head"),
        ("epikv", "blocked: reused slots break the order of positions"),
        ("kara", "blocked: compacted tokens leave the blocks of 128"),
        ("selkv", "blocked: compacted tokens leave the blocks of 128"),
        ("nearest-merge", "blocked: a token merged into another block's"),
    ],
)
def test_what_has_no_place_beside_the_index_is_left_out_by_name(m3: World, name: str, reason: str) -> None:
    policy = make(name)
    unit = "keep_tokens" if "keep_tokens" in policy.card.budgets else min(policy.card.budgets, default=None)
    arm = Arm(policy, None if unit is None else Budget(unit, KEEP), PROTECTION)
    assert not_applicable(m3.trace, [arm], 16)[arm.label].startswith(reason)
    assert not_applicable(m3.trace, [arm], 16)[arm.label].endswith("(3 of 4 layers, block-sparse)")
    with pytest.raises(PolicyError, match=f"'{name}' cannot act on minimax_m3_vl_text: {reason}"):
        scope_of(m3.trace.layout, policy)


@dataclass(frozen=True)
class Compacting(Policy):
    """Drops the token at position 20 and closes the gap."""

    card: ClassVar[Card] = Card("compacting", frozenset({Effect.EVICT}), "test", "drops one token", budgets=frozenset())

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        return Decision({i: [Evict(layer.positions != 20)] for i, layer in cache.layers.items()}, compact=True)


def test_tokens_do_not_move_where_blocks_are_chosen_by_place(m3: World, watch: Watch) -> None:
    with pytest.raises(PolicyError, match="'compacting' compacts, but in layer 1 the model's index chooses blocks"):
        watch.run(m3, [DENSE, Arm(Compacting(), None, PROTECTION)])


def test_a_timed_token_reads_what_the_index_chose(m3: World) -> None:
    (dense,) = time_arms(m3.loaded, m3.trace, [DENSE], Protocol(free_tokens=0), rounds=1)
    tokens = world.CONTEXT + 1  # 112: the query's own block is full
    assert dense.read_bytes == 4 * HEADS * ROW * (tokens + len(SPARSE) * TOPK * BLOCK)
    assert dense.policy > 0  # the choice itself


class TestProof:
    def test_a_recording_is_proved(self, m3: World) -> None:
        assert verify(m3.trace.path, proofs=[underived]).problems == []

    @pytest.mark.parametrize("fault", ["swapped", "missing", "own", "twice"])
    def test_a_wrong_choice_is_found(self, fault: str, m3: World) -> None:
        trace = Trace.open(m3.trace.path)
        selection = trace.prefix.selection(2)
        assert selection is not None
        chosen = selection[60, 1]  # mapped: what is written here stays in memory
        own, others = 60 // BLOCK, [b for b in chosen.tolist() if b != 60 // BLOCK]
        unread = min(set(range(own)) - set(others))
        row = {"swapped": [own, others[0], unread], "missing": [own, others[0], -1]}
        row |= {"own": [*others, unread], "twice": [own, others[0], others[0]]}
        chosen.copy_(torch.tensor(row[fault]))
        (line,) = underived(trace)
        assert "prefix/layer_002.safetensors: 'selection' of 1 queries" in line and line.endswith("position 60")
