"""Per-layer facts of published models, each checked by hand against the model's own description."""

from __future__ import annotations

import math

import pytest

from kvassay.errors import LayoutError, UnsupportedModel
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, All, Component, IndexKeys, Latent, Layer, Layout, Pooled, Rope, TopK, Window
from tests.layout import configs


def of_kind(layout: Layout, kind: str) -> list[int]:
    return [layer.index for layer in layout.layers if layer.kind == kind]


def sole(layer: Layer) -> Component:
    (component,) = layer.components
    return component


def test_embedded_models() -> None:
    smol = from_config("smollm2-135m")
    assert (smol.model_type, len(smol.layers), smol.hidden_size, smol.vocab_size, smol.native_context) == (
        "llama", 30, 576, 49_152, 8192,
    )  # fmt: skip
    assert smol.layers[29] == Layer(29, 9, (Component(KV(3, 64, 64)),), 0.125, Rope(1e5, 64))
    gemma = from_config("gemma-3-270m")
    assert of_kind(gemma, "full") == [5, 11, 17]
    assert {layer.window for layer in gemma.layers if layer.kind == "sliding"} == {512}
    assert gemma.layers[5].rope == Rope(1e6, 256) and gemma.layers[0].rope == Rope(1e4, 256)
    assert gemma.layers[0].kv == KV(1, 256, 256) and gemma.layers[0].scale == 256**-0.5 and gemma.layers[0].qk_norm
    assert gemma.layers[0].group_size == 4


def test_llama_keeps_its_rope_scaling_and_derives_head_dim_only_when_absent() -> None:
    layer = from_config(configs.LLAMA_31_8B).layers[0]
    assert layer.kv == KV(8, 128, 128)  # 4096 / 32
    assert layer.rope is not None and layer.rope.kind == "llama3" and layer.rope.theta == 5e5
    assert dict(layer.rope.params)["low_freq_factor"] == 1.0
    nemo = from_config(configs.NEMO_12B).layers[0]
    assert nemo.kv == KV(8, 128, 128)  # not 5120 / 32 = 160
    assert nemo.kind == "full"


def test_llama_without_kv_heads_is_multi_head_and_without_theta_is_first_generation() -> None:
    config = {k: v for k, v in configs.LLAMA_31_8B.items() if k not in ("num_key_value_heads", "rope_theta")}
    layer = from_config({**config, "rope_scaling": None}).layers[0]
    assert layer.kv.kv_heads == 32 and layer.rope == Rope(10_000.0, 128)


def test_mistral_windows_every_layer() -> None:
    types = ["sliding_attention"] * 40
    layout = from_config({**configs.NEMO_12B, "sliding_window": 4096, "layer_types": types})
    assert {layer.window for layer in layout.layers} == {4096}
    without = {k: v for k, v in configs.NEMO_12B.items() if k != "sliding_window"}
    with pytest.raises(LayoutError, match="missing key 'sliding_window'"):
        from_config(without)


def test_qwen_window_counts_only_when_switched_on() -> None:
    given = {**configs.QWEN3_8B, "sliding_window": 4096, "max_window_layers": 30}
    assert of_kind(from_config(given), "sliding") == []
    assert of_kind(from_config({**given, "use_sliding_window": True}), "sliding") == [30, 31, 32, 33, 34, 35]
    qwen2 = {**given, "model_type": "qwen2"}
    assert from_config(given).layers[0].qk_norm and not from_config(qwen2).layers[0].qk_norm


def test_granite_scale_is_its_multiplier() -> None:
    layer = from_config(configs.GRANITE_3B).layers[0]
    assert layer.scale == 0.015625 and layer.kv == KV(8, 64, 64)


def test_hy3_drops_nothing_for_its_mtp_layer() -> None:
    layout = from_config(configs.HY3)
    assert len(layout.layers) == 80 and layout.native_context == 262_144
    assert layout.layers[0].rope == Rope(11_158_840.0, 128) and layout.layers[0].qk_norm


