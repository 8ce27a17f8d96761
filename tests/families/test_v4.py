"""DeepSeek-V4: a window of raw vectors, entries of several tokens, and an index over these: recorded and replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvassay.errors import ExperimentError, IllegalEdit, PolicyError
from kvassay.policy.budget import Budget
from kvassay.policy.indexers import v4_entries
from kvassay.policy.registry import BUILT_IN, make
from kvassay.record.calling import cache_keyword, new_cache
from kvassay.record.derivation import underived
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.closed import Replay
from kvassay.replay.lane import scope_of
from kvassay.replay.latency import time_arms
from kvassay.replay.open import open_loop, output_errors
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.trace.verify import verify
from tests.families import models, world
from tests.families.arms import AGAIN, DENSE, PROTECTION, dense_is_the_recorded_model, recording_changes_no_bit
from tests.families.conftest import Recorded
from tests.families.world import both
from tests.replay.watch import Watch
from tests.replay.worlds import World

FAMILY = "deepseek_v4"
WINDOW, DIM, INDEX_DIM, TOPK = 8, 32, 16, 3
RATIO = {1: 8, 2: 4, 4: 4, 5: 8}
"""Tokens per entry, of the layers that have any."""
INDEXED = [2, 4]
FED = world.QUESTION + world.ANSWER - 1
TOKENS = world.CONTEXT + world.QUESTION + world.ANSWER


@pytest.fixture
def v4(recorded: Recorded) -> World:
    return recorded(FAMILY)


class TestRecording:
    def test_changes_no_bit(self, v4: World) -> None:
        recording_changes_no_bit(v4, FAMILY)

    def test_rows_and_selection_are_the_models_own(self, v4: World) -> None:
        """Against the stock model's cache, and what its indexers return, one pass over all tokens."""
        model = models.build(FAMILY, attention="eager")
        found: dict[int, Tensor] = {}
        for index in INDEXED:
            module = model.get_decoder().layers[index].self_attn.compressor.indexer
            module.register_forward_hook(lambda m, a, out, i=index: found.__setitem__(i, out[0].clone()))
        cache = new_cache(model)
        with torch.inference_mode():
            model(input_ids=torch.tensor([world.ids()]), **{cache_keyword(model): cache})
        for index, held in enumerate(cache.layers):
            rows = both(v4.trace, "k", index)
            assert torch.equal(rows, both(v4.trace, "v", index))  # key and value in one
            torch.testing.assert_close(rows[1 - WINDOW :, 0], held.keys[0, 0], rtol=0, atol=1e-4)
            if index in RATIO:
                entries = both(v4.trace, "cache", index, "pooled")
                assert entries.shape == (TOKENS // RATIO[index], DIM)
                torch.testing.assert_close(entries, held.compressed_kv["compressor"][0], rtol=0, atol=1e-4)
        for index in INDEXED:
            keys = both(v4.trace, "cache", index, "index_keys")
            torch.testing.assert_close(keys, cache.layers[index].compressed_kv["indexer"][0], rtol=0, atol=1e-4)
            assert listed(both(v4.trace, "selection", index)[:, 0]) == listed(found[index])

    def test_every_selection_rederives(self, v4: World) -> None:
        for index in INDEXED:
            keys, weights = both(v4.trace, "cache", index, "index_keys"), both(v4.trace, "index_weights", index)
            queries = both(v4.trace, "index_queries", index).transpose(0, 1)
            chosen = listed(both(v4.trace, "selection", index)[:, 0])
            derived = v4_entries(queries, keys, weights, torch.arange(TOKENS), topk=TOPK, ratio=RATIO[index])
            assert listed(derived) == chosen
            for t, row in enumerate(chosen):
                there = (t + 1) // RATIO[index]
                products = (queries[:, t].double() @ keys[:there].double().T).relu()
                score = (weights[t].double()[:, None] * products).sum(0)
                assert row == sorted(score.topk(min(TOPK, there)).indices.tolist())
        assert {len(row) for row in chosen} == {0, 1, 2, 3}

    def test_outputs_are_attention_over_window_entries_and_sink(self, v4: World) -> None:
        for index in range(6):
            expected, tap = by_rows(v4, index), both(v4.trace, "tap", f"output_{index:03d}").double()
            assert float((tap - expected).abs().max()) < 1e-5 * float(expected.abs().max())

    def test_what_a_trace_holds(self, v4: World) -> None:
        shapes = {
            index: {name: spec.shape for name, spec in v4.trace.shapes[f"prefix/layer_{index:03d}.safetensors"].items()}
            for index in range(6)
        }
        window = {"latent": (world.CONTEXT, 1, DIM), "q": (world.CONTEXT, 4, DIM)}
        heavy = {**window, "pooled": (world.CONTEXT // 8, DIM)}
        chosen = {
            **window,
            "pooled": (world.CONTEXT // 4, DIM),
            "index_keys": (world.CONTEXT // 4, INDEX_DIM),
            "index_queries": (world.CONTEXT, 8, INDEX_DIM),
            "index_weights": (world.CONTEXT, 8),
            "selection": (world.CONTEXT, 1, TOPK),
        }
        assert shapes == {0: window, 1: heavy, 2: chosen, 3: window, 4: chosen, 5: heavy}

    def test_block_tables_are_those_of_the_windows(self, v4: World) -> None:
        report = verify(v4.trace.path)
        assert report.ok
        (group,) = v4.trace.overlay()[0].groups
        assert group.layers == (0, 1, 2, 3, 4, 5) and group.window == WINDOW


def listed(selection: Tensor) -> list[list[int]]:
    """Entries by query, -1 left out, in order."""
    return [sorted(e for e in row if e >= 0) for row in selection.tolist()]


def by_rows(this: World, index: int) -> Tensor:
    """float64 outputs [tokens, q_heads, dim] from recorded rows: window, selected entries and sink in one softmax."""
    q, rows = both(this.trace, "q", index).double(), both(this.trace, "k", index)[:, 0].double()
    sinks = torch.tensor(this.trace.header.sinks[index], dtype=torch.float64)
    entries = both(this.trace, "cache", index, "pooled").double() if index in RATIO else rows[:0]
    chosen = listed(both(this.trace, "selection", index)[:, 0]) if index in INDEXED else None
    out = torch.zeros(TOKENS, 4, DIM, dtype=torch.float64)
    for t in range(TOKENS):
        read = list(range((t + 1) // RATIO[index])) if index in RATIO else []
        read = read if chosen is None else chosen[t]
        held = torch.cat([rows[max(0, t - WINDOW + 1) : t + 1], entries[read]])
        logits = torch.cat([q[t] @ held.T * DIM**-0.5, sinks[:, None]], 1)
        out[t] = torch.softmax(logits, -1)[:, :-1] @ held
    return out


def test_dense_is_the_recorded_model(v4: World, watch: Watch) -> None:
    with torch.inference_mode():
        exact = v4.exact(input_ids=torch.tensor([world.ids()]), use_cache=False).logits[0]
    rows = dense_is_the_recorded_model(v4, watch, exact[-world.ANSWER - 1 : -1], free=4)
    assert rows[0].generated == rows[1].generated


def test_bytes_are_counted_by_what_they_are(v4: World, watch: Watch) -> None:
    (row,) = watch.run(v4, [DENSE])
    element, held = v4.trace.layout.element_bytes, world.CONTEXT + FED
    sliding = element * 6 * WINDOW * DIM
    assert row.pooled_bytes == element * DIM * sum(held // ratio for ratio in RATIO.values())
    assert row.index_bytes == element * INDEX_DIM * 2 * (held // 4)
    assert row.retained_bytes == sliding + row.pooled_bytes + row.index_bytes
    steps = [world.CONTEXT + 1 + step for step in range(FED)]  # tokens when each query is asked
    scored = sum(2 * (tokens // 4) for tokens in steps) / FED * INDEX_DIM
    entries = sum(2 * (tokens // 8) + 2 * TOPK for tokens in steps) / FED * DIM
    assert row.index_read_bytes == pytest.approx(element * scored)
    assert row.read_bytes == pytest.approx(sliding + element * (scored + entries))
    assert row.selected_tokens == pytest.approx(WINDOW)


def test_the_open_loop_is_the_recorded_attention(v4: World) -> None:
    errors = output_errors(v4.trace)
    assert {found.layer for found in errors} == set(range(6)) and max(found.error for found in errors) < 1e-6
    rows = open_loop(v4.trace, [DENSE])
    assert [row.output_error for row in rows] == [0.0] * 6
    mean = sum(2 * ((world.CONTEXT + 1 + t) // 4) for t in range(FED + 1)) / (FED + 1) / 2
    assert rows[2].dense_bytes == rows[2].read_bytes
    assert rows[2].read_bytes == pytest.approx(2 * ((WINDOW + TOPK) * DIM + mean * INDEX_DIM))


def test_forks_keep_compressors_of_their_own(v4: World) -> None:
    replay = Replay(v4.loaded, v4.trace, [DENSE], Protocol(free_tokens=0))
    done = replay.compressed(DENSE)
    one, other = replay.forks([done, done])
    replay.engine.forward([one], [[5, 6, 7, 8, 9]], last=0)
    for lane, tokens in ((done.lane, world.CONTEXT), (other, world.CONTEXT), (one, world.CONTEXT + 5)):
        assert lane.compressors is not None
        counts = {index: len(lane.compressors.entries(index)) for index in RATIO}
        assert counts == {index: tokens // ratio for index, ratio in RATIO.items()}
    for index in RATIO:
        assert other.compressors is not None
        recorded = v4.trace.prefix.cache(index, "pooled")
        torch.testing.assert_close(other.compressors.entries(index), recorded, rtol=0, atol=1e-4)
    with pytest.raises(IllegalEdit, match="compressed entries cannot be taken back"):
        one.extend([5], committed=False)


def test_every_policy_but_dense_is_refused_by_name(v4: World) -> None:
    reasons = {}
    for name in (name for name in BUILT_IN if name != "dense"):
        policy = make(name)
        unit = "keep_tokens" if "keep_tokens" in policy.card.budgets else min(policy.card.budgets, default=None)
        arm = Arm(policy, None if unit is None else Budget(unit, 0.5), PROTECTION)
        reasons[name] = not_applicable(v4.trace, [arm], 16)[arm.label]
        with pytest.raises(PolicyError, match=f"'{name}' cannot act on deepseek_v4: (blocked|redundant): "):
            scope_of(v4.trace.layout, policy)
    told = "blocked: an entry stands for several tokens: a decision per token has nothing to act on"
    told += " (4 of 6 layers, pooled)"
    assert reasons["snapkv"] == reasons["random"] == reasons["paged-eviction"] == reasons["kara"] == told
    for name in ("int8", "kivi", "fp8"):
        assert reasons[name].startswith("blocked: entries stay with the model's own compressors")
    assert reasons["locks"].startswith("redundant: a trained index already selects pooled entries")
    assert reasons["dynacalkv"].startswith("redundant: keys and values share one trained low-rank entry")
    assert not not_applicable(v4.trace, [DENSE, AGAIN], 16)


def test_decoding_is_not_timed(v4: World) -> None:
    with pytest.raises(ExperimentError, match="entries lie outside the paged cache, so decoding is not timed"):
        time_arms(v4.loaded, v4.trace, [DENSE], Protocol(free_tokens=0), rounds=1)


class TestProof:
    def test_a_recording_is_proved(self, v4: World) -> None:
        assert verify(v4.trace.path, proofs=[underived]).problems == []

    def test_an_entry_before_its_last_token_is_found(self, v4: World) -> None:
        trace = Trace.open(v4.trace.path)
        selection = trace.prefix.selection(4)
        assert selection is not None
        early = 10  # entries 0 and 1 are complete, entry 2 lacks a token
        assert sorted(selection[early, 0].tolist()) == [-1, 0, 1]
        selection[early, 0] = torch.tensor([0, 1, 2])  # mapped: what is written here stays in memory
        (line,) = underived(trace)
        assert "prefix/layer_004.safetensors: 'selection' of 1 queries" in line and line.endswith("position 10")
