from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, Component, Latent, Layer, Layout, Pooled, Window
from kvassay.record.capture import NAME, Capture, recording, refuse_unreplayable
from tests.families import models

from . import tiny
from .conftest import run_chunks

CHUNKS = [13, 16, 11, 7]
TOKENS = sum(CHUNKS)
TAPS = frozenset({"output", "lse"})


def record(model: Any, layout: Layout, ids: list[int]) -> tuple[torch.Tensor, dict[int, Any], Capture]:
    """Logits of a recorded chunked forward, and each layer's rows over all chunks."""
    capture = Capture(layout, torch.float32, {layer.index: TAPS for layer in layout.layers})
    parts: dict[int, dict[str, list[torch.Tensor]]] = {}
    logits = []
    from kvassay.record.calling import cache_keyword, new_cache

    with torch.inference_mode(), recording(model, capture):
        cache, start = new_cache(model), 0
        for size in CHUNKS:
            capture.begin(start, size, q_from=0)
            part = torch.tensor([ids[start : start + size]])
            logits.append(model(input_ids=part, use_cache=True, **{cache_keyword(model): cache}).logits[0])
            for index, rows in capture.finish().items():
                for name, tensor in rows.items():
                    parts.setdefault(index, {}).setdefault(name, []).append(tensor)
            start += size
    whole = {i: {name: torch.cat(t) for name, t in rows.items()} for i, rows in parts.items()}
    return torch.cat(logits), whole, capture