def test_gemma2_alternates_and_caps_logits() -> None:
    layout = from_config(configs.GEMMA2_2B)
    assert of_kind(layout, "sliding") == list(range(0, 26, 2))
    assert {layer.softcap for layer in layout.layers} == {50.0}
    assert from_config({**configs.GEMMA2_2B, "attn_logit_softcapping": None}).layers[0].softcap is None


def test_gemma3_nested_file_that_leaves_keys_to_the_class() -> None:
    layout = from_config(configs.GEMMA3_12B)
    assert layout.model_type == "gemma3_text"
    assert layout.layers[0].kv == KV(8, 256, 256)  # not 3840 / 16 = 240
    assert (layout.vocab_size, layout.native_context) == (262_208, 131_072)
    assert of_kind(layout, "full") == [5, 11, 17, 23, 29, 35, 41, 47]
    assert layout.layers[5].rope == Rope(1e6, 256, "linear", (("factor", 8.0),))
    assert layout.layers[0].rope == Rope(1e4, 256)  # scaling is for full layers only
    big = from_config(configs.GEMMA3_27B)
    assert big.layers[61].kind == "sliding" and len(of_kind(big, "full")) == 10
    assert big.layers[0].scale == 168**-0.5 and big.layers[0].kv == KV(16, 128, 128)


def test_gemma3_class_softcap_is_stored_but_not_used() -> None:
    config = {**configs.GEMMA3_12B["text_config"], "attn_logit_softcapping": 50.0}
    assert from_config(config).layers[0].softcap is None


def test_gemma4_sharing() -> None:
    e2b = from_config(configs.GEMMA4_E2B)
    assert [layer.index for layer in e2b.storing] == list(range(15))
    readers = {kind: set() for kind in (13, 14)}
    for layer in e2b.layers[15:]:
        assert layer.components == () and layer.kind == "shared" and layer.cache_of is not None
        readers[layer.cache_of].add(layer.index)
    assert readers[14] == {19, 24, 29, 34}  # full layers read the last storing full layer
    assert readers[13] == set(range(15, 35)) - readers[14]
    assert e2b.source(34) == e2b.layers[14] and e2b.source(3) == e2b.layers[3]
    with pytest.raises(LayoutError, match=r"layer 34 .shared. holds no K/V"):
        _ = e2b.layers[34].kv
    e4b = from_config(configs.GEMMA4_E4B)
    assert len(e4b.storing) == 24
    assert {layer.cache_of for layer in e4b.layers[24:]} == {22, 23}


def test_gemma4_head_dims_and_global_kv_heads() -> None:
    e2b = from_config(configs.GEMMA4_E2B)
    assert e2b.layers[4].kv == KV(1, 512, 512) and e2b.layers[0].kv == KV(1, 256, 256)
    big = from_config(configs.GEMMA4_31B)
    assert big.layers[5].kv == KV(4, 512, 512) and big.layers[0].kv == KV(16, 256, 256)
    # without tied keys and values the global KV heads do not count
    untied = {**configs.GEMMA4_31B["text_config"], "attention_k_eq_v": False}
    assert from_config(untied).layers[5].kv == KV(16, 512, 512)
    unified = from_config(configs.GEMMA4_12B)
    assert unified.model_type == "gemma4_unified_text" and unified.layers[5].kv == KV(1, 512, 512)
    layer = big.layers[5]
    assert (layer.scale, layer.qk_norm, layer.v_norm) == (1.0, True, True)
    assert layer.rope == Rope(1e6, 128, "proportional")


def test_gemma4_forces_the_last_layer_to_be_full() -> None:
    text = configs.GEMMA4_26B["text_config"]
    assert (
        from_config({**text, "layer_types": [*text["layer_types"][:-1], "sliding_attention"]}).layers[29].kind == "full"
    )


