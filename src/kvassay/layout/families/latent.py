"""MLA families: one latent vector per token and layer, whatever the number of heads.

`num_key_value_heads` in these files is not the cache's head count. DeepSeek-V3.2 and GLM-5 also keep
index keys and read only `index_topk` tokens; every token stays in the cache.
"""

from __future__ import annotations

from dataclasses import replace

from kvassay.errors import UnsupportedModel
from kvassay.layout.families.base import FULL, Family, agreeing, layer_types, rope, trim, yarn_scale
from kvassay.layout.model import All, Component, IndexKeys, Latent, Layer, TopK
from kvassay.layout.raw import Raw

INDEXED = "indexed_attention"
_INDEXER = {"F": "full", "S": "shared"}


def _mla_layer(raw: Raw, index: int, component: Component) -> Layer:
    latent, rotary = raw.integer("kv_lora_rank"), raw.integer("qk_rope_head_dim")
    # Neighbours rotate, but what comes out, and is cached, has the pairs' first elements first (halves).
    position = replace(rope(raw, rotary, whole=True), first=latent)
    return Layer(
        index=index,
        q_heads=raw.integer("num_attention_heads"),
        components=(component,),
        scale=yarn_scale(raw, raw.integer("qk_nope_head_dim") + rotary),
        rope=position,
    )


def _latent(raw: Raw) -> Latent:
    return Latent(raw.integer("kv_lora_rank"), raw.integer("qk_rope_head_dim"))


def read_mistral4(raw: Raw) -> tuple[Layer, ...]:
    """Plain MLA: every layer reads every token."""
    types = layer_types(raw, {FULL}, lambda _: FULL)
    return tuple(_mla_layer(raw, index, Component(_latent(raw), All())) for index in range(len(types)))


def read_deepseek_v32(raw: Raw) -> tuple[Layer, ...]:
    """MLA with an indexer, and so index keys, on every layer."""
    types = layer_types(raw, {INDEXED}, lambda _: INDEXED)
    return _indexed(raw, ["full"] * len(types))


def read_glm_moe_dsa(raw: Raw) -> tuple[Layer, ...]:
    """MLA where only some layers run the indexer; the others reuse the choice of the last one that did.

    The schedule is `indexer_types`, or a pattern string, or frequency and offset (GLM-5 and 5.1: every layer).
    """
    layer_types(raw, {INDEXED}, lambda _: INDEXED)
    spelt = {}
    if raw.has("indexer_types"):
        spelt["indexer_types"] = trim(raw, "indexer_types", raw.items("indexer_types"))
    if raw.has("index_topk_pattern"):
        pattern = raw.data["index_topk_pattern"]
        marks = list(pattern) if isinstance(pattern, str) else raw.items("index_topk_pattern")
        spelt["index_topk_pattern"] = trim(raw, "index_topk_pattern", [_INDEXER.get(mark, mark) for mark in marks])
    if raw.has("index_topk_freq") or not spelt:
        spelt["index_topk_freq"] = _by_frequency(raw)
    return _indexed(raw, agreeing(raw, spelt))


def _by_frequency(raw: Raw) -> list[str]:
    frequency = raw.integer("index_topk_freq", 1)
    offset = raw.integer("index_skip_topk_offset", 2, minimum=0)
    count = raw.integer("num_hidden_layers")
    return ["shared" if max(i - offset + 1, 0) % frequency else "full" for i in range(count)]


def _indexed(raw: Raw, modes: list[str]) -> tuple[Layer, ...]:
    """Return MLA layers that read a top-k; those of mode `shared` hold no index keys."""
    unknown = sorted({str(mode) for mode in modes} - {"full", "shared"})
    if unknown or modes[0] != "full":
        wrong = unknown[0] if unknown else f"{modes[0]} on layer 0"
        raise UnsupportedModel(f"{raw.name}: indexer type '{wrong}' (allowed: full, shared; layer 0 must be full)")
    keys = IndexKeys(raw.integer("index_head_dim"), q_heads=raw.integer("index_n_heads"), weighted=True)
    top = TopK(raw.integer("index_topk"))
    return tuple(
        _mla_layer(raw, index, Component(_latent(raw), top, keys if mode == "full" else None))
        for index, mode in enumerate(modes)
    )


FAMILIES = {
    "mistral4": Family(read_mistral4),
    "deepseek_v32": Family(read_deepseek_v32),
    "glm_moe_dsa": Family(read_glm_moe_dsa),
}
