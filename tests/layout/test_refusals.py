"""Models with recurrent or convolutional state are refused from their raw files, by three independent signs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from kvassay.errors import LayoutError, UnsupportedModel
from kvassay.layout.config import from_config
from kvassay.layout.families import READERS, WRAPPERS
from kvassay.layout.refusals import spans
from tests.families import models
from tests.layout import configs

QWEN36_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
KIMI_K3: dict[str, Any] = {  # no layer_types in the file; layers counted from 1
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 93,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
}
NEMOTRON_NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
}
NEMOTRON_ULTRA: dict[str, Any] = {  # no num_hidden_layers in the file
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "ssm_state_size": 128,
}
INKLING: dict[str, Any] = {
    "model_type": "inkling_mm_model",
    "text_config": {
        "model_type": "inkling_text",
        "num_hidden_layers": 66,
        "local_layer_ids": [0, 1],
        "use_sconv": True,
        "sconv_kernel_size": 4,
    },
}
LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "conv_L_cache": 3,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            QWEN36_27B,
            ["qwen3_5_text", "16 of 64 layers would page (3, 7, 11,", "48 of 64 layers: 3145728 B each", "(kernel 4)"],
        ),
        (
            KIMI_K3,
            ["kimi_linear", "24 of 93 layers would page (3, 7,", "91-92)", "69 of 93 layers: 6291456 B", "(kernel 4)"],
        ),
        (
            NEMOTRON_NANO,
            [
                "nemotron_h",
                "6 of 52 layers would page (5, 12, 19, 26, 33, 42)",
                # the other 23 are experts
                "the state of 23 of 52 layers: 2097152 B each in fp32 and a convolution window",
            ],
        ),
        (NEMOTRON_ULTRA, ["nemotron_h", "1 of 4 layers would page (2)", "the state of 1 of 4 layers"]),
        (INKLING, ["inkling_text", "66 of 66 layers would page (0-65)", "the state of 66 of 66 layers", "(kernel 4)"]),
        (LFM2, ["lfm2", "6 of 16 layers would page (2, 5, 8, 10, 12, 14)", "10 of 16 layers", "(kernel 3)"]),
    ],
)
def test_published_files(config: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_config(config)
    message = str(caught.value)
    for part in [*parts, "state-transition adapter would have to snapshot, fork, roll back and count"]:
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("row", "total", "paging", "state"),
    [
        ("qwen3.6-27b", 64, 16, 48),
        ("qwen3.6-35b-a3b", 40, 10, 30),
        ("kimi-k3", 93, 24, 69),
        ("nemotron-3-nano-30b-a3b", 52, 6, 23),
        ("nemotron-3-ultra-550b-a55b", 108, 12, 48),
        ("inkling", 66, 66, 66),
        ("lfm2.5-16layer", 16, 6, 10),
    ],
)
def test_rows_of_the_registry(row: str, total: int, paging: int, state: int) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_config(row)
    assert f"{paging} of {total} layers would page" in str(caught.value)
    assert f"count the state of {state} of {total} layers" in str(caught.value)


@pytest.mark.parametrize("family", models.REFUSED)
def test_classes_of_the_library(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"of \d layers would page .* count the state of \d of \d layers"):
        from_config(models.config_of(family))


def test_no_type_of_the_library_is_read_but_those_with_a_reader() -> None:
    """By its name alone, whatever else the file says: fail closed."""
    like_llama = configs.LLAMA_31_8B
    admitted = set()
    for model_type in CONFIG_MAPPING_NAMES:
        try:
            from_config({**like_llama, "model_type": model_type})
        except UnsupportedModel:
            continue
        except LayoutError:
            pass  # its reader asks for keys that Llama's file has not
        admitted.add(model_type)
    assert admitted <= {*READERS, *WRAPPERS}


@pytest.mark.slow
def test_what_the_library_keeps_state_for_is_refused() -> None:
    """transformers' own layer types are a second witness: each of these gets a cache layer with state there."""
    found = set()
    for model_type in CONFIG_MAPPING_NAMES:
        config = _default(model_type)
        kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
        if kinds & {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"}:
            found.add(model_type)
            with pytest.raises(UnsupportedModel, match="keeps recurrent or convolutional state"):
                from_config(config)
    assert {"qwen3_5_text", "kimi_linear", "nemotron_h", "inkling_text", "lfm3", "jamba", "bamba"} <= found


def _default(model_type: str) -> Any:
    """The configuration that a class makes of nothing; None for a class that cannot."""
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception:
        return None


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_5_moe", "qwen3_next", "kimi_linear", "inkling2", "lfm2_moe", "lfm2_vl", "lfm3", "jamba", "bamba",
     "falcon_h1", "granitemoehybrid", "mamba2", "zamba2", "rwkv", "minimax"],
)  # fmt: skip
def test_known_types_without_any_other_sign(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"known model type.*does not say which layers would page"):
        from_config({"model_type": model_type})


