"""Families that mix full and sliding layers and change something else between them."""

from __future__ import annotations

from typing import Any

from kvassay.layout.families.base import (
    FULL,
    SLIDING,
    Family,
    agreeing,
    kv_component,
    layer_types,
    overrides,
    rope,
    rope_params,
    said_once,
    spelt_types,
    trim,
)
from kvassay.layout.model import KV, Layer, Rope
from kvassay.layout.raw import Raw


def _window(raw: Raw, kind: str) -> int | None:
    return raw.integer("sliding_window") if kind == SLIDING else None


def _square(raw: Raw) -> KV:
    """Return K/V storage whose two dims are equal."""
    dim = raw.integer("head_dim")
    return KV(raw.integer("num_key_value_heads"), dim, dim)


def read_gpt_oss(raw: Raw) -> tuple[Layer, ...]:
    """Even layers slide; every layer has one learned sink logit per head, which stores no token."""
    heads, storage = raw.integer("num_attention_heads"), _square(raw)
    types = layer_types(raw, {FULL, SLIDING}, lambda i: SLIDING if i % 2 == 0 else FULL)
    return tuple(
        Layer(
            index=index,
            q_heads=heads,
            components=(kv_component(raw, heads, storage, window=_window(raw, kind)),),
            scale=storage.k_dim**-0.5,
            rope=rope(raw, storage.k_dim),
            sinks=True,
        )
        for index, kind in enumerate(types)
    )


def read_laguna(raw: Raw) -> tuple[Layer, ...]:
    """Query heads differ by layer, the KV shape does not. A file without `layer_types` is all full."""
    storage = _square(raw)
    types = layer_types(raw, {FULL, SLIDING}, lambda _: FULL)
    same = [raw.integer("num_attention_heads")] * len(types)
    heads = trim(raw, "num_attention_heads_per_layer", raw.items("num_attention_heads_per_layer", same))
    rotary = {kind: rope(raw, storage.k_dim, kind) for kind in set(types)}
    sinks = raw.flag("swa_attention_sink_enabled", False)
    return tuple(
        Layer(
            index=index,
            q_heads=count,
            components=(kv_component(raw, count, storage, window=_window(raw, kind)),),
            scale=storage.k_dim**-0.5,
            rope=rotary[kind],
            qk_norm=True,
            sinks=sinks and kind == SLIDING,
        )
        for index, (kind, count) in enumerate(zip(types, heads, strict=True))
    )


def read_step(raw: Raw) -> tuple[Layer, ...]:
    """Step 3.5 and 3.7: more query heads on sliding layers, rotary lists per layer, lists padded with MTP layers."""
    types = layer_types(raw, {FULL, SLIDING})
    return tuple(_step_layer(raw, types, index) for index in range(len(types)))


def _step_layer(raw: Raw, types: list[str], index: int) -> Layer:
    kind = types[index]
    heads, storage = _step_shape(raw, kind)
    if index in (own := overrides(raw)):
        heads = own[index].integer("num_attention_heads", heads)
    return Layer(
        index=index,
        q_heads=heads,
        components=(kv_component(raw, heads, storage, window=_window(raw, kind)),),
        scale=raw.number("query_pre_attn_scalar", storage.k_dim) ** -0.5,
        rope=_step_rope(raw, kind, index, storage.k_dim),
        qk_norm=True,
    )


def _step_shape(raw: Raw, kind: str) -> tuple[int, KV]:
    """Return query heads and storage; published files override them for sliding layers in one object."""
    heads, dim = raw.integer("num_attention_heads"), raw.integer("head_dim")
    said_once(raw, {key: raw.data.get(key) for key in ("num_attention_groups", "num_key_value_heads")})
    kv = raw.integer("num_attention_groups" if raw.has("num_attention_groups") else "num_key_value_heads")
    if kind == SLIDING:
        other = raw.sub("attention_other_setting")
        if not other.data and not raw.has("num_sliding_attention_heads"):
            raise raw.error("missing key 'attention_other_setting' (query heads of the sliding layers)")
        if other.data.get("attention_type", SLIDING) != SLIDING:
            raise other.error(f"key 'attention_type' is {other.data['attention_type']!r} (allowed: {SLIDING})")
        own = {"num_sliding_attention_heads": raw.data.get("num_sliding_attention_heads")}
        own["attention_other_setting: num_attention_heads"] = other.data.get("num_attention_heads")
        said_once(raw, own)
        heads = raw.integer("num_sliding_attention_heads", other.integer("num_attention_heads", heads))
        kv, dim = other.integer("num_attention_groups", kv), other.integer("head_dim", dim)
    return heads, KV(kv, dim, dim)


def _step_rope(raw: Raw, kind: str, index: int, dim: int) -> Rope:
    def per_layer(key: str, default: Any) -> float:
        value = raw.data.get(key, default)
        return float(trim(raw, key, value)[index] if isinstance(value, list) else value)

    nested = rope_params(raw, kind, scaled=False)
    theta = nested.get("rope_theta") or per_layer("rope_theta", 10_000.0)
    partial = nested.get("partial_rotary_factor") or per_layer("partial_rotary_factors", 1.0)
    return rope(raw, dim, kind, scaled=kind == FULL, theta=theta, partial=partial)


