"""Absorbed attention: an MLA layer's queries and outputs in the space of what its cache holds.

The model expands every cached latent c into keys and values of each head, [W_uk c | rotary part] and W_uv c, and
attends to those. An engine never does: q_nope . (W_uk c) = (W_uk' q_nope) . c, so it takes W_uk into the query, attends
to the cached vectors themselves, as one KV head, and takes W_uv out of the result (DeepSeek-V2, arXiv 2405.04434,
section 2.1.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvassay.errors import RecordError
from kvassay.layout.model import Latent, Layer


class UpProjection(NamedTuple):
    """What makes a head's keys and values of a latent: key [heads, nope, dim], value [heads, v_dim, dim]."""

    key: Tensor
    value: Tensor

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [..., heads, n, nope + rope] as [..., heads, n, dim + rope], to be held against cached vectors."""
        nope = self.key.shape[1]
        return torch.cat([query[..., :nope] @ self.key.to(query), query[..., nope:]], -1)

    def materialise(self, output: Tensor) -> Tensor:
        """Outputs [..., heads, n, dim] over latents as the model's own attention gives them, [..., heads, n, v_dim]."""
        return output @ self.value.to(output).transpose(1, 2)


def latent_of(layer: Layer) -> Latent | None:
    """The layer's MLA storage, None if it has another."""
    storage = layer.components[0].storage if len(layer.components) == 1 else None
    return storage if isinstance(storage, Latent) and not storage.rotary_value else None


def up_projection(module: Any, layer: Layer) -> UpProjection:
    """Read an MLA attention module's `kv_b_proj`, float32 on the CPU; `RecordError` if the layout says otherwise."""
    latent, projection = latent_of(layer), getattr(module, "kv_b_proj", None)
    if latent is None or projection is None or getattr(projection, "bias", None) is not None:
        raise RecordError(f"layer {layer.index}: {type(module).__name__} has no plain kv_b_proj that expands a latent")
    nope = int(module.qk_head_dim) - latent.rope_dim
    width = nope + int(module.v_head_dim)
    weight = projection.weight.detach().float().cpu()
    expected = layer.q_heads * width, latent.dim
    if tuple(weight.shape) != expected:
        raise RecordError(f"layer {layer.index}: kv_b_proj is {list(weight.shape)}, the layout says {list(expected)}")
    key, value = weight.view(layer.q_heads, width, latent.dim).split([nope, int(module.v_head_dim)], 1)
    return UpProjection(key, value)


def cached_vectors(cache: Any, layer: Layer, last: int) -> Tensor:
    """The newest `last` vectors of a layer in a transformers cache, [1, last, dim + rope].

    The cache calls the latent `keys` and the rotary part `values`, [1, 1, tokens, elements] each.
    """
    latent, held = latent_of(layer), cache.layers[layer.index]
    found = held.keys.shape[-1], held.values.shape[-1]
    if latent is None or found != (latent.dim, latent.rope_dim):
        raise RecordError(f"layer {layer.index}: the cache holds {found} elements per token, the layout says {latent}")
    return torch.cat([held.keys[0, :, -last:], held.values[0, :, -last:]], -1)
