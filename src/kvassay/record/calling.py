"""Calling transformers models in a way that holds over the supported versions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvassay.errors import RecordError


def cache_keyword(module: Any) -> str:
    """Return what `module.forward` calls its cache: `cache` from 5.24 on, before that `past_key_values`."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def new_cache(model: Any) -> Any:
    """Return the empty cache `model` itself would make: sliding layers get a sliding one.

    The model must exist first: some families register their cache layers when their file is imported.
    """
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a causal language model, or of the text model inside a multimodal one.

    `RecordError` if it keeps no list of them.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise RecordError(f"{type(model).__name__} keeps no list of decoder layers")
    return layers


def last_rows(tokens: int, last: int) -> Tensor:
    """Return what to pass as `logits_to_keep` for logits of the `last` of `tokens` tokens.

    A tensor, since at a number models with shared caches (Gemma 4) run the sharing layers for the last tokens alone.
    """
    return torch.arange(tokens - last, tokens)


@contextmanager
def attention_through(model: Any, name: str) -> Iterator[None]:
    """Send `model`'s attention through the function registered as `name`; restore the model's own on leaving."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
