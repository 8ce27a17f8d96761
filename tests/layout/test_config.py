"""Where a configuration may come from, and what is said when it cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvassay.errors import LayoutError
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, Component, Layer, Layout
from tests.layout import configs


class Config:
    """Stands in for a configuration object of the model library."""

    def to_dict(self) -> dict[str, object]:
        return configs.GEMMA3_12B


def test_every_kind_of_source_gives_the_same_layout(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configs.GEMMA3_12B))
    expected = from_config(configs.GEMMA3_12B)
    for source in (Config(), file, str(file), tmp_path, str(tmp_path)):
        assert from_config(source) == expected
    # the text part alone is a configuration too
    assert from_config(configs.GEMMA3_12B["text_config"]) == expected


def test_an_id_is_looked_up_in_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0" * 40
    repo = tmp_path / "models--someone--tiny"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "config.json").write_text(json.dumps(configs.QWEN3_8B))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("opened a connection"))
    assert from_config("someone/tiny") == from_config(configs.QWEN3_8B)
    with pytest.raises(LayoutError, match=r"someone/absent: no such.*hf download someone/absent config.json"):
        from_config("someone/absent")


def test_a_name_near_an_embedded_model() -> None:
    with pytest.raises(LayoutError, match=r"gemma-3-270: no such file.*did you mean 'gemma-3-270m'"):
        from_config("gemma-3-270")


def test_what_is_not_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"no config\.json in this folder"):
        from_config(tmp_path)
    with pytest.raises(LayoutError, match="not int"):
        from_config(3)
    with pytest.raises(LayoutError, match="no such file"):
        from_config(tmp_path / "absent" / "config.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"model_type": "llama",', "not valid JSON: .*line 1 column"),
        ("[1, 2]", "holds a JSON list, not an object"),
        ('{"hidden_size": 4}', "missing key 'model_type'"),
        ("", "not valid JSON"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(LayoutError, match=problem) as caught:
        from_config(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match="cannot be read"):
        from_config(file)


NEEDED = {
    "llama-3.1-8b": [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "vocab_size",
    ],
    "qwen3-8b": ["head_dim", "rope_theta"],
    "granite-4.1-3b": ["attention_multiplier"],
    "gemma-2-2b": ["attn_logit_softcapping", "query_pre_attn_scalar", "sliding_window"],
    "gemma-3-12b": ["sliding_window", "num_hidden_layers"],
    "gemma-4-31b": ["head_dim", "global_head_dim", "sliding_window", "num_key_value_heads"],
    "gpt-oss-20b": ["head_dim", "sliding_window"],
    "laguna-s-2.1": ["head_dim", "sliding_window"],
    "step-3.7-flash": ["layer_types", "head_dim", "sliding_window"],
    "north-mini-code-1.0": ["sliding_window", "rope_theta"],
    "mimo-v2.5": ["hybrid_layer_pattern", "v_head_dim", "head_dim"],
    "mistral-small-4": ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"],
    "deepseek-v3.2": ["kv_lora_rank", "index_topk", "index_head_dim"],
    "glm-5.2": ["qk_rope_head_dim", "index_head_dim"],
    "deepseek-v4-flash": ["compress_ratios", "head_dim", "index_topk", "compress_rope_theta", "sliding_window"],
    "minimax-m3": ["num_key_value_heads", "head_dim"],
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in NEEDED.items() for key in keys])
def test_missing_keys_are_named_with_their_file_and_never_guessed(tmp_path: Path, name: str, key: str) -> None:
    config = json.loads(json.dumps(configs.PUBLISHED[name]))
    del config.get("text_config", config)[key]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(LayoutError, match=f"missing key '{key}'") as caught:
        from_config(file)
    assert str(file) in str(caught.value)
    assert ("text_config" in str(caught.value)) == ("text_config" in config)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("num_hidden_layers", 0, "'num_hidden_layers' is 0, must be at least 1"),
        ("num_hidden_layers", "36", "must be an integer, not '36'"),
        ("num_key_value_heads", True, "must be an integer, not True"),
        ("rope_theta", -1.0, "must be a positive number"),
        ("layer_types", "full", "must be a list"),
        ("rope_scaling", [1], "must be an object"),
        ("use_sliding_window", "yes", "must be true or false"),
    ],
)
def test_values_of_the_wrong_kind(key: str, value: object, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        from_config({**configs.QWEN3_8B, key: value})


def test_a_window_larger_than_the_context() -> None:
    with pytest.raises(LayoutError, match=r"layer 0 has a window of 128 tokens, more than the context of 127"):
        from_config({**configs.GPT_OSS_20B, "max_position_embeddings": 127})
    assert from_config({**configs.GPT_OSS_20B, "max_position_embeddings": 128}).layers[0].window == 128
    # a window that is switched off is none
    off = from_config({**configs.QWEN3_8B, "sliding_window": 131_072})
    assert {layer.window for layer in off.layers} == {None}


FULL, SLIDING = "full_attention", "sliding_attention"
M3 = configs.MINIMAX_M3["text_config"]
GEMMA4, STEP = configs.GEMMA4_26B["text_config"], configs.STEP_37["text_config"]
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
GLM = {k: v for k, v in configs.GLM_52.items() if k != "index_topk_freq"}
WINDOWED = {**configs.QWEN3_8B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}
CONTRADICTING = [
    (configs.MIMO_FLASH, "layer_types", [FULL, *[SLIDING] * 47], "hybrid_layer_pattern", 5),
    (configs.V4_FLASH, "layer_types", [*[SLIDING] * 2, *[CSA, HCA] * 20, HCA], "compress_ratios", 42),
    (M3, "layer_types", [FULL] * 4 + ["minimax_m3_sparse"] * 56, "sparse_attention_freq", 3),
    ({**GLM, "index_topk_pattern": "F" * 78}, "indexer_types", ["full"] * 77 + ["shared"], "index_topk_pattern", 77),
    (configs.GLM_52, "indexer_types", ["full"] * 78, "index_topk_freq", 3),
    (configs.raw("gemma-3-1b"), "layer_types", [SLIDING] * 26, "sliding_window_pattern", 5),
    (configs.NORTH, "layer_types", [*[SLIDING, FULL] * 24, FULL], "sliding_window_pattern", 0),
    (configs.NORTH, "mlp_layer_types", ["dense"] * 2 + ["sparse"] * 47, "first_k_dense_replace", 1),
    (WINDOWED, "layer_types", [FULL] * 31 + [SLIDING] * 5, "max_window_layers", 30),
    (configs.NEMO_12B, "layer_types", [FULL] * 39 + [SLIDING], "sliding_window", 39),
    ({**configs.NEMO_12B, "sliding_window": 4096}, "layer_types", [FULL] * 40, "sliding_window", 0),
]


@pytest.mark.parametrize(("config", "key", "types", "other", "layer"), CONTRADICTING)
def test_layer_lists_that_contradict_each_other(
    config: configs.Config, key: str, types: list[str], other: str, layer: int
) -> None:
    with pytest.raises(LayoutError, match=f"'{key}' and '{other}' contradict each other: layer {layer} is") as said:
        from_config({**config, key: types})
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("config", "more", "problem"),
    [
        (STEP, {"num_key_value_heads": 4}, "'num_attention_groups' and 'num_key_value_heads' .*: 8 and 4"),
        (
            STEP,
            {"num_sliding_attention_heads": 64},
            "'num_sliding_attention_heads' and 'attention_other_setting: num_attention_heads' .*: 64 and 96",
        ),
        (
            STEP,
            {"attention_other_setting": {"attention_type": FULL}},
            "attention_other_setting: key 'attention_type' is 'full_attention' .allowed: sliding_attention",
        ),
        (
            {**GEMMA4, "per_layer_config": {"5": {"head_dim": 256, "num_key_value_heads": 2}}},
            {},
            "'per_layer_config: 5: head_dim' and 'global_head_dim' contradict each other: 256 and 512",
        ),
        (
            {**GEMMA4, "per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 4}}},
            {},
            "'per_layer_config: 5: num_key_value_heads' and 'num_global_key_value_heads' .*: 4 and 2",
        ),
        (GEMMA4, {"per_layer_config": {"30": {"head_dim": 512}}}, "names layer 30, key 'num_hidden_layers' is 30"),
        (configs.MIMO_25, {"sliding_window": 512}, "'sliding_window' and 'sliding_window_size' .*: 512 and 128"),
        (
            configs.V4_FLASH,
            {"compress_rates": {CSA: 8}},
            f"'compress_rates: {CSA}' and 'compress_ratios' contradict each other: 8 and 4",
        ),
        (configs.V4_FLASH, {"compress_rate_hca": 64}, "'compress_rate_hca' and 'compress_ratios' .*: 64 and 128"),
        (
            M3,
            {"index_topk_blocks": 8},
            "'sparse_attention_config: sparse_topk_blocks' and 'index_topk_blocks' .*16 and 8",
        ),
        (
            M3,
            {"sparse_attention_config": {**M3["sparse_attention_config"], "use_sparse_attention": False}},
            "key 'use_sparse_attention' is off, and layer 3 is minimax_m3_sparse",
        ),
        (configs.GEMMA3_12B["text_config"], {"layer_types": [FULL] * 47}, "47 entries for 48 layers .key 'num_hidden"),
    ],
)
def test_keys_that_contradict_each_other(config: configs.Config, more: configs.Config, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem) as said:
        from_config({**config, **more})
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("config", "types"),
    [
        # Patterns and counts that the classes write at their defaults whatever the layers are.
        ({**configs.GEMMA3_12B["text_config"], "_sliding_window_pattern": 6}, [FULL, SLIDING] * 24),
        ({k: v for k, v in configs.NORTH.items() if k != "first_k_dense_replace"}, [FULL] * 2 + [SLIDING] * 47),
        ({**WINDOWED, "max_window_layers": 28}, [SLIDING, FULL] * 18),
    ],
)
def test_defaults_that_classes_write_beside_layer_types_say_nothing(config: configs.Config, types: list[str]) -> None:
    layers = from_config({**config, "layer_types": types}).layers
    assert [FULL if layer.window is None else SLIDING for layer in layers] == types


def test_layer_lists_that_agree() -> None:
    types = [
        "full_attention" if mark == 0 else "sliding_attention" for mark in configs.MIMO_FLASH["hybrid_layer_pattern"]
    ]
    assert from_config({**configs.MIMO_FLASH, "layer_types": types}) == from_config(configs.MIMO_FLASH)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**configs.HY3, "num_key_value_heads": 6}, "64 query heads do not divide over 6 KV heads"),
        (
            {**configs.LAGUNA_S, "num_attention_heads_per_layer": [48, 70, 72, 72] * 12},
            "70 query heads do not divide over 8 KV heads",
        ),
        ({**configs.GRANITE_3B, "hidden_size": 2561}, "hidden_size 2561 is no multiple of 40 heads"),
    ],
)
def test_head_counts_that_do_not_divide(config: configs.Config, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        from_config(config)


def test_a_layout_checks_itself() -> None:
    stored = (Component(KV(1, 8, 8)),)
    layer = Layer(0, 1, stored, 1.0)
    wrong = {
        "at least one layer": (),
        "layer 1 stands at position 0": (Layer(1, 1, stored, 1.0),),
        "layer 0 must either store": (Layer(0, 1, (), 1.0),),
        "layer 1 must either store": (layer, Layer(1, 1, stored, 1.0, cache_of=0)),
        "layer 0 reads layer 0": (Layer(0, 1, (), 1.0, cache_of=0),),
        "layer 2 reads layer 1": (layer, Layer(1, 1, (), 1.0, cache_of=0), Layer(2, 1, (), 1.0, cache_of=1)),
    }
    for problem, layers in wrong.items():
        with pytest.raises(LayoutError, match=problem):
            Layout("made", layers, 8, 8, 8)
    with pytest.raises(LayoutError, match="unknown cache dtype 'int3'"):
        Layout("made", (layer,), 8, 8, 8, kv_dtype="int3")


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys; from kvassay.layout.config import from_config; from kvassay.layout.groups import plan_groups; "
        "plan_groups(from_config('gemma-3-270m')); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
