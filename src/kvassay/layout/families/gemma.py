"""Gemma 2, 3 and 4: alternating windows; Gemma 4 also shares caches and changes shape by layer type."""

from __future__ import annotations

from kvassay.errors import UnsupportedModel
from kvassay.layout.families.base import (
    FULL,
    SLIDING,
    Family,
    kv_component,
    layer_types,
    overrides,
    rope,
    said_once,
    spelt_types,
)
from kvassay.layout.model import KV, Layer, Rope
from kvassay.layout.raw import Raw


def _every(pattern: int, index: int) -> str:
    """Return the type of layer `index` where each `pattern`-th layer is full."""
    return SLIDING if (index + 1) % pattern else FULL


def _window(raw: Raw, kind: str) -> int | None:
    return raw.integer("sliding_window") if kind == SLIDING else None


def _refuse_bidirectional(raw: Raw, value: object) -> None:
    if raw.data.get("use_bidirectional_attention") == value:
        raise UnsupportedModel(
            f"{raw.name}: 'use_bidirectional_attention' is {value!r}: the model is not causal, so it has no KV cache"
        )


def read_gemma2(raw: Raw) -> tuple[Layer, ...]:
    """Even layers slide; attention logits are soft-capped (the key must be there, null for no cap)."""
    if "attn_logit_softcapping" not in raw.data:
        raise raw.error("missing key 'attn_logit_softcapping'")
    softcap = raw.number("attn_logit_softcapping") if raw.has("attn_logit_softcapping") else None
    heads, dim = raw.integer("num_attention_heads"), raw.integer("head_dim")
    storage, rotary = KV(raw.integer("num_key_value_heads"), dim, dim), rope(raw, dim)
    return tuple(
        Layer(
            index=index,
            q_heads=heads,
            components=(kv_component(raw, heads, storage, window=_window(raw, kind)),),
            scale=raw.number("query_pre_attn_scalar") ** -0.5,
            rope=rotary,
            softcap=softcap,
        )
        for index, kind in enumerate(layer_types(raw, {FULL, SLIDING}, lambda i: _every(2, i)))
    )


def read_gemma3(raw: Raw) -> tuple[Layer, ...]:
    """Five sliding layers to one full.

    The last layer may slide. `attn_logit_softcapping` is stored in the file but not used by the model.
    Scaled rotary parameters belong to the full layers alone. `_sliding_window_pattern` says nothing: the class writes
    its default there whatever the layers are.
    """
    _refuse_bidirectional(raw, True)
    heads, dim = raw.integer("num_attention_heads"), raw.integer("head_dim")
    storage = KV(raw.integer("num_key_value_heads"), dim, dim)
    rotary = {
        FULL: rope(raw, dim, FULL, theta=raw.number("rope_theta", 1_000_000.0)),
        SLIDING: rope(raw, dim, SLIDING, scaled=False, theta=raw.number("rope_local_base_freq", 10_000.0)),
    }
    count, pattern = raw.integer("num_hidden_layers"), raw.integer("sliding_window_pattern", 6)
    by_pattern = [_every(pattern, index) for index in range(count)]
    types = spelt_types(raw, {FULL, SLIDING}, "sliding_window_pattern", lambda: by_pattern)
    return tuple(
        Layer(
            index=index,
            q_heads=heads,
            components=(kv_component(raw, heads, storage, window=_window(raw, kind)),),
            scale=raw.number("query_pre_attn_scalar") ** -0.5,
            rope=rotary[kind],
            qk_norm=True,
        )
        for index, kind in enumerate(types)
    )


def read_gemma4(raw: Raw) -> tuple[Layer, ...]:
    """Full layers have their own head dimension and KV heads; the last layers read an earlier layer's cache.

    K and V are both stored even where `attention_k_eq_v` ties their weights: K is normed and rotated, V is
    normed alone. The class forces the last layer to be full.
    """
    _refuse_bidirectional(raw, "all")
    types = layer_types(raw, {FULL, SLIDING}, lambda i: _every(6, i))
    types[-1] = FULL
    shared_from = len(types) - raw.integer("num_kv_shared_layers", 0, minimum=0)
    return tuple(_gemma4_layer(raw, types, index, shared_from) for index in range(len(types)))


def _gemma4_layer(raw: Raw, types: list[str], index: int, shared_from: int) -> Layer:
    kind, heads = types[index], raw.integer("num_attention_heads")
    storage = _gemma4_storage(raw, kind, index)
    component = kv_component(raw, heads, storage, window=_window(raw, kind))
    cache_of = _gemma4_producer(raw, types, index, shared_from)
    return Layer(
        index=index,
        q_heads=heads,
        components=(component,) if cache_of is None else (),
        scale=1.0,
        rope=_gemma4_rope(raw, kind, storage.k_dim),
        qk_norm=True,
        v_norm=True,
        cache_of=cache_of,
    )


def _gemma4_storage(raw: Raw, kind: str, index: int) -> KV:
    """Return the shape: full layers take `global_head_dim`, and the global KV heads only if K equals V.

    A configuration written by the class holds both under `per_layer_config` instead.
    """
    heads, dim = raw.integer("num_key_value_heads"), raw.integer("head_dim")
    if raw.has("per_layer_config"):
        own = overrides(raw).get(index, Raw({}, raw.name, raw.model_type))
        heads, dim = own.integer("num_key_value_heads", heads), own.integer("head_dim", dim)
        if kind == FULL:
            here, few = f"per_layer_config: {index}", raw.flag("attention_k_eq_v", False)
            said_once(raw, {f"{here}: head_dim": dim, "global_head_dim": raw.data.get("global_head_dim")})
            of_all = raw.data.get("num_global_key_value_heads") if few else None
            said_once(raw, {f"{here}: num_key_value_heads": heads, "num_global_key_value_heads": of_all})
    elif kind == FULL:
        dim = raw.integer("global_head_dim")
        if raw.flag("attention_k_eq_v", False):
            heads = raw.integer("num_global_key_value_heads", heads)
    return KV(heads, dim, dim)


def _gemma4_producer(raw: Raw, types: list[str], index: int, shared_from: int) -> int | None:
    """Return the layer a sharing layer reads: the last storing layer of its own type."""
    if index < shared_from:
        return None
    producers = [earlier for earlier in range(shared_from) if types[earlier] == types[index]]
    if not producers:
        raise raw.error(f"layer {index} shares a cache, but no {types[index]} layer before {shared_from} stores one")
    return producers[-1]


def _gemma4_rope(raw: Raw, kind: str, dim: int) -> Rope:
    if raw.has("rope_parameters"):
        return rope(raw, dim, kind)
    if kind == SLIDING:
        return Rope(theta=10_000.0, dims=dim)
    return Rope(theta=1_000_000.0, dims=dim // 4, kind="proportional")


# Published Gemma 3 files (4B, 12B, 27B) leave these to the class.
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
}

_GEMMA4_PER_LAYER = frozenset({"head_dim", "num_key_value_heads"})

FAMILIES = {
    "gemma2": Family(read_gemma2),
    "gemma3_text": Family(read_gemma3, _GEMMA3),
    "gemma4_text": Family(read_gemma4, per_layer=_GEMMA4_PER_LAYER),
    "gemma4_unified_text": Family(read_gemma4, per_layer=_GEMMA4_PER_LAYER),
}