def test_gemma4_without_rope_parameters_takes_the_class_values() -> None:
    text = {k: v for k, v in configs.GEMMA4_26B["text_config"].items() if k != "rope_parameters"}
    assert from_config(text) == from_config(configs.GEMMA4_26B)


def test_gemma4_sharing_needs_a_producer_of_the_same_type() -> None:
    text = {**configs.GEMMA4_E2B["text_config"], "num_kv_shared_layers": 32}
    with pytest.raises(LayoutError, match="layer 4 shares a cache, but no full_attention layer before 3 stores one"):
        from_config(text)


@pytest.mark.parametrize("key", ["5", "05", 5])
def test_gemma4_overrides_per_layer_whatever_their_keys_look_like(key: object) -> None:
    text = {k: v for k, v in configs.GEMMA4_26B["text_config"].items() if "global" not in k}
    layout = from_config({**text, "per_layer_config": {key: {"head_dim": 512, "num_key_value_heads": 2}}})
    assert layout.layers[5].kv == KV(2, 512, 512) and layout.layers[11].kv == KV(8, 256, 256)


def test_overrides_that_a_reader_would_not_notice_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="per_layer_config: 3: key 'num_key_value_heads' may not differ"):
        from_config({**configs.LLAMA_31_8B, "per_layer_config": {"3": {"num_key_value_heads": 4}}})
    with pytest.raises(LayoutError, match="must map layer indices"):
        from_config({**configs.LLAMA_31_8B, "per_layer_config": {"full_attention": {}}})


def test_gpt_oss_slides_first_and_has_sinks_everywhere() -> None:
    layout = from_config(configs.GPT_OSS_20B)
    assert of_kind(layout, "sliding") == list(range(0, 24, 2))
    assert all(layer.sinks for layer in layout.layers)
    derived = {k: v for k, v in configs.GPT_OSS_20B.items() if k != "layer_types"}
    assert from_config(derived) == layout


def test_laguna_query_heads_differ_by_layer() -> None:
    layout = from_config(configs.LAGUNA_S)
    assert [layer.q_heads for layer in layout.layers[:5]] == [48, 72, 72, 72, 48]
    assert {layer.kv for layer in layout.layers} == {KV(8, 128, 128)}
    assert layout.layers[0].rope is not None and layout.layers[0].rope.dims == 64
    assert layout.layers[1].rope == Rope(1e4, 128)
    plain = {k: v for k, v in configs.LAGUNA_S.items() if k not in ("layer_types", "num_attention_heads_per_layer")}
    assert of_kind(from_config(plain), "full") == list(range(48))


def test_step_lists_of_48_for_45_layers() -> None:
    layout = from_config(configs.STEP_37)
    assert layout.model_type == "step3p5" and len(layout.layers) == 45
    assert of_kind(layout, "full") == list(range(0, 45, 4))
    full, sliding = layout.layers[44], layout.layers[43]
    assert (full.q_heads, sliding.q_heads) == (64, 96) and full.kv == sliding.kv == KV(8, 128, 128)
    assert full.rope is not None and (full.rope.theta, full.rope.dims, full.rope.kind) == (5e6, 64, "llama3")
    assert sliding.rope == Rope(1e4, 128)


def test_step_without_its_sliding_heads_is_not_guessed() -> None:
    text = {k: v for k, v in configs.STEP_37["text_config"].items() if k != "attention_other_setting"}
    with pytest.raises(LayoutError, match="text_config: missing key 'attention_other_setting'"):
        from_config({"model_type": "step3p7", "text_config": text})


def test_lists_of_a_wrong_length_are_refused() -> None:
    text = {**configs.STEP_37["text_config"], "num_nextn_predict_layers": 2}
    with pytest.raises(LayoutError, match="'layer_types' has 48 entries for 45 layers"):
        from_config(text)
    with pytest.raises(LayoutError, match="'compress_ratios' has 44 entries for 43 layers"):
        from_config({**configs.V4_FLASH, "num_nextn_predict_layers": 0})


