"""Model folders that are damaged or contradict themselves: one line that names the file, the key or the weight."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from kvassay.errors import KvassayError, LayoutError, ModelError, UnsupportedModel
from kvassay.record.load import describe, load

from . import tiny

WEIGHTS = "model.safetensors"
KEY = "model.layers.0.self_attn.k_proj.weight"
FULL, SLIDING = "full_attention", "sliding_attention"


def said(folder: Path) -> str:
    with pytest.raises(KvassayError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny.save(folder / family, family) for family in ("llama", "gemma3", "mimo_v2_flash")}


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_truncated_weights(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(saved["llama"], tmp_path / "cut")
    file = folder / WEIGHTS
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    assert said(folder) == f"{file}: cut short: {whole - 1} bytes, its header describes {whole}; download it again"
    os.truncate(file, whole + 1)
    assert said(folder).startswith(f"{file}: too long: {whole + 1} bytes")
    for size in (100, 7, 0):
        os.truncate(file, size)
        assert said(folder) == f"{file}: {size} bytes, not a safetensors file or cut short in its header"
    file.write_bytes((8).to_bytes(8, "little") + b"\xff" * 8)
    assert said(folder) == f"{file}: 16 bytes, not a safetensors file or cut short in its header"


def test_weights_that_are_missing_or_of_another_shape_are_not_drawn_at_random(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(saved["llama"], tmp_path / "short")
    tensors = load_file(folder / WEIGHTS)
    fewer = {key: x for key, x in tensors.items() if key != KEY}
    save_file(fewer, folder / WEIGHTS, metadata={"format": "pt"})
    assert said(folder) == f"{folder}: its weights do not fit its config: '{KEY}' is missing"
    save_file({**tensors, KEY: tensors[KEY][:8].clone()}, folder / WEIGHTS, metadata={"format": "pt"})
    assert said(folder).endswith(f"'{KEY}' is [8, 64], the model needs [32, 64]")
    narrow = {key: x for key, x in tensors.items() if "k_proj" not in key}
    save_file(narrow, folder / WEIGHTS, metadata={"format": "pt"})
    assert said(folder).endswith(f"'{KEY}' is missing, and 3 more")


CONFIGS: list[tuple[str, dict[str, Any], type[KvassayError], str]] = [
    ("gemma3", {"layer_types": [FULL]}, LayoutError, "key 'layer_types' has 1 entries for 4 layers"),
    ("gemma3", {"layer_types": [FULL] * 3 + ["odd"]}, UnsupportedModel, "layer type 'odd' is not one that"),
    ("gemma3", {"layer_types": [FULL] * 3 + ["conv"]}, UnsupportedModel, "1 of 4 layers: .*|3 of 4 layers would page"),
    ("gemma3", {"sliding_window": 5000}, LayoutError, "window of 5000 tokens, more than the context of 4096"),
    ("gemma3", {"num_key_value_heads": 3}, LayoutError, "4 query heads do not divide over 3 KV heads"),
    ("llama", {"num_key_value_heads": 3}, LayoutError, "4 query heads do not divide over 3 KV heads"),
    ("llama", {"num_attention_heads": "four"}, LayoutError, "'num_attention_heads' must be an integer, not 'four'"),
    ("llama", {"hidden_size": 66, "head_dim": None}, LayoutError, "hidden_size 66 is no multiple of 4 heads"),
    ("llama", {"model_type": "lama"}, UnsupportedModel, "unknown model type 'lama' .did you mean 'llama'"),
    ("llama", {"model_type": "kimi_k3"}, UnsupportedModel, "'kimi_k3' keeps recurrent or convolutional state"),
    (
        "mimo_v2_flash",
        {"hybrid_layer_pattern": [0, 1, 0, 0]},
        LayoutError,
        "'layer_types' and 'hybrid_layer_pattern' contradict each other: layer 2 is sliding_attention and full",
    ),
]


@pytest.mark.parametrize(("family", "changes", "kind", "message"), CONFIGS)
def test_configurations_that_make_no_sense_name_file_and_key(
    family: str, changes: dict[str, Any], kind: type[KvassayError], message: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(saved[family], tmp_path / "wrong")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (folder / WEIGHTS).unlink()  # refused before the weights are looked for
    text = said(folder)
    assert re.search(message, text), text
    assert text.startswith(str(file))
    with pytest.raises(kind):
        describe(folder)


def test_what_only_the_library_finds_wrong_is_one_line_too(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(saved["llama"], tmp_path / "odd")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": "tiny"}))
    with pytest.raises(ModelError, match=r"cannot be loaded as a causal language model .*rms_norm_eps"):
        load(folder)
