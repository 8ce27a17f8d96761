"""The readers against the model library: its configuration classes, and the caches its models really fill."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoConfig
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvassay.layout.bytes import bytes_at
from kvassay.layout.config import from_config
from kvassay.layout.model import Component, Layer, Layout, Pooled, Window
from tests.layout.configs import PUBLISHED
from tests.record.tiny import PLAIN, SELECTING, build

# Not in the library (remote code), and the one type it names differently.
NOT_THERE = {"mimo-v2.5"}
RENAMED = {"minimax_m3_text": "minimax_m3_vl_text"}


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - NOT_THERE))
def test_raw_file_and_configuration_class_say_the_same(name: str) -> None:
    raw = from_config(PUBLISHED[name])
    text = copy.deepcopy(PUBLISHED[name].get("text_config", PUBLISHED[name]))
    model_type = text.pop("model_type")
    config = AutoConfig.for_model(RENAMED.get(model_type, model_type), **text)
    derived = from_config(config)
    if name == "mimo-v2-flash":
        assert {layer.window for layer in derived.layers} == {None, 129}  # the class adds one, the file says 128
        assert {layer.window for layer in raw.layers} == {None, 128}
        assert [layer.kind for layer in derived.layers] == [layer.kind for layer in raw.layers]
        return
    assert derived.layers == raw.layers
    assert (derived.vocab_size, derived.native_context) == (raw.vocab_size, raw.native_context)


CALLS: list[tuple[int, dict[str, Any]]] = []


def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
    """Note what each layer hands to its attention, then do what the model file itself would do."""
    CALLS.append(
        (
            module.layer_idx,
            {
                "q_heads": query.shape[1],
                "scale": float(scaling),
                "window": kwargs.get("sliding_window"),
                "softcap": kwargs.get("softcap"),
                "sinks": kwargs.get("s_aux") is not None,
                "k": (key.shape[1], key.shape[3]),
                "v": (value.shape[1], value.shape[3]),
            },
        )
    )
    kwargs.pop("dropout", None)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, mask, scaling=scaling, dropout=0.0, **kwargs)


TOKENS = 11  # more than the tiny windows of 8, so that they really bound the cache


@pytest.mark.parametrize("family", [*PLAIN, *SELECTING])
def test_what_models_compute_and_cache(family: str) -> None:
    AttentionInterface.register("layout_spy", spy)
    AttentionMaskInterface.register("layout_spy", eager_mask)
    model = build(family, attention="layout_spy")
    layout = from_config(model.config)
    CALLS.clear()
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], use_cache=True)
    assert [index for index, _ in CALLS] == list(range(len(layout.layers)))
    for index, call in CALLS:
        check_call(layout, layout.layers[index], call)
    check_rope(model, layout)
    cache = getattr(output, "cache", None) or output.past_key_values
    held = [cached_elements(layer) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    assert held == [expected_elements(layer) for layer in layout.storing]


def check_call(layout: Layout, layer: Layer, call: dict[str, Any]) -> None:
    source = layout.source(layer.index)
    assert call["q_heads"] == layer.q_heads
    assert call["scale"] == pytest.approx(layer.scale, rel=1e-6)
    assert (call["window"], call["softcap"], call["sinks"]) == (source.window, layer.softcap, layer.sinks)
    if source.kind in ("full", "sliding", "block_sparse") and layout.model_type != "deepseek_v4":
        kv = source.kv
        assert (call["k"], call["v"]) == ((kv.kv_heads, kv.k_dim), (kv.kv_heads, kv.v_dim))


def check_rope(model: Any, layout: Layout) -> None:
    """Compare each layer's rotary dims, and plain frequencies, with the buffers the model computed."""
    found_in = {name: module for name, module in model.named_modules() if name.endswith("rotary_emb")}
    rotary = next(module for name, module in found_in.items() if "vision" not in name)
    types = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * len(layout.layers)
    for layer, kind in zip(layout.layers, types, strict=True):
        if layer.rope is None:
            continue
        label = "main" if layer.kind == "sliding" else "compress"
        names = [f"{kind}_inv_freq", f"{label}_inv_freq", "inv_freq"]
        found = next(buffer for name in names if (buffer := getattr(rotary, name, None)) is not None)
        assert layer.rope.dims == 2 * int((found > 0).sum())
        if layer.rope.kind == "default":
            plain = layer.rope.theta ** -(torch.arange(0, layer.rope.dims, 2) / layer.rope.dims)
            torch.testing.assert_close(found, plain)


def cached_elements(layer: Any) -> dict[str, int]:
    """Count what one layer of the library's cache holds, by kind."""
    # DeepSeek-V4 returns one vector as both; the library happens to slice it twice
    shared = layer.keys.shape == layer.values.shape and torch.equal(layer.keys, layer.values)
    own = layer.keys.numel() + (0 if shared else layer.values.numel())
    pooled = getattr(layer, "compressed_kv", {})
    index = getattr(layer, "indexer_keys", None)
    index = index if index is not None else getattr(layer, "idx_keys", None)
    index = index if index is not None else pooled.get("indexer")
    entries = pooled.get("compressor")
    return {
        "own": own,
        "index": 0 if index is None else index.numel(),
        "pooled": 0 if entries is None else entries.numel(),
    }


def expected_elements(layer: Layer) -> dict[str, int]:
    """The same from the layout; the library keeps one token less than the window, as the next query brings its own."""
    counts = {"own": 0, "index": 0, "pooled": 0}
    for component in layer.components:
        name = "pooled" if isinstance(component.storage, Pooled) else "own"
        counts[name] += states(component) * component.storage.elements
        if component.index:
            counts["index"] += states(component) * component.index.dim * component.index.heads
    return counts


def states(component: Component) -> int:
    if isinstance(component.visibility, Window):
        return min(TOKENS, component.visibility.size - 1)
    return TOKENS // component.storage.ratio if isinstance(component.storage, Pooled) else TOKENS


def test_bytes_of_a_real_cache() -> None:
    model = build("gemma4")
    with torch.no_grad():
        output = model(torch.arange(7)[None], use_cache=True)  # within the window of 8
    cache = getattr(output, "cache", None) or output.past_key_values
    held = sum(t.nbytes for layer in cache.layers if layer.keys is not None for t in (layer.keys, layer.values))
    assert bytes_at(from_config(model.config), 7, "float32").total == held