def test_north_full_layers_carry_no_rope_except_the_dense_prefix() -> None:
    layout = from_config(configs.NORTH)
    assert of_kind(layout, "full") == list(range(0, 49, 4))
    rotating = [layer.index for layer in layout.layers if layer.rope is not None]
    assert rotating == [0, *of_kind(layout, "sliding")]
    assert layout.layers[0].rope == Rope(50_000.0, 128, interleaved=True)
    assert layout.layers[1].window == 4096 and not layout.layers[1].qk_norm


def test_mimo_k_and_v_dims_kv_heads_and_sinks() -> None:
    layout = from_config(configs.MIMO_FLASH)
    assert of_kind(layout, "full") == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    full, sliding = layout.layers[0], layout.layers[1]
    assert full.kv == KV(4, 192, 128) and sliding.kv == KV(8, 192, 128)
    assert (full.sinks, sliding.sinks, sliding.window) == (False, True, 128)
    assert full.rope == Rope(5e6, 64) and sliding.rope == Rope(1e4, 64)  # 0.334 of 192
    assert full.scale == 192**-0.5
    only_older = {k: v for k, v in configs.MIMO_25.items() if k != "sliding_window"}
    assert from_config(only_older).layers[1].window == 128
    # the transformers class has no key for the sliding layers' heads: it doubles
    classlike = {k: v for k, v in configs.MIMO_FLASH.items() if not k.startswith("swa_num")}
    assert from_config(classlike).layers[1].kv == KV(8, 192, 128)


def test_mla_is_one_vector_whatever_the_heads() -> None:
    small = from_config(configs.MISTRAL_SMALL_4)
    assert {sole(layer) for layer in small.layers} == {Component(Latent(256, 64), All())}
    assert {layer.kind for layer in small.layers} == {"latent"} and sole(small.layers[0]).storage.elements == 320
    stretch = 0.1 * math.log(128) + 1
    assert small.layers[0].scale == pytest.approx(128**-0.5 * stretch**2, rel=1e-12)
    rope = small.layers[0].rope
    assert rope is not None and (rope.first, rope.dims, rope.interleaved) == (256, 64, False)
    kv = small.layers[0].kv
    assert (kv.kv_heads, kv.k_dim, kv.v_dim, kv.row) == (1, 320, 256, 320)


def test_deepseek_v32_indexes_every_layer() -> None:
    layout = from_config(configs.DEEPSEEK_V32)
    index = IndexKeys(128, q_heads=64, weighted=True)
    assert {sole(layer) for layer in layout.layers} == {Component(Latent(512, 64), TopK(2048), index)}
    assert len(layout.layers) == 61 and sole(layout.layers[0]).storage.elements == 576
    assert layout.layers[0].scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12)


GLM_INDEXED = [0, 1, 2, *range(6, 75, 4)]


def indexed(layout: Layout) -> list[int]:
    return [layer.index for layer in layout.layers if sole(layer).index is not None]


def test_glm_index_keys_on_21_of_78_layers() -> None:
    layout = from_config(configs.GLM_52)
    assert indexed(layout) == GLM_INDEXED and len(GLM_INDEXED) == 21
    assert {sole(layer).visibility for layer in layout.layers} == {TopK(2048)}
    assert layout.layers[0].scale == 256**-0.5
    marks = "".join("F" if index in GLM_INDEXED else "S" for index in range(78))
    bare = {k: v for k, v in configs.GLM_52.items() if k not in ("index_topk_freq", "index_skip_topk_offset")}
    assert indexed(from_config(bare)) == list(range(78))  # GLM-5 and 5.1
    for spelling in (
        {"index_topk_pattern": marks},
        {"indexer_types": ["full" if mark == "F" else "shared" for mark in marks]},
    ):
        assert from_config({**bare, **spelling}) == layout


