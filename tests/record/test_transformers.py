from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvassay.errors import RecordError, TraceError
from kvassay.record.again import options_of
from kvassay.record.calling import cache_keyword, new_cache
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.trace.verify import verify
from kvassay.workload.framing import frame

from . import tiny
from .conftest import loaded, run_chunks, sample_of

CONTEXT = tiny.token_ids(45)
BRANCHES = [(tiny.token_ids(5, seed=1), tiny.token_ids(3, seed=2)), (tiny.token_ids(2, seed=3), [9])]
SAMPLE = sample_of(CONTEXT, BRANCHES)
FULL = RecordOptions(prefill_chunk=16, q_tail=999, logits="full", taps=("output", "lse", "hidden", "layer_input"))


def attention(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """float64 output [rows, q_heads, v_dim] for the last `rows` queries over all keys, own mask."""
    group = layer.q_heads // k.shape[1]
    keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * layer.scale
    i, j = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))[None]
    seen = (j <= i) & (i - j < (layer.window or math.inf))
    return torch.einsum("hij,jhd->ihd", torch.softmax(scores.masked_fill(~seen, -math.inf), -1), values)


@pytest.mark.parametrize("family", ["llama", "gemma3", "laguna"])
def test_a_trace_holds_what_the_model_did(family: str, tmp_path: Path) -> None:
    model = loaded(family)
    seen: list[tuple[int, int]] = []
    trace = record_sample(model, SAMPLE, tmp_path / "t", FULL, lambda done, total: seen.append((done, total)))
    assert seen == [(16, 56), (32, 56), (45, 56), (53, 56), (56, 56)]
    assert trace.prefix.token_ids.tolist() == CONTEXT
    for branch, (question, answer) in zip(trace.branches, BRANCHES, strict=True):
        ids = question + answer
        assert branch.token_ids.tolist() == ids
        assert branch.question_tokens == len(question)
        eager = run_chunks(model.model, CONTEXT + ids, [16, 16, 13, len(ids)])
        assert torch.equal(branch.logits, eager[len(CONTEXT) :])
        assert branch.greedy_ids.tolist() == eager[len(CONTEXT) :].argmax(-1).tolist()
        for layer in trace.layout.layers:
            q = torch.cat([trace.prefix.q(layer.index), branch.q(layer.index)])
            k = torch.cat([trace.prefix.k(layer.index), branch.k(layer.index)])
            v = torch.cat([trace.prefix.v(layer.index), branch.v(layer.index)])
            name = f"output_{layer.index:03d}"
            output = torch.cat([trace.prefix.tap(name), branch.tap(name)])
            error = (attention(layer, q, k, v) - output).abs().max() / output.abs().max()
            assert error < 1e-5, f"layer {layer.index}"


def test_rows_are_those_of_the_cache(tmp_path: Path) -> None:
    model = loaded("llama")
    trace = record_sample(model, SAMPLE, tmp_path / "t", FULL)
    cache = new_cache(model.model)
    with torch.inference_mode():
        for start in (0, 16, 32):
            part = torch.tensor([CONTEXT[start : start + 16]])
            model.model(input_ids=part, use_cache=True, **{cache_keyword(model.model): cache})
        for branch, (question, answer) in zip(trace.branches, BRANCHES, strict=True):
            own = copy.deepcopy(cache)
            part = torch.tensor([question + answer])
            model.model(input_ids=part, use_cache=True, **{cache_keyword(model.model): own})
            for index, layer in enumerate(own.layers):
                for name, tensor in (("k", layer.keys), ("v", layer.values)):
                    rows = torch.cat([trace.prefix.cache(index, name), branch.cache(index, name)])
                    assert torch.equal(rows, tensor[0].transpose(0, 1))


def test_stream_taps_are_the_models_own_states(tmp_path: Path) -> None:
    model = loaded("llama")
    trace = record_sample(model, SAMPLE, tmp_path / "t", FULL)
    with torch.inference_mode():
        result = model.model(input_ids=torch.tensor([CONTEXT]), output_hidden_states=True, use_cache=False)
        for index in range(4):
            states = result.hidden_states[index][0]
            torch.testing.assert_close(trace.prefix.tap(f"hidden_{index:03d}"), states, atol=1e-4, rtol=0)
            normed = model.model.model.layers[index].input_layernorm(states)
            torch.testing.assert_close(trace.prefix.tap(f"layer_input_{index:03d}"), normed, atol=1e-4, rtol=0)
        embedded = model.model.model.embed_tokens(torch.tensor(CONTEXT))
    assert torch.equal(trace.prefix.tap("hidden_000"), embedded)


