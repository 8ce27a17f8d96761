"""KV cache specs: our layers and groups as vLLM describes them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import gcd
from typing import Any

from kvassay.cache.ops import GroupSpec
from kvassay.cache.prefix import alignment
from kvassay.cache.vllm.api import api, call, takes
from kvassay.errors import CacheError, UnsupportedModel
from kvassay.layout.groups import plan_groups
from kvassay.layout.model import KV, Latent, Layer, Layout

TORCH_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def layer_specs(layout: Layout, block_size: int) -> dict[str, Any]:
    """vLLM's spec of every layer that stores a cache, named by the layer's index; index keys are a layer of
    their own there, "3.index".

    `UnsupportedModel` for compressed entries, which vLLM plans on another path.
    """
    dtype = _torch_dtype(layout.kv_dtype)
    specs = {}
    for layer in layout.storing:
        specs[str(layer.index)] = _layer_spec(layer, block_size, dtype)
        if index := layer.components[0].index:
            specs[f"{layer.index}.index"] = _latent_spec(block_size, dtype, index.dim * index.heads)
    return specs


def _layer_spec(layer: Layer, block_size: int, dtype: Any) -> Any:
    storage = layer.components[0].storage
    if len(layer.components) > 1 or not isinstance(storage, KV | Latent):
        raise UnsupportedModel(f"layer {layer.index} ({layer.kind}) keeps compressed entries")
    if isinstance(storage, Latent):
        return _latent_spec(block_size, dtype, storage.elements)
    common = {"block_size": block_size, "dtype": dtype, "num_kv_heads": storage.kv_heads}
    common |= {"head_size": storage.k_dim, "head_size_v": storage.v_dim}
    if layer.window is None:
        return call(api().FullAttentionSpec, **common)
    return call(api().SlidingWindowSpec, **common, sliding_window=layer.window)


def _latent_spec(block_size: int, dtype: Any, elements: int) -> Any:
    return call(api().MLAAttentionSpec, block_size=block_size, dtype=dtype, num_kv_heads=1, head_size=elements)


def group_spec(group: GroupSpec, latent: bool = False) -> Any:
    """A spec for a group of which only heads, block size and window are known; head size 64, bfloat16.

    The manager looks at block size and window alone: the bytes of a block are the worker's business.
    """
    dtype = _torch_dtype("bfloat16")
    if latent:
        return _latent_spec(group.block_size, dtype, 64)
    common = {"block_size": group.block_size, "dtype": dtype, "num_kv_heads": max(group.kv_heads), "head_size": 64}
    if group.window is None:
        return call(api().FullAttentionSpec, **common)
    return call(api().SlidingWindowSpec, **common, sliding_window=group.window)


def layout_groups(layout: Layout, block_size: int) -> tuple[list[GroupSpec], frozenset[int]]:
    """The groups of a layout for a manager, and the indices of those that hold latents (MLA)."""
    groups, latents = [], set()
    for group in plan_groups(layout, block_size):
        storages = [layout.layers[layer].components[0].storage for layer in group.layers]
        if any(isinstance(storage, Latent) for storage in storages):
            latents.add(group.index)
        heads = tuple(storage.kv_heads if isinstance(storage, KV) else 1 for storage in storages)
        groups.append(GroupSpec(group.index, group.layers, heads, group.block_size, group.window))
    return groups, frozenset(latents)


def cache_config(
    groups: Sequence[GroupSpec], latents: frozenset[int], num_blocks: int, retention_interval: int | None
) -> Any:
    """vLLM's `KVCacheConfig` for groups of ours, without tensors."""
    if retention_interval is not None and not takes(api().KVCacheConfig, "prefix_cache_retention_interval"):
        raise CacheError(f"vLLM {api().version} has no prefix_cache_retention_interval: leave it None")
    named = [
        call(
            api().KVCacheGroupSpec,
            layer_names=[str(layer) for layer in group.layers],
            kv_cache_spec=group_spec(group, group.index in latents),
        )
        for group in groups
    ]
    return call(
        api().KVCacheConfig,
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=named,
        prefix_cache_retention_interval=retention_interval,
    )


def block_sizes(groups: Sequence[GroupSpec]) -> tuple[int, int]:
    """Scheduler and hash block size, as `resolve_kv_cache_block_sizes` sets them: LCM and GCD."""
    return alignment(groups), gcd(*(group.block_size for group in groups))


def _torch_dtype(name: str) -> Any:
    return getattr(importlib.import_module("torch"), TORCH_DTYPES.get(name, name))
