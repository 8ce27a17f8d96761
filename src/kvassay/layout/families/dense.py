"""Families whose layers all have one shape: llama, qwen2, qwen3, granite, hy_v3, mistral."""

from __future__ import annotations

from kvassay.errors import UnsupportedModel
from kvassay.layout.families.base import (
    FULL,
    SLIDING,
    Family,
    head_dim,
    kv_component,
    kv_heads,
    layer_types,
    rope,
    spelt_types,
)
from kvassay.layout.model import KV, Layer
from kvassay.layout.raw import Raw


def _uniform(
    raw: Raw, windows: list[int | None], scale: float | None = None, qk_norm: bool = False
) -> tuple[Layer, ...]:
    """Return equal layers, one per entry of `windows`."""
    dim, heads = head_dim(raw), raw.integer("num_attention_heads")
    storage, rotary = KV(kv_heads(raw), dim, dim), rope(raw, dim)
    return tuple(
        Layer(
            index=index,
            q_heads=heads,
            components=(kv_component(raw, heads, storage, window=window),),
            scale=scale if scale is not None else dim**-0.5,
            rope=rotary,
            qk_norm=qk_norm,
        )
        for index, window in enumerate(windows)
    )


def _all_full(raw: Raw) -> list[int | None]:
    """Return no window for any layer; the type's classes ignore `layer_types`, so another kind is refused."""
    types = set(layer_types(raw, {FULL, SLIDING}, lambda _: FULL))
    if types != {FULL}:
        raise UnsupportedModel(f"{raw.name}: model type '{raw.model_type}' has no {SLIDING} layers")
    return [None] * raw.integer("num_hidden_layers")


def read_llama(raw: Raw) -> tuple[Layer, ...]:
    """Full attention on every layer."""
    return _uniform(raw, _all_full(raw))


def read_granite(raw: Raw) -> tuple[Layer, ...]:
    """Full attention whose logit scale is `attention_multiplier`."""
    return _uniform(raw, _all_full(raw), scale=raw.number("attention_multiplier"))


def read_hy_v3(raw: Raw) -> tuple[Layer, ...]:
    """Full attention with per-head norms on queries and keys."""
    return _uniform(raw, _all_full(raw), qk_norm=True)


def read_mistral(raw: Raw) -> tuple[Layer, ...]:
    """One window for all layers, or none; the class ignores `layer_types`, which may only say the same.

    The key must be there, null for none: the class default is a window of 4096.
    """
    if "sliding_window" not in raw.data:
        raise raw.error("missing key 'sliding_window' (null means no window)")
    window = raw.integer("sliding_window") if raw.has("sliding_window") else None
    kind, count = SLIDING if window else FULL, raw.integer("num_hidden_layers")
    spelt_types(raw, {FULL, SLIDING}, "sliding_window", lambda: [kind] * count, given=True)
    return _uniform(raw, [window] * count)


_QWEN_FIRST = 28
"""The class's `max_window_layers`."""


def _qwen_windows(raw: Raw) -> list[int | None]:
    """Return the windows: `sliding_window` counts only with `use_sliding_window`, from `max_window_layers` on.

    A `max_window_layers` of 28 beside `layer_types` says nothing: the class writes this default whatever they are.
    """
    window = raw.integer("sliding_window") if raw.flag("use_sliding_window", False) else None
    first = raw.integer("max_window_layers", minimum=0) if window else 0
    kinds = [SLIDING if window and i >= first else FULL for i in range(raw.integer("num_hidden_layers"))]
    types = spelt_types(
        raw, {FULL, SLIDING}, "max_window_layers", lambda: kinds, given=window is not None and first != _QWEN_FIRST
    )
    if SLIDING in types and window is None:
        raise raw.error("key 'layer_types' has sliding layers, but 'use_sliding_window' is not set")
    return [window if kind == SLIDING else None for kind in types]


def read_qwen2(raw: Raw) -> tuple[Layer, ...]:
    """Full attention, or windows on the upper layers if switched on."""
    return _uniform(raw, _qwen_windows(raw))


def read_qwen3(raw: Raw) -> tuple[Layer, ...]:
    """As qwen2, with per-head norms on queries and keys; `head_dim` is not hidden size over heads."""
    raw.integer("head_dim")
    return _uniform(raw, _qwen_windows(raw), qk_norm=True)


# Llama files of the first two generations carry no rope_theta: the class then takes 10000.
_FIRST_LLAMA = {"rope_theta": 10000.0}

FAMILIES = {
    "llama": Family(read_llama, _FIRST_LLAMA),
    "granite": Family(read_granite),
    "hy_v3": Family(read_hy_v3),
    "mistral": Family(read_mistral),
    "qwen2": Family(read_qwen2),
    "qwen3": Family(read_qwen3),
}