def read_cohere2_moe(raw: Raw) -> tuple[Layer, ...]:
    """Full layers carry no rotary embedding, except a dense prefix whose own pattern is 1.

    The patterns say something beside `layer_types` only where the prefix is given, as in the published file: the class
    drops it, and writes its default patterns whatever the layers are.
    """
    prefix = raw.integer("first_k_dense_replace", 0, minimum=0)
    head = raw.integer("prefix_dense_sliding_window_pattern", 1)
    body = raw.integer("sliding_window_pattern", 4)

    def kind_of(index: int) -> str:
        pattern, offset = (head, index) if index < prefix else (body, index - prefix)
        return SLIDING if (offset + 1) % pattern else FULL

    count, published = raw.integer("num_hidden_layers"), raw.has("first_k_dense_replace")
    kinds = [kind_of(index) for index in range(count)]
    given = published and raw.has("sliding_window_pattern")
    types = spelt_types(raw, {FULL, SLIDING}, "sliding_window_pattern", lambda: kinds, given)
    spelt = {key: trim(raw, key, raw.items(key)) for key in ("mlp_layer_types",) if raw.has(key)}
    if published or not spelt:
        spelt["first_k_dense_replace"] = ["dense" if index < prefix else "sparse" for index in range(count)]
    mlps = agreeing(raw, spelt)
    heads, storage = raw.integer("num_attention_heads"), _square(raw)
    rotary = rope(raw, storage.k_dim, interleaved=True)
    return tuple(
        Layer(
            index=index,
            q_heads=heads,
            components=(kv_component(raw, heads, storage, window=_window(raw, kind)),),
            scale=storage.k_dim**-0.5,
            rope=rotary if kind == SLIDING or (mlp == "dense" and head == 1) else None,
        )
        for index, (kind, mlp) in enumerate(zip(types, mlps, strict=True))
    )


def read_mimo(raw: Raw) -> tuple[Layer, ...]:
    """K and V dims apart, other KV heads on sliding layers, sinks on sliding layers only.

    `sliding_window` is taken as written: 128 in the published file, which vLLM also uses; transformers adds
    one to the older key `sliding_window_size` and holds 129 in its own configuration.
    """
    types = _mimo_types(raw)
    rotary = {kind: _mimo_rope(raw, kind) for kind in (FULL, SLIDING)}
    return tuple(_mimo_layer(raw, kind, index, rotary[kind]) for index, kind in enumerate(types))


def _mimo_types(raw: Raw) -> list[str]:
    """Return the layer types; `hybrid_layer_pattern` marks sliding layers with 1."""

    def by_marks() -> list[str]:
        marks = trim(raw, "hybrid_layer_pattern", raw.items("hybrid_layer_pattern"))
        return [SLIDING if mark else FULL for mark in marks]

    return spelt_types(raw, {FULL, SLIDING}, "hybrid_layer_pattern", by_marks)


def _mimo_layer(raw: Raw, kind: str, index: int, rotary: Rope) -> Layer:
    heads, kv = raw.integer("num_attention_heads"), raw.integer("num_key_value_heads")
    k_dim, v_dim, window = raw.integer("head_dim"), raw.integer("v_head_dim"), None
    if kind == SLIDING:
        # The published files name the sliding layers' heads; the transformers class doubles instead.
        heads = raw.integer("swa_num_attention_heads", heads)
        kv = raw.integer("swa_num_key_value_heads", 2 * kv)
        k_dim, v_dim = raw.integer("swa_head_dim", k_dim), raw.integer("swa_v_head_dim", v_dim)
        window = _mimo_window(raw)
    sinks = raw.flag(
        "add_swa_attention_sink_bias" if kind == SLIDING else "add_full_attention_sink_bias", kind == SLIDING
    )
    return Layer(
        index=index,
        q_heads=heads,
        components=(kv_component(raw, heads, KV(kv, k_dim, v_dim), window=window),),
        scale=k_dim**-0.5,
        rope=rotary,
        sinks=sinks,
    )


def _mimo_window(raw: Raw) -> int:
    if not raw.has("sliding_window"):
        return raw.integer("sliding_window_size")
    window, size = raw.integer("sliding_window"), raw.data.get("sliding_window_size")
    if size is not None and window not in (size, size + 1):
        raise raw.error(f"keys 'sliding_window' and 'sliding_window_size' contradict each other: {window} and {size}")
    return window


def _mimo_rope(raw: Raw, kind: str) -> Rope:
    theta = raw.number("swa_rope_theta", 10_000.0) if kind == SLIDING else None
    return rope(raw, raw.integer("head_dim"), kind, theta=theta)


FAMILIES = {
    "gpt_oss": Family(read_gpt_oss),
    "laguna": Family(read_laguna),
    "step3p5": Family(read_step, per_layer=frozenset({"num_attention_heads"})),
    "cohere2_moe": Family(read_cohere2_moe),
    "mimo_v2_flash": Family(read_mimo),
    "mimo_v2": Family(read_mimo),
}