def test_glm_indexer_modes_fail_closed() -> None:
    bare = {k: v for k, v in configs.GLM_52.items() if k != "index_topk_freq"}
    with pytest.raises(UnsupportedModel, match="indexer type 'none'"):
        from_config({**bare, "indexer_types": ["full"] + ["none"] * 77})
    with pytest.raises(UnsupportedModel, match="shared on layer 0"):
        from_config({**bare, "indexer_types": ["shared"] * 78})


def test_v4_flash_keeps_four_caches() -> None:
    layout = from_config(configs.V4_FLASH)
    recent = Component(Latent(448, 64, rotary_value=True), Window(128))
    index = IndexKeys(128, q_heads=64, weighted=True)
    csa = Component(Pooled(4, 512), TopK(512, unit=4), index, pending_elements=8 * (2048 + 512))
    hca = Component(Pooled(128, 512), All(), pending_elements=128 * 1024)
    assert [layout.layers[at].components for at in (0, 1, 2, 3)] == [(recent,), (recent,), (recent, csa), (recent, hca)]
    kinds = [len(layer.components) and type(layer.components[-1].visibility).__name__ for layer in layout.layers]
    assert (kinds.count("Window"), kinds.count("TopK"), kinds.count("All")) == (2, 21, 20)
    assert (layout.layers[0].kind, layout.layers[2].kind, layout.layers[3].kind) == ("sliding", "pooled", "pooled")
    assert all(layer.sinks and layer.window == 128 for layer in layout.layers)
    assert layout.layers[0].rope == Rope(1e4, 64, interleaved=True)
    compressed = layout.layers[2].rope
    assert compressed is not None and (compressed.theta, compressed.dims, compressed.kind) == (1.6e5, 64, "yarn")
    assert dict(compressed.params)["attention_factor"] == 1.0


def test_v4_unknown_ratio_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'compress_ratios' holds 8 .allowed: 0, 4, 128."):
        from_config({**configs.V4_FLASH, "compress_ratios": [8] * 43})


def test_minimax_m3_stores_everything_and_reads_blocks() -> None:
    layout = from_config(configs.MINIMAX_M3)
    assert of_kind(layout, "full") == [0, 1, 2] and of_kind(layout, "block_sparse") == list(range(3, 60))
    assert sole(layout.layers[3]) == Component(
        KV(4, 128, 128), TopK(16, unit=128, sets=4, last=1), IndexKeys(128, q_heads=4)
    )
    assert layout.layers[0].rope == Rope(5e6, 64)
    flat = {k: v for k, v in configs.MINIMAX_M3["text_config"].items() if k != "sparse_attention_config"}
    flat |= {"index_topk_blocks": 16, "index_block_size": 128, "index_head_dim": 128, "index_n_heads": 4}
    flat["layer_types"] = ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57
    assert from_config({**flat, "model_type": "minimax_m3_vl"}).layers == layout.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_num_index_heads": 2}, "2 index heads for 4 KV heads .allowed: one each."),
        ({"sparse_local_block": 0}, "key 'sparse_local_block' is 0, must be at least 1"),
    ],
)
def test_an_index_that_is_not_m3s_is_refused(changes: dict[str, int], message: str) -> None:
    text = configs.MINIMAX_M3["text_config"]
    sparse = {**text["sparse_attention_config"], **changes}
    with pytest.raises(LayoutError, match=message):
        from_config({**configs.MINIMAX_M3, "text_config": {**text, "sparse_attention_config": sparse}})


def test_blocks_that_m3_always_reads() -> None:
    text = configs.MINIMAX_M3["text_config"]
    sparse = {**text["sparse_attention_config"], "sparse_init_block": 1, "sparse_local_block": 2}
    layout = from_config({**configs.MINIMAX_M3, "text_config": {**text, "sparse_attention_config": sparse}})
    assert layout.layers[3].topk == TopK(16, unit=128, sets=4, first=1, last=2)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="32 query heads do not divide over 5 KV heads"):
        from_config({**configs.QWEN3_8B, "num_key_value_heads": 5})
