"""Which models are refused because part of their sequence state is not a KV cache, and how that is said.

Recurrent, linear-attention and convolutional state cannot be kept or dropped token by token, so keeping
or dropping K/V of the other layers does not reproduce the model. Three independent signs are looked for
(model type, keys, layer types), so that a relative under a new name is refused as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from kvassay.errors import UnsupportedModel

STATE_MODEL_TYPES = (
    "qwen3_5*", "qwen3_next*", "qwen4_exp*", "kimi_linear*", "kimi_k3*", "nemotron_h*", "inkling*",
    "lfm2*", "lfm3*", "jamba*", "bamba*", "falcon_h1*", "falcon_mamba*", "mamba*", "granitemoehybrid*",
    "zamba*", "rwkv*", "recurrent_gemma*", "minimax", "minimax_m1*", "minimax_text*", "plamo2*", "xlstm*",
    "olmo_hybrid*",
)  # fmt: skip

STATE_KEYS = (
    "linear_attn_config", "linear_conv_kernel_dim", "linear_num_*", "linear_key_head_dim",
    "linear_value_head_dim", "linear_head_dim", "full_attention_interval", "hybrid_override_pattern",
    "layers_block_type", "mamba_*", "ssm_*", "conv_L_cache", "conv_kernel*", "number_of_conv_states",
    "sconv_*", "use_sconv", "short_conv*", "full_attn_idxs", "attn_layer_period", "attn_layer_offset",
    "lru_width", "kda_*", "rwkv_*", "gla_*",
)  # fmt: skip

STATE_LAYER_TYPES = (
    "linear_attention", "lightning_attention", "gated_deltanet", "kda", "mamba*", "ssm*", "conv*",
    "hybrid*", "recurrent*", "rwkv*",
)  # fmt: skip

_KERNELS = (
    "linear_conv_kernel_dim", "conv_L_cache", "sconv_kernel_size", "conv_kernel_size", "conv_kernel", "mamba_d_conv",
)  # fmt: skip

_ATTENDING = ("full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding")


def refuse_state(config: Mapping[str, Any], name: str, model_type: str) -> None:
    """Raise `UnsupportedModel` if `config` (of `model_type`, from `name`) keeps state that is not a KV cache.

    The one-line message names the sign, the layers that would page, and what an adapter would need.
    """
    sign = _sign(config, model_type)
    if sign is None:
        return
    total, paging = paging_layers(config)
    raise UnsupportedModel(
        f"{name}: model type '{model_type}' keeps recurrent or convolutional state beside its KV cache "
        f"({sign}); {_pages(total, paging)}; a state-transition adapter would have to snapshot, fork, roll "
        f"back and count {_state(config, total)}"
    )


def _sign(config: Mapping[str, Any], model_type: str) -> str | None:
    if _matches(model_type, STATE_MODEL_TYPES):
        return "known model type"
    for key, value in config.items():
        # null and false say that the model has no such part
        if value is not None and value is not False and _matches(key, STATE_KEYS):
            return f"key '{key}'"
    for kind in config.get("layer_types") or ():
        if _matches(str(kind), STATE_LAYER_TYPES):
            return f"layer type '{kind}'"
    return None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def paging_layers(config: Mapping[str, Any]) -> tuple[int | None, list[int] | None]:
    """Return the number of layers and the indices of those whose K/V would page; None where it is not said."""
    blocks = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if blocks:
        return len(blocks), [index for index, kind in enumerate(blocks) if kind in _ATTENDING]
    if isinstance(pattern, str):
        return len(pattern), [index for index, mark in enumerate(pattern) if mark == "*"]
    total = config.get("num_hidden_layers")
    return (total, _by_rule(config, total)) if isinstance(total, int) else (None, None)


def _by_rule(config: Mapping[str, Any], total: int) -> list[int] | None:
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers"):
        return [number - 1 for number in linear["full_attn_layers"]]  # counted from 1 in these files
    if interval := config.get("full_attention_interval"):
        return [index for index in range(total) if (index + 1) % interval == 0]
    if config.get("full_attn_idxs"):
        return list(config["full_attn_idxs"])
    if period := config.get("attn_layer_period"):
        return [index for index in range(total) if index % period == config.get("attn_layer_offset", 0)]
    if config.get("local_layer_ids") is not None:  # every layer attends, and every layer convolves
        return list(range(total))
    return None


def _pages(total: int | None, paging: list[int] | None) -> str:
    if total is None or paging is None:
        return "the file does not say which layers would page"
    return f"{len(paging)} of {total} layers would page ({spans(paging)})"


def _state(config: Mapping[str, Any], total: int | None) -> str:
    """Return whose state it is, and how large where the keys say so."""
    layers = state_layers(config)
    where = "the state of its other layers" if layers is None else f"the state of {len(layers)} of {total} layers"
    size, kernel = _recurrent_bytes(config), _kernel(config)
    parts = [f"{size} B each in fp32"] if size else []
    if size or kernel:  # all published recurrences convolve before they recur
        parts.append("a convolution window" + (f" (kernel {kernel})" if kernel else ""))
    return f"{where}: {' and '.join(parts)}" if parts else where


def state_layers(config: Mapping[str, Any]) -> list[int] | None:
    """Return the indices of the layers that keep such state; None where it is not said.

    Not simply those that do not page: a layer may keep both (Inkling), or neither (the experts of Nemotron).
    """
    blocks = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    linear = config.get("linear_attn_config")
    if blocks:
        return [index for index, kind in enumerate(blocks) if _matches(str(kind), STATE_LAYER_TYPES)]
    if isinstance(pattern, str):
        return [index for index, mark in enumerate(pattern) if mark == "M"]
    if isinstance(linear, Mapping) and linear.get("kda_layers"):
        return [number - 1 for number in linear["kda_layers"]]  # counted from 1 in these files
    total, paging = paging_layers(config)
    if total is None or paging is None:
        return None
    return [index for index in range(total) if index not in paging or len(paging) == total]


def _kernel(config: Mapping[str, Any]) -> int | None:
    """Return the kernel size of the convolutions, in tokens, where a key gives it."""
    linear = config.get("linear_attn_config")
    found = [config.get(key) for key in _KERNELS]
    found.append(linear.get("short_conv_kernel_size") if isinstance(linear, Mapping) else None)
    return next((size for size in found if isinstance(size, int)), None)


def _recurrent_bytes(config: Mapping[str, Any]) -> int | None:
    """Return the fp32 bytes of one layer's recurrent state where the keys give its shape."""
    linear = config.get("linear_attn_config")
    kda = linear if isinstance(linear, Mapping) else {}
    shapes = (
        [config.get(f"linear_{part}") for part in ("num_value_heads", "key_head_dim", "value_head_dim")],
        [kda.get("num_heads"), kda.get("head_dim"), kda.get("head_dim")],
        [config.get(key) for key in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")],
    )
    for shape in shapes:
        sizes = [size for size in shape if isinstance(size, int)]
        if len(sizes) == 3:
            return sizes[0] * sizes[1] * sizes[2] * 4
    return None


def spans(indices: Sequence[int]) -> str:
    """Return sorted indices as text with runs joined: `0-2, 6, 10`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