def recompute(
    layer: Layer, owner: Layer, q: Any, k: Any, v: Any, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention output [tokens, q_heads, v_dim] and row log-sum-exp, from recorded rows alone."""
    group = layer.q_heads // owner.kv.kv_heads
    keys = k.double().repeat_interleave(group, 1)
    values = v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * layer.scale
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = j <= i
    if owner.window:
        seen &= i - j < owner.window
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = torch.softmax(scores, -1)[..., : len(k)]
    return torch.einsum("hij,jhd->ihd", weights, values), scores.logsumexp(-1).T


@pytest.mark.parametrize("family", tiny.PLAIN)
def test_a_recording_changes_no_bit_and_holds_what_the_attention_used(family: str) -> None:
    ids = tiny.token_ids(TOKENS)
    model = tiny.build(family)
    layout = from_config(model.config)
    eager = run_chunks(model, ids, CHUNKS)
    logits, rows, capture = record(model, layout, ids)
    assert torch.equal(logits, eager)
    assert model.config._attn_implementation == "eager"
    for layer in layout.layers:
        owner = layer if layer.cache_of is None else layout.layers[layer.cache_of]
        mine, source = rows[layer.index], rows[owner.index]
        assert ("k" in mine) == (layer.cache_of is None)
        assert mine["q"].shape[:2] == (TOKENS, layer.q_heads)
        sink = capture.sinks.get(layer.index)
        assert (sink is not None) == layer.sinks
        output, lse = recompute(layer, owner, mine["q"], source["k"], source["v"], sink)
        error = (output - mine["output"]).abs().max() / output.abs().max()
        assert error < 1e-5, f"layer {layer.index} ({layer.kind})"
        assert (lse - mine["lse"]).abs().max() < 1e-5 * max(1.0, float(lse.abs().max()))


@pytest.mark.parametrize("family", tiny.PLAIN)
def test_chunks_agree_with_one_shot(family: str) -> None:
    ids = tiny.token_ids(TOKENS)
    model = tiny.build(family)
    logits, _, _ = record(model, from_config(model.config), ids)
    with torch.inference_mode():
        one_shot = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert (logits - one_shot).abs().max() < 1e-4


@pytest.mark.parametrize("family", tiny.SELECTING)
def test_selecting_families_keep_their_selection_under_the_recording_name(family: str) -> None:
    ids = tiny.token_ids(TOKENS)
    stock = run_chunks(tiny.build(family, "eager"), ids, CHUNKS)
    ours = run_chunks(tiny.build(family, NAME), ids, CHUNKS)
    assert torch.equal(ours, stock)


@pytest.mark.parametrize("family", models.ADMITTED)
def test_every_admitted_family_can_be_recorded(family: str) -> None:
    refuse_unreplayable(from_config(models.config_of(family)))


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ((Component(Pooled(4, 16)),), "pooled: pooled"),
        ((Component(KV(2, 16, 16), Window(8)), Component(Pooled(4, 16))), "pooled: kv, pooled"),
        ((Component(Latent(12, 4), Window(8)), Component(Pooled(4, 16))), "pooled: latent, pooled"),
        ((Component(KV(2, 16, 16)), Component(KV(2, 16, 16), Window(8))), "pooled: kv, kv"),
    ],
)
def test_a_layer_of_which_no_trace_holds_enough_is_refused(parts: tuple[Component, ...], kept: str) -> None:
    layout = Layout("odd", (Layer(0, 4, parts, 0.25),), 64, 256, 512)
    with pytest.raises(RecordError, match=rf"odd: layer 0 \({kept}\) cannot be replayed"):
        refuse_unreplayable(layout)


def test_two_recordings_at_once_do_not_mix() -> None:
    families = ["llama", "qwen3"]
    ids = {family: tiny.token_ids(TOKENS, seed=i) for i, family in enumerate(families)}
    models = {family: tiny.build(family) for family in families}
    alone = {f: record(models[f], from_config(models[f].config), ids[f])[1] for f in families}
    together: dict[str, Any] = {}

    def work(family: str) -> None:
        for _ in range(5):
            together[family] = record(models[family], from_config(models[family].config), ids[family])[1]

    threads = [threading.Thread(target=work, args=(family,)) for family in families]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family in families:
        for index, rows in alone[family].items():
            for name, tensor in rows.items():
                assert torch.equal(tensor, together[family][index][name])


def one_call(layout: Layout, **changes: Any) -> Capture:
    """A capture shown one attention call of layer 0 of a tiny llama, with some arguments changed."""
    capture = Capture(layout, changes.pop("dtype", torch.float32), {})
    capture.begin(0, 3, 0)
    module = torch.nn.Identity()
    module.layer_idx = 0  # type: ignore[assignment]
    sizes = {"query": (1, 4, 3, 16), "key": (1, 2, 3, 16), "value": (1, 2, 3, 16), "output": (1, 3, 4, 16)}
    given: dict[str, Any] = {name: torch.ones(shape) for name, shape in sizes.items()}
    given |= {"scale": 0.25, "arguments": {}, **changes}
    capture.add(module, weights=None, **given)
    return capture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.ones(1, 4, 3, 16)}, "KV heads is 4, the layout says 2"),
        ({"query": torch.ones(1, 4, 1, 16)}, "tokens is 1, the layout says 3"),
        ({"query": torch.ones(1, 5, 3, 16)}, "query heads is 5, the layout says 4"),
        ({"value": torch.ones(1, 2, 3, 8)}, "value dim is 8, the layout says 16"),
        ({"scale": 0.5}, "scale is 0.5, the layout says 0.25"),
        ({"arguments": {"sliding_window": 8}}, "window is 8, the layout says None"),
        ({"arguments": {"s_aux": torch.ones(4)}}, "sinks is True, the layout says False"),
        ({"arguments": {"softcap": 30.0}}, "soft-cap is 30.0, the layout says None"),
        ({"arguments": {"position_bias": torch.ones(1)}}, "depends on 'position_bias'"),
        ({"dtype": torch.float16, "key": torch.full((1, 2, 3, 16), 7e4)}, "does not fit float16"),
    ],
)
def test_what_the_layout_does_not_describe_is_refused(changes: dict[str, Any], message: str) -> None:
    layout = from_config(tiny.config_of("llama"))
    assert len(one_call(layout)._rows) == 1
    with pytest.raises(RecordError, match=message):
        one_call(layout, **changes)


def test_layers_that_never_called_are_named() -> None:
    capture = one_call(from_config(tiny.config_of("llama")))
    with pytest.raises(RecordError, match=r"layers \[1, 2, 3\] never called"):
        capture.finish()


def test_queries_are_kept_from_q_from_on() -> None:
    layout = from_config(tiny.config_of("llama"))
    capture = Capture(layout, torch.float32, {})
    for start, expected in ((0, 0), (3, 2), (6, 3)):
        capture.begin(start, 3, q_from=4)
        query = torch.arange(3.0).view(1, 1, 3, 1).expand(1, 4, 3, 16)
        module = torch.nn.Identity()
        module.layer_idx = 0  # type: ignore[assignment]
        key = torch.ones(1, 2, 3, 16)
        capture.add(module, query, key, key, torch.ones(1, 3, 4, 16), None, 0.25, {})
        kept = capture._rows[0]["q"]
        assert kept[:, 0, 0].tolist() == [0.0, 1.0, 2.0][3 - expected :]