@pytest.mark.parametrize(
    ("key", "value"),
    [("linear_conv_kernel_dim", 4), ("mamba_d_state", 16), ("ssm_state_size", 128), ("conv_L_cache", 3),
     ("full_attention_interval", 4), ("sconv_kernel_size", 4), ("linear_attn_config", {"kda_layers": [1]}),
     ("hybrid_override_pattern", "M*"), ("layers_block_type", ["mamba"]), ("full_attn_idxs", [2])],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "brand_new_lm"])
def test_telling_keys_refuse_unlisted_relatives_and_known_types_alike(model_type: str, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"key '{key}'"):
        from_config({**configs.LLAMA_31_8B, "model_type": model_type, key: value})


def test_a_telling_key_on_the_wrapper_is_seen() -> None:
    with pytest.raises(UnsupportedModel, match="key 'ssm_state_size'"):
        from_config({**configs.GEMMA3_12B, "ssm_state_size": 16})


def test_null_and_false_say_that_there_is_no_such_part() -> None:
    config = {**configs.LLAMA_31_8B, "use_sconv": False, "ssm_state_size": None}
    assert len(from_config(config).layers) == 32


@pytest.mark.parametrize("kind", ["linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent"])
def test_telling_layer_types(kind: str) -> None:
    types = ["full_attention"] * 31 + [kind]
    with pytest.raises(UnsupportedModel, match=f"layer type '{kind}'"):
        from_config({**configs.LLAMA_31_8B, "layer_types": types})


@pytest.mark.parametrize("kind", ["chunked_attention", "window_attention", "brand_new_attention"])
def test_layer_types_nobody_vouches_for(kind: str) -> None:
    text = {**configs.GEMMA4_26B["text_config"], "layer_types": [kind] * 30}
    with pytest.raises(UnsupportedModel, match=f"'{kind}' is not one that model type 'gemma4_text' may have"):
        from_config(text)


def test_a_layer_type_the_model_class_would_ignore_is_not_ignored() -> None:
    with pytest.raises(UnsupportedModel, match="'llama' has no sliding_attention layers"):
        from_config({**configs.LLAMA_31_8B, "layer_types": ["sliding_attention"] * 32})


def test_unknown_types_fail_closed() -> None:
    with pytest.raises(UnsupportedModel, match=r"unknown model type 'qwen33' \(did you mean 'qwen3'\?\)"):
        from_config({**configs.QWEN3_8B, "model_type": "qwen33"})
    with pytest.raises(UnsupportedModel) as caught:
        from_config({"model_type": "zzz"})
    assert all(name in str(caught.value) for name in {*READERS, *WRAPPERS})
    wrapped = {"model_type": "llava_like", "text_config": configs.LLAMA_31_8B}
    with pytest.raises(UnsupportedModel, match="unknown model type 'llava_like'"):
        from_config(wrapped)


@pytest.mark.parametrize(
    ("config", "value"),
    [(configs.GEMMA3_12B["text_config"], True), (configs.GEMMA4_26B["text_config"], "all")],
)
def test_models_that_are_not_causal(config: dict[str, Any], value: object) -> None:
    with pytest.raises(UnsupportedModel, match="not causal"):
        from_config({**config, "use_bidirectional_attention": value})


def test_spans() -> None:
    assert spans([0, 1, 2, 6, 8, 9]) == "0-2, 6, 8-9"
    assert spans([]) == "none"


def test_a_text_config_without_a_type_is_read_only_where_the_wrapper_settles_it() -> None:
    text = {key: value for key, value in configs.STEP_37["text_config"].items() if key != "model_type"}
    assert from_config({"model_type": "step3p7", "text_config": text}).model_type == "step3p5"
    with pytest.raises(LayoutError, match="text_config: missing key 'model_type'"):
        from_config({"model_type": "mistral3", "text_config": text})
