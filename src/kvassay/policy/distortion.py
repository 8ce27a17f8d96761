"""Distortion tables of RDKV (arXiv 2605.08317): published ones, and one measured on calibration text.

A table says which share of a side's energy is lost at a width: 1 at 0 bits, 0 at 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kvassay.cache.codec import WIDTHS, ChannelGroups, TokenGroups
from kvassay.policy.allocation import Table
from kvassay.policy.base import Artefact, Calibration
from kvassay.policy.card import Evidence

EVIDENCE = frozenset({Evidence.KEYS, Evidence.VALUES})
"""What `measure` touches."""

PUBLISHED: Mapping[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = MappingProxyType(
    {
        "default": ((0.277, 0.011, 6.1e-5), (0.312, 0.0138, 4.8e-5)),
        "llama-3.1-8b": ((0.149, 0.0062, 2.2e-5), (0.313, 0.0140, 4.9e-5)),
        "llama-2-13b": ((0.288, 0.0124, 5.5e-5), (0.272, 0.0122, 4.4e-5)),
        "mistral-7b": ((0.280, 0.0116, 6.9e-5), (0.296, 0.0130, 4.5e-5)),
        "qwen2.5-72b": ((0.296, 0.0164, 4.4e-3), (0.281, 0.0126, 4.4e-5)),
        "qwen3-4b": ((0.347, 0.0147, 1.5e-4), (0.313, 0.0139, 4.8e-5)),
    }
)
"""Keys per channel, then values per token, at 2, 4 and 8 bits: the paper's appendix, and the code's default."""


def table(errors: tuple[float, ...]) -> Table:
    """All widths, from the errors at 2, 4 and 8 bits."""
    return {0: 1.0, **dict(zip(WIDTHS, errors, strict=True)), 16: 0.0}


def measure(source: Calibration, clamp_zero: bool = False) -> Artefact:
    """`key` and `value`, float64 [3]: error at 2, 4 and 8 bits, mean over layers and KV heads of calibration text.

    Keys: squared error per channel over the channel's variance pooled over heads. Values: squared error per token
    over the sum of squares. As calibrate_epsilon.py of Junkai1860/RDKV.
    """
    keys, values = [], []
    for _, layer in source.layers():
        k, v = layer.keys.float(), layer.values.float()
        spread = k.var(dim=1, correction=0).mean(0).clamp(min=1e-12)
        keys.append([float((_channel_error(k, bits, clamp_zero) / spread).mean()) for bits in WIDTHS])
        values.append([float(_token_error(v, bits, clamp_zero)) for bits in WIDTHS])
    return Artefact(
        {
            "key": torch.tensor(keys, dtype=torch.float64).mean(0),
            "value": torch.tensor(values, dtype=torch.float64).mean(0),
        },
        source.sha256,
    )


def _channel_error(k: Tensor, bits: int, clamp_zero: bool) -> Tensor:
    """Mean squared error per head and channel: [kv_heads, dim]."""
    return (ChannelGroups.encode(k, bits, None, clamp_zero).decode() - k).square().mean(1)


def _token_error(v: Tensor, bits: int, clamp_zero: bool) -> Tensor:
    """Squared error over energy, mean over heads."""
    lost = (TokenGroups.encode(v, bits, None, clamp_zero).decode() - v).square().sum((1, 2))
    return (lost / v.square().sum((1, 2)).clamp(min=1e-12)).mean()
