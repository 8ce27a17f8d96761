"""DeepSeek-V4 (sliding, compressed and index state side by side) and MiniMax-M3 (block-sparse reads)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvassay.layout.families.base import FULL, SLIDING, Family, kv_component, rope, said_once, spelt_types, trim
from kvassay.layout.model import KV, All, Component, IndexKeys, Latent, Layer, Pooled, Rope, TopK, Window
from kvassay.layout.raw import Raw

CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
M3_SPARSE = "minimax_m3_sparse"

_BY_RATIO = {0: SLIDING, 4: CSA, 128: HCA}
_RATES = {CSA: 4, HCA: 128}
_RATE_KEYS = {CSA: "compress_rate_csa", HCA: "compress_rate_hca"}


def read_deepseek_v4(raw: Raw) -> tuple[Layer, ...]:
    """Every layer keeps a window of raw vectors; most also keep compressed entries of every token.

    One vector of `head_dim` serves as key and value. CSA layers select among their entries with index keys
    compressed at the same rate; HCA layers read all of theirs.
    """
    return tuple(_v4_layer(raw, index, kind) for index, kind in enumerate(_v4_types(raw)))


def _v4_types(raw: Raw) -> list[str]:
    def by_ratios() -> list[str]:
        ratios = trim(raw, "compress_ratios", raw.items("compress_ratios"))
        wrong = sorted({ratio for ratio in ratios if ratio not in _BY_RATIO})
        if wrong:
            raise raw.error(f"key 'compress_ratios' holds {wrong[0]} (allowed: 0, 4, 128)")
        return [_BY_RATIO[ratio] for ratio in ratios]

    return spelt_types(raw, {SLIDING, CSA, HCA}, "compress_ratios", by_ratios)


def _v4_layer(raw: Raw, index: int, kind: str) -> Layer:
    dim = raw.integer("head_dim")
    rotary = _v4_rope_dim(raw, dim)
    recent = Component(Latent(dim - rotary, rotary, rotary_value=True), Window(raw.integer("sliding_window")))
    return Layer(
        index=index,
        q_heads=raw.integer("num_attention_heads"),
        components=(recent, *_v4_entries(raw, kind, dim)),
        scale=dim**-0.5,
        rope=_v4_rope(raw, kind, rotary),
        qk_norm=True,
        sinks=True,
    )


def _v4_rope(raw: Raw, kind: str, rotary: int) -> Rope:
    """Return plain rotary for pure sliding layers, else its own base with YaRN that leaves cos and sin unscaled."""
    if kind == SLIDING:
        theta = raw.number("rope_theta")
        return rope(raw, rotary, "main", scaled=False, whole=True, theta=theta, interleaved=True)
    theta = raw.number("compress_rope_theta")
    position = rope(raw, rotary, "compress", whole=True, theta=theta, interleaved=True)
    if position.kind == "yarn":
        params = {"attention_factor": 1.0, **dict(position.params)}
        return replace(position, params=tuple(sorted(params.items())))
    return position


def _v4_rope_dim(raw: Raw, dim: int) -> int:
    if raw.has("qk_rope_head_dim"):
        return raw.integer("qk_rope_head_dim")
    return int(dim * raw.number("partial_rotary_factor"))


def _v4_entries(raw: Raw, kind: str, dim: int) -> tuple[Component, ...]:
    """Return the compressed component.

    Pending state (values and gates of tokens not yet in an entry): CSA holds two overlapping streams over
    two windows, for entries and index keys; HCA one stream over one window (vLLM's compressor caches).
    """
    if kind == SLIDING:
        return ()
    ratio = _v4_ratio(raw, kind)
    if kind == HCA:
        return (Component(Pooled(ratio, dim), All(), pending_elements=ratio * 2 * dim),)
    index = raw.integer("index_head_dim")
    top = TopK(raw.integer("index_topk"), unit=ratio)
    pending = 2 * ratio * 4 * (dim + index)
    keys = IndexKeys(index, q_heads=raw.integer("index_n_heads"), weighted=True)
    return (Component(Pooled(ratio, dim), top, keys, pending),)


def _v4_ratio(raw: Raw, kind: str) -> int:
    """Return tokens per entry, from `compress_rates` or a type's own key; ratios by layer may only say the same."""
    by_ratio = _RATES[kind] if raw.has("compress_ratios") else None
    said = {
        f"compress_rates: {kind}": raw.table("compress_rates").get(kind),
        _RATE_KEYS[kind]: raw.data.get(_RATE_KEYS[kind]),
        "compress_ratios": by_ratio,
    }
    return int(said_once(raw, said) or _RATES[kind])


def read_minimax_m3(raw: Raw) -> tuple[Layer, ...]:
    """Full storage everywhere; the sparse layers read `index_topk_blocks` blocks chosen by one-head index keys.

    A selected block is anchored to absolute slots; each index head chooses for one KV head. The published file
    holds the sparse settings in an object of its own, `sparse_attention_config`.
    """
    heads, dim = raw.integer("num_attention_heads"), raw.integer("head_dim")
    storage = KV(raw.integer("num_key_value_heads"), dim, dim)
    share = raw.integer("rotary_dim") / dim if raw.has("rotary_dim") else None
    partial = raw.number("partial_rotary_factor", share) if share else None
    rotary = rope(raw, dim, partial=partial)

    def component(kind: str) -> Component:
        if kind == FULL:
            return kv_component(raw, heads, storage)
        return kv_component(raw, heads, storage, top=_m3_top(raw, storage), index=_m3_index(raw))

    return tuple(
        Layer(
            index=index,
            q_heads=heads,
            components=(component(kind),),
            scale=dim**-0.5,
            rope=rotary,
            qk_norm=raw.flag("use_qk_norm", True),
        )
        for index, kind in enumerate(_m3_types(raw))
    )


def _m3_types(raw: Raw) -> list[str]:
    own = raw.sub("sparse_attention_config")

    def by_marks() -> list[str]:
        marks: list[Any] = trim(raw, "sparse_attention_freq", own.items("sparse_attention_freq"))
        return [M3_SPARSE if mark else FULL for mark in marks]

    given = own.has("sparse_attention_freq")
    types = spelt_types(raw, {FULL, M3_SPARSE}, "sparse_attention_freq", by_marks, given)
    if M3_SPARSE in types and not own.flag("use_sparse_attention", True):
        raise own.error(f"key 'use_sparse_attention' is off, and layer {types.index(M3_SPARSE)} is {M3_SPARSE}")
    return types


def _m3_top(raw: Raw, storage: KV) -> TopK:
    top = TopK(
        _m3_setting(raw, "index_topk_blocks", "sparse_topk_blocks"),
        unit=_m3_setting(raw, "index_block_size", "sparse_block_size"),
        sets=_m3_setting(raw, "index_n_heads", "sparse_num_index_heads"),
        first=raw.sub("sparse_attention_config").integer("sparse_init_block", 0, minimum=0),
        last=_m3_setting(raw, "index_local_blocks", "sparse_local_block", 1),
    )
    if top.sets != storage.kv_heads:
        raise raw.error(f"{top.sets} index heads for {storage.kv_heads} KV heads (allowed: one each)")
    return top


def _m3_index(raw: Raw) -> IndexKeys:
    return IndexKeys(
        _m3_setting(raw, "index_head_dim", "sparse_index_dim"),
        q_heads=_m3_setting(raw, "index_n_heads", "sparse_num_index_heads"),
    )


def _m3_setting(raw: Raw, flat: str, nested: str, default: int | None = None) -> int:
    """Return a sparse setting from the object of the published file, else from the class's flat key."""
    own = raw.sub("sparse_attention_config")
    said_once(raw, {f"sparse_attention_config: {nested}": own.data.get(nested), flat: raw.data.get(flat)})
    if own.has(nested):
        return own.integer(nested)
    return raw.integer(flat) if default is None else raw.integer(flat, default)


FAMILIES = {
    "deepseek_v4": Family(read_deepseek_v4),
    "minimax_m3_vl_text": Family(read_minimax_m3),
    "minimax_m3_text": Family(read_minimax_m3),
}