def test_defaults_keep_the_tail_queries_and_top_logits(tmp_path: Path) -> None:
    model = loaded("llama")
    full = record_sample(model, SAMPLE, tmp_path / "full", FULL)
    trace = record_sample(model, SAMPLE, tmp_path / "t", RecordOptions(prefill_chunk=16, q_tail=10, logits_k=4))
    assert trace.header.q_from == 35
    assert torch.equal(trace.prefix.q(2), full.prefix.q(2)[35:])
    assert torch.equal(trace.branches[0].q(2), full.branches[0].q(2))
    top, logits = trace.branches[0].top_logits, full.branches[0].logits
    assert torch.equal(top.values, logits.topk(4).values)
    assert top.ids.shape == (8, 4)
    assert torch.allclose(top.logsumexp, logits.logsumexp(-1))


def test_no_logits_still_keeps_greedy_ids_and_margins(tmp_path: Path) -> None:
    trace = record_sample(loaded("llama"), SAMPLE, tmp_path / "t", RecordOptions(logits="none", q_tail=0))
    assert trace.branches[0].top_logits.values.shape == (8, 2)
    assert "prefix/layer_000.safetensors" in trace.header.shards
    with pytest.raises(Exception, match="queries"):
        trace.prefix.q(0)


def test_long_branches_run_in_chunks(tmp_path: Path) -> None:
    model = loaded("gemma3")
    long = tiny.token_ids(40, seed=11)
    options = RecordOptions(prefill_chunk=16, logits="full")
    trace = record_sample(model, sample_of(CONTEXT, [(long[:20], long[20:])]), tmp_path / "t", options)
    eager = run_chunks(model.model, CONTEXT + long, [16, 16, 13, 16, 16, 8])
    assert torch.equal(trace.branches[0].logits, eager[45:])


def test_float16_rows_are_rounded_float32_rows(tmp_path: Path) -> None:
    model = loaded("llama")
    exact = record_sample(model, SAMPLE, tmp_path / "a", FULL)
    half = record_sample(model, SAMPLE, tmp_path / "b", RecordOptions(prefill_chunk=16, dtype="float16"))
    assert half.prefix.k(1).dtype is torch.float16
    assert torch.equal(half.prefix.k(1), exact.prefix.k(1).half())


def test_shared_layers_store_queries_only(tmp_path: Path) -> None:
    trace = record_sample(loaded("gemma4"), SAMPLE, tmp_path / "t", FULL)
    assert set(trace.shapes["prefix/layer_005.safetensors"]) == {"q"}
    assert torch.equal(trace.prefix.k(5), trace.prefix.k(3))
    assert trace.prefix.q(5).shape[0] == len(CONTEXT)  # every row, though the head was not run


def test_the_header_says_how_it_was_made(tmp_path: Path) -> None:
    model = loaded("gemma3")
    options = RecordOptions(prefill_chunk=16, q_tail=7, taps=("output", "lse"), tap_layers=(1, 3), logits_k=5)
    header = record_sample(model, SAMPLE, tmp_path / "t", options).header
    assert (header.model.name, header.model.weights_sha256) == ("tiny-gemma3", "0" * 64)
    assert (header.recipe.name, header.recipe.seed, header.recipe.index) == ("tiny", 5, 3)
    assert header.branches[1].meta == {"key": 1, "question_text": "question 1", "scored": [0], "depth": 0.25}
    assert [tap.first for tap in header.taps] == [38, 38, 0, 0]
    assert options_of(header) == options


def test_beyond_the_native_context_is_refused(tmp_path: Path) -> None:
    sample = sample_of(tiny.token_ids(509), [([1, 2], [3, 4])])
    message = "509 context . 4 branch tokens exceed the native context of tiny-llama, 512"
    with pytest.raises(RecordError, match=message):
        record_sample(loaded("llama"), sample, tmp_path / "t")
    allowed = record_sample(loaded("llama"), sample, tmp_path / "t", RecordOptions(allow_beyond_native=True))
    assert allowed.prefix.tokens == 509


