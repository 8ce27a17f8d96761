"""MLA, with and without an index that selects: recorded as the engine caches it, replayed, and under policies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvassay.cache.rope import unrotate
from kvassay.policy.card import Prefill
from kvassay.policy.indexers import dsa_tokens
from kvassay.policy.registry import make
from kvassay.record.calling import cache_keyword, new_cache
from kvassay.record.derivation import underived
from kvassay.record.latent import up_projection
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.replay.arms import Arm
from kvassay.replay.closed import Replay
from kvassay.replay.protocol import Protocol
from kvassay.trace.fingerprint import compare, fingerprint
from kvassay.trace.reader import Trace
from kvassay.trace.render import summary
from kvassay.trace.verify import verify
from tests.families import models, world
from tests.families.arms import DENSE, PROTECTION, dense_is_the_recorded_model, recording_changes_no_bit
from tests.families.conftest import Recorded
from tests.families.mla_oracle import MlaOracle
from tests.families.world import both
from tests.replay.watch import Watch

INDEXED = ["deepseek_v32", "glm_moe_dsa"]
DIM, ROPE, TOPK, INDEX_DIM = 24, 8, 6, 16
SELECTORS = {"mistral4": [None] * 4, "deepseek_v32": [0, 1, 2, 3], "glm_moe_dsa": [0, 1, 1, 1]}
FED = world.QUESTION + world.ANSWER - 1


class TestRecording:
    @pytest.mark.parametrize("family", models.LATENT)
    def test_changes_no_bit(self, family: str, recorded: Recorded) -> None:
        recording_changes_no_bit(recorded(family), family)

    @pytest.mark.parametrize("family", models.LATENT)
    def test_rows_are_those_of_the_models_cache(self, family: str, recorded: Recorded) -> None:
        this = recorded(family)
        model, cache, at = this.loaded.model, new_cache(this.loaded.model), 0
        with torch.inference_mode():
            for count in world.chunks():
                model(input_ids=torch.tensor([world.ids()[at : at + count]]), **{cache_keyword(model): cache})
                at += count
        for index, held in enumerate(cache.layers):
            rows = both(this.trace, "k", index)
            assert torch.equal(rows[:, :, :DIM], held.keys[0].transpose(0, 1))
            assert torch.equal(rows[:, :, DIM:], held.values[0].transpose(0, 1))
            assert torch.equal(both(this.trace, "v", index), rows[:, :, :DIM])
            if SELECTORS[family][index] == index:
                assert torch.equal(both(this.trace, "cache", index, "index_keys"), held.indexer_keys[0])

    @pytest.mark.parametrize("family", models.LATENT)
    def test_a_vector_is_stored_once(self, family: str, recorded: Recorded) -> None:
        shapes = recorded(family).trace.shapes
        for index, selector in enumerate(SELECTORS[family]):
            found = {name: spec.shape for name, spec in shapes[f"prefix/layer_{index:03d}.safetensors"].items()}
            expected = {"latent": (world.CONTEXT, 1, DIM + ROPE), "q": (world.CONTEXT, 4, DIM + ROPE)}
            if selector == index:
                expected |= {
                    "index_keys": (world.CONTEXT, INDEX_DIM),
                    "index_queries": (world.CONTEXT, 8, INDEX_DIM),
                    "index_weights": (world.CONTEXT, 8),
                    "selection": (world.CONTEXT, 1, TOPK),
                }
            assert found == expected

    @pytest.mark.parametrize("family", INDEXED)
    def test_every_selection_rederives(self, family: str, recorded: Recorded) -> None:
        trace = recorded(family).trace
        tokens = world.CONTEXT + world.QUESTION + world.ANSWER
        for index, selector in enumerate(SELECTORS[family]):
            chosen = both(trace, "selection", index)[:, 0]
            derived = dsa_tokens(
                both(trace, "index_queries", selector).transpose(0, 1),
                both(trace, "cache", selector, "index_keys"),
                both(trace, "index_weights", selector),
                torch.arange(tokens),
                topk=TOPK,
            )
            for row in range(tokens):
                mine = sorted(x for x in chosen[row].tolist() if x >= 0)
                assert mine == sorted(x for x in derived[row].tolist() if x >= 0)
                assert len(set(mine)) == min(row + 1, TOPK) and max(mine) <= row
        assert any(row not in chosen[row] for row in range(tokens))  # a query may leave its own token out

    @pytest.mark.parametrize("family", models.LATENT)
    def test_absorbed_is_materialised(self, family: str, recorded: Recorded) -> None:
        """The recorded query against the cached vectors, in float64, is the model's own attention."""
        this = recorded(family)
        for layer in this.trace.layout.layers:
            module = this.exact.get_decoder().layers[layer.index].self_attn
            rows = both(this.trace, "k", layer.index).double()[:, 0]
            q = both(this.trace, "q", layer.index).double()
            seen = torch.ones(len(q), len(rows), dtype=torch.bool).tril()
            if layer.topk is not None:
                chosen = both(this.trace, "selection", layer.index)[:, 0].long()
                listed = torch.zeros(len(q), len(rows) + 1, dtype=torch.bool)
                seen &= listed.scatter_(1, chosen.masked_fill(chosen < 0, len(rows)), True)[:, :-1]
            weights = torch.softmax(
                (torch.einsum("qhd,td->hqt", q, rows) * layer.scale).masked_fill(~seen, -torch.inf), -1
            )
            absorbed = weights @ rows[:, :DIM]
            values = module.kv_b_proj(rows[:, :DIM]).view(len(rows), 4, -1)[..., -module.v_head_dim :]
            materialised = torch.einsum("hqt,thd->hqd", weights, values)
            found = up_projection(module, layer).materialise(absorbed)
            torch.testing.assert_close(found, materialised, rtol=0, atol=1e-6)
            tap = both(this.trace, "tap", f"output_{layer.index:03d}").double()
            torch.testing.assert_close(tap.transpose(0, 1), absorbed, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", models.LATENT)
def test_dense_is_the_recorded_model(family: str, recorded: Recorded, watch: Watch) -> None:
    this = recorded(family)
    dense_is_the_recorded_model(this, watch, MlaOracle(this).answer(this.trace.branches[0]))


@pytest.mark.parametrize("family", models.LATENT)
def test_a_prefill_of_its_own_is_dense_again(family: str, recorded: Recorded, watch: Watch) -> None:
    own = Arm(make("dense"), None, PROTECTION, Prefill.OWN)
    rows = watch.run(recorded(family), [DENSE, own])
    torch.testing.assert_close(watch.logits[own.label, 0], watch.logits["dense", 0], rtol=0, atol=1e-4)
    assert rows[1].retained_bytes == rows[0].retained_bytes and rows[1].read_bytes == rows[0].read_bytes


@pytest.mark.parametrize("family", models.LATENT)
def test_tokens_that_are_taken_back_leave_no_trace(family: str, recorded: Recorded) -> None:
    """Latents and index keys of drafted tokens go with them."""
    this = recorded(family)
    replay = Replay(this.loaded, this.trace, [DENSE], Protocol())
    arm = replay.compressed(DENSE)
    (drafted,), (plain,) = replay.forks([arm]), replay.forks([arm])
    real = this.trace.branches[0].token_ids.tolist()
    replay.engine.forward([drafted], [[real[0], 250, 251]], 1, committed=False)
    replay.engine.settle(drafted, 1)
    replay.engine.forward([plain], [[real[0]]], 1)
    rest = [real[1:5]]
    torch.testing.assert_close(
        replay.engine.forward([drafted], rest, 4), replay.engine.forward([plain], rest, 4), rtol=0, atol=2e-5
    )
    assert {i: len(keys) for i, keys in drafted.index.items()} == {i: len(keys) for i, keys in plain.index.items()}


@pytest.mark.parametrize("family", models.LATENT)
def test_the_rotary_part_is_turned_back(family: str, recorded: Recorded) -> None:
    """What is cached of a token, without its rotation, is what the projection put out, its pairs brought apart."""
    this = recorded(family)
    model, found = this.loaded.model, dict[int, torch.Tensor]()
    hooks = [
        layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(
            lambda module, args, out, i=i: found.__setitem__(i, out[0])
        )
        for i, layer in enumerate(model.get_decoder().layers)
    ]
    with torch.inference_mode():
        model(input_ids=torch.tensor([world.ids()[: world.CHUNK]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer in this.trace.layout.layers:
        rows = this.trace.prefix.k(layer.index)[: world.CHUNK].transpose(0, 1)
        turned = unrotate(rows, torch.arange(world.CHUNK), layer.rope)
        raw = found[layer.index][:, DIM:]
        apart = torch.cat([raw[:, 0::2], raw[:, 1::2]], -1)
        torch.testing.assert_close(turned[0, :, DIM:], apart, rtol=0, atol=2e-5)
        assert torch.equal(turned[..., :DIM], rows[..., :DIM])


class TestProof:
    def test_a_recorded_selection_is_proved(self, recorded: Recorded) -> None:
        for family in models.LATENT:
            assert verify(recorded(family).trace.path, proofs=[underived]).problems == []

    @pytest.mark.parametrize("fault", ["swapped", "missing", "future", "twice"])
    def test_a_wrong_one_is_found(self, fault: str, recorded: Recorded) -> None:
        trace = Trace.open(recorded("glm_moe_dsa").trace.path)
        row = 60
        chosen = trace.prefix.selection(1)[row, 0]  # mapped: what is written here stays in memory
        unread = min(set(range(row)) - set(chosen.tolist()))
        chosen[0] = {"swapped": unread, "missing": -1, "future": row + 1, "twice": int(chosen[1])}[fault]
        (line,) = underived(trace)
        assert line.endswith(
            "prefix/layer_001.safetensors: 'selection' of 1 queries is not what its index keys and queries give, "
            "first at position 60"
        )

    def test_an_index_is_kept_whole_in_a_trace_of_halves(self, recorded: Recorded, tmp_path: Path) -> None:
        loaded = replace(recorded("deepseek_v32").loaded, tokenizer=None)
        options = RecordOptions(prefill_chunk=world.CHUNK, q_tail=20, dtype="float16")
        trace = record_sample(loaded, world.sample(), tmp_path / "half", options)
        dtypes = {name: spec.dtype for name, spec in trace.shapes["prefix/layer_000.safetensors"].items()}
        index = {"index_keys": "F32", "index_queries": "F32", "index_weights": "F32"}
        assert dtypes == {"latent": "F16", "q": "F16", "selection": "I32", **index}
        assert len(trace.prefix.selection(0)) == 20 and list(underived(trace)) == []
        again, other = fingerprint(trace), fingerprint(trace)
        assert compare(again, other) == [] and "selection" not in again["rows"]["prefix/layer_000"]


def test_what_is_kept_is_shown_by_state(recorded: Recorded) -> None:
    trace = recorded("glm_moe_dsa").trace
    facts, tokens = summary(trace), world.CONTEXT + world.QUESTION + world.ANSWER
    assert facts["bytes"]["latent"] == 4 * 4 * tokens * (DIM + ROPE)
    assert facts["bytes"]["index_keys"] == 2 * 4 * tokens * INDEX_DIM
    assert facts["bytes"]["selection"] == 2 * 4 * tokens * TOPK
    assert facts["evidence"]["selections"] == "top 6 by the index of layers 0, 1"
    assert "selections" not in summary(recorded("mistral4").trace)["evidence"]
