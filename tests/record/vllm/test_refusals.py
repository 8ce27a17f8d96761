from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.layout.config import from_config
from kvassay.record.vllm.engine import layer_index
from kvassay.record.vllm.refusals import check_engine, check_layer, check_layout, check_version
from tests.record import tiny


def config(**changes: Any) -> Any:
    flat = {
        "enforce_eager": True,
        "dtype": torch.float32,
        "cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "use_v2_model_runner": False,
        "speculative_config": None,
        "lora_config": None,
        "kv_transfer_config": None,
    }
    parts = SimpleNamespace(**{**flat, **changes})
    return SimpleNamespace(model_config=parts, cache_config=parts, parallel_config=parts, **vars(parts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enforce_eager": False}, "needs enforce_eager=True"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"dtype": torch.bfloat16}, "runs in bfloat16"),
        ({"cache_dtype": "fp8"}, "KV cache is fp8"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"speculative_config": object()}, "speculative decoding is on"),
        ({"lora_config": object()}, "LoRA is on"),
    ],
)
def test_engines_that_hooks_do_not_see_through_are_refused(changes: dict[str, Any], message: str) -> None:
    check_engine(config())
    check_engine(config(dtype=torch.float16, cache_dtype="float16"))
    with pytest.raises(RecordError, match=message):
        check_engine(config(**changes))


def test_versions() -> None:
    check_version("0.32.0")
    check_version("0.32.7")
    for other in ("0.3.2", "0.31.9", "0.33.0", "1.0"):
        with pytest.raises(RecordError, match=r"cannot be recorded: 0\.32\.x can"):
            check_version(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 8}, "query heads is 8 in vLLM, the layout says 4"),
        ({"sliding_window": 7}, "window is 7 in vLLM, the layout says 8"),
        ({"logits_soft_cap": None}, "soft-cap is None in vLLM, the layout says 2.0"),
        ({"scale": 0.25}, "scale is 0.25 in vLLM"),
        ({"sinks": torch.zeros(4)}, "sinks is True"),
    ],
)
def test_a_layer_must_be_what_the_layout_says(changes: dict[str, Any], message: str) -> None:
    layout = from_config(tiny.config_of("gemma2"))
    layer = next(layer for layer in layout.layers if layer.window == 8)
    flat = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "sliding_window": 8,
        "logits_soft_cap": 2.0,
        "scale": 24**-0.5,
        "sinks": None,
    }
    check_layer(layer, layout, SimpleNamespace(impl=SimpleNamespace(**flat), **flat))
    wrong = {**flat, **changes}
    with pytest.raises(RecordError, match=message):
        check_layer(layer, layout, SimpleNamespace(impl=SimpleNamespace(**wrong), **wrong))


def test_layer_names() -> None:
    assert layer_index("model.layers.7.self_attn.attn") == 7
    assert layer_index("layers.12") == 12
    for name in ("model.norm", "model.layers.7.experts.3"):
        with pytest.raises(RecordError, match="does not say which layer"):
            layer_index(name)


@pytest.mark.parametrize("name", ["mistral-small-4", "glm-5.2", "minimax-m3", "deepseek-v4-flash"])
def test_models_that_keep_more_than_keys_and_values_are_refused(name: str) -> None:
    with pytest.raises(RecordError, match=r"layer \d+ .* keeps more than keys and values, or reads a selection"):
        check_layout(from_config(name))


def test_models_that_keep_keys_and_values_are_not() -> None:
    for name in ("gemma-3-270m", "gpt-oss-20b", "smollm2-135m"):
        check_layout(from_config(name))