def test_a_missing_bos_is_refused(tmp_path: Path) -> None:
    model = loaded("llama")
    tokenizer = _Opening()
    assert frame(tokenizer).prefix_ids == (2,)
    with_tokenizer = type(model)(model.model, tokenizer, model.layout, model.identity)
    with pytest.raises(RecordError, match=r"begins every text with \[2\]"):
        record_sample(with_tokenizer, SAMPLE, tmp_path / "t")
    record_sample(with_tokenizer, sample_of([2, *CONTEXT], BRANCHES), tmp_path / "t")


class _Opening:
    bos_token_id = 2

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [2, 7] if add_special_tokens else [7]

    def decode(self, token_ids: Any, **options: Any) -> str:
        return "word"


def test_what_a_trace_cannot_hold_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = loaded("deepseek_v32")
    first, *others = model.layout.layers
    part = replace(first.components[0], index=None)
    layout = replace(model.layout, layers=(replace(first, components=(part,)), *others))
    with pytest.raises(RecordError, match="layer 0 reads a selection that no index makes"):
        record_sample(replace(model, layout=layout), SAMPLE, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash"])
def test_sinks_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = loaded(family)
    trace = record_sample(model, SAMPLE, tmp_path / "t")
    own = {
        index: tuple(layer.self_attn.sinks.tolist())
        for index, layer in enumerate(model.model.model.layers)
        if trace.layout.layers[index].sinks
    }
    assert trace.header.sinks == Trace.open(trace.path).header.sinks == own
    assert len(own) > 0


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("bucket", [5, 32])
def test_the_bucket_tap_holds_the_scores_a_query_has_of_its_bucket(family: str, bucket: int, tmp_path: Path) -> None:
    # Windows of 8 and chunks of 16: buckets are cut by windows, by sliding caches and by chunks.
    options = RecordOptions(prefill_chunk=16, q_tail=999, taps=("bucket",), bucket=bucket)
    trace = record_sample(loaded(family), SAMPLE, tmp_path / "t", options)
    assert verify(trace.path).ok
    assert (options_of(trace.header).taps, options_of(trace.header).bucket) == (("bucket",), bucket)
    branch = trace.branches[0]
    for layer in trace.layout.layers:
        q = torch.cat([trace.prefix.q(layer.index), branch.q(layer.index)]).double()
        k = torch.cat([trace.prefix.k(layer.index), branch.k(layer.index)]).double()
        name = f"bucket_{layer.index:03d}"
        found = torch.cat([trace.prefix.tap(name), branch.tap(name)])
        assert found.shape == (53, layer.q_heads, bucket)
        expected = torch.full(found.shape, -math.inf, dtype=torch.float64)
        for p in range(53):
            for j in range(p // bucket * bucket, p + 1):
                if p - j < (layer.window or math.inf):
                    score = (q[p] * k[j].repeat_interleave(layer.group_size, 0)).sum(-1) * layer.scale
                    capped = layer.softcap * torch.tanh(score / layer.softcap) if layer.softcap else score
                    expected[p, :, j % bucket] = capped
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_failure_leaves_no_folder_and_the_models_own_attention(tmp_path: Path) -> None:
    model = loaded("llama")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_sample(model, SAMPLE, tmp_path / "t", FULL, stop)
    assert list(tmp_path.iterdir()) == []
    assert model.model.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks for module in model.model.modules())


def test_an_existing_trace_is_left_alone(tmp_path: Path) -> None:
    record_sample(loaded("llama"), SAMPLE, tmp_path / "t")
    with pytest.raises(TraceError, match="exists"):
        record_sample(loaded("llama"), SAMPLE, tmp_path / "t")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk is 0, it must be at least 1"),
        ({"q_tail": -1}, "q_tail is -1, it must be at least 0"),
        ({"bucket": 0}, "bucket is 0, it must be at least 1"),
        ({"logits_k": 1}, "logits_k is 1, it must be at least 2"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' is not one of float32, float16"),
        ({"logits": "all"}, "logits 'all' is not one of none, topk, full"),
        ({"taps": ("outputs",)}, "did you mean 'output'"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        RecordOptions(**given)


def test_a_tap_of_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="layer 4; the model has 4 layers"):
        record_sample(loaded("llama"), SAMPLE, tmp_path / "t", RecordOptions(taps=("lse",), tap_layers=(4,)))
