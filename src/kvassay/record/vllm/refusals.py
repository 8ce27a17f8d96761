"""What must hold of an engine before it is recorded: everything a trace could not tell is refused at the start."""

from __future__ import annotations

from typing import Any

from kvassay.errors import RecordError
from kvassay.layout.model import KV, Layer, Layout
from kvassay.record.capture import RELATIVE_SCALE_ERROR

SUPPORTED = ("0.32",)
"""Release series of vLLM whose engine was recorded and compared."""
DTYPES = ("float32", "float16")


def check_version(version: str) -> None:
    """`RecordError` unless the engine of this vLLM is one that was recorded and compared."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise RecordError(f"vLLM {version} cannot be recorded: {', '.join(SUPPORTED)}.x can")


def check_engine(config: Any) -> None:
    """`RecordError` for a `VllmConfig` under which hooks would see nothing, or not the whole of it."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if not model.enforce_eager:
        raise RecordError("recording needs enforce_eager=True (--enforce-eager): compiled layers call no hooks")
    if getattr(config, "use_v2_model_runner", False):
        raise RecordError("recording needs vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise RecordError(f"the engine runs in {dtype}; recording takes dtype={' or '.join(DTYPES)} (--dtype)")
    if cache.cache_dtype not in ("auto", dtype):
        raise RecordError(f"the KV cache is {cache.cache_dtype}: what it holds is not what hooks see; use 'auto'")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (size := getattr(parallel, name, 1)) != 1:
            raise RecordError(f"{name} is {size}; recording takes 1: one process must hold the model")
    for what, present in (
        ("speculative decoding", config.speculative_config is not None),
        ("LoRA", config.lora_config is not None),
        ("a KV connector", config.kv_transfer_config is not None),
    ):
        if present:
            raise RecordError(f"{what} is on; recording takes engines without it")


def check_layout(layout: Layout) -> None:
    """`RecordError` for a model of which layers keep more than keys and values: hooks on attention see no more."""
    for layer in layout.storing:
        plain = all(isinstance(part.storage, KV) and part.index is None for part in layer.components)
        if not plain or layer.topk is not None:
            raise RecordError(
                f"{layout.model_type}: layer {layer.index} ({layer.kind}) keeps more than keys and values, or reads a "
                "selection; record this model with transformers"
            )


def check_layer(layer: Layer, layout: Layout, module: Any) -> None:
    """`RecordError` if vLLM's attention layer is not what the layout says: traces rest on the layout alone."""
    source = layout.source(layer.index)
    impl = module.impl
    pairs: dict[str, tuple[object, object]] = {
        "query heads": (module.num_heads, layer.q_heads),
        "KV heads": (module.num_kv_heads, source.kv.kv_heads),
        "key dim": (module.head_size, source.kv.k_dim),
        "value dim": (getattr(module, "head_size_v", module.head_size), source.kv.v_dim),
        "window": (module.sliding_window or None, source.window),
        "soft-cap": (getattr(impl, "logits_soft_cap", None) or None, layer.softcap),
        "sinks": (getattr(impl, "sinks", None) is not None, layer.sinks),
    }
    for what, (found, expected) in pairs.items():
        if found != expected:
            raise RecordError(f"layer {layer.index}: {what} is {found} in vLLM, the layout says {expected}")
    if abs(impl.scale - layer.scale) > RELATIVE_SCALE_ERROR * abs(layer.scale):
        raise RecordError(f"layer {layer.index}: scale is {impl.scale} in vLLM, the layout says {layer.scale}")
