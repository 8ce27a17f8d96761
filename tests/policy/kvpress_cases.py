"""What the two slow tests against kvpress share: where it is, a short context of each model, near-ties."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.layout.model import Layer, Layout
from kvassay.policy.base import EVERY_QUERY
from kvassay.policy.kvpress.bridge import SETTING
from kvassay.record.fetch import fetch
from kvassay.record.load import LoadedModel, load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.workload.registry import build
from kvassay.workload.sample import Sample

PEER = os.environ.get(SETTING)
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PEER is None, reason=f"{SETTING} names no python with kvpress: make kvpress-parity"),
]
CONTEXT = 1024
BUDGETS = (512, 256, 128)
NEAR = 1e-4
"""Relative distance to the cut within which rounding may decide."""


@dataclass(frozen=True)
class Shown:
    """One full layer of a recorded context: k, v [kv_heads, tokens, dim], rotated q [q_heads, tokens, dim]."""

    layer: Layer
    ordinal: int
    layers: int
    """Full layers of the model, of which this is the `ordinal`-th."""
    k: Tensor
    v: Tensor
    q: Tensor

    @property
    def data(self) -> LayerData:
        return LayerData.dense(self.k, self.v)


def context_of(model: str) -> tuple[LoadedModel, Sample]:
    """The model, fetched if need be, and a short context."""
    fetch(model)
    loaded = load(model)
    return loaded, build("needle_multikey", loaded.tokenizer, CONTEXT, questions=1)


def full_layers(layout: Layout) -> list[Layer]:
    return [layer for layer in layout.layers if layer.window is None]


def recorded(model: str, folder: Path) -> list[Shown]:
    """The full layers of a trace with every query."""
    loaded, sample = context_of(model)
    trace = record_sample(loaded, sample, folder / "trace", RecordOptions(q_tail=EVERY_QUERY, logits="none"))
    full, of = full_layers(trace.layout), trace.prefix
    return [
        Shown(layer, at, len(full), *(_heads_first(side(layer.index)) for side in (of.k, of.v, of.q)))
        for at, layer in enumerate(full)
    ]


def _heads_first(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).float().contiguous()


def apart(mine: Tensor, theirs: Tensor, score: Tensor) -> tuple[int, float]:
    """Tokens kept by one of two alone [heads, tokens], and how far from the cut the furthest of their scores lies.

    The cut is the highest score that was dropped, per row; the distance is relative to it.
    """
    cut = score.masked_fill(theirs, -torch.inf).amax(-1, keepdim=True)
    away = ((score - cut).abs() / cut.abs().clamp(min=1e-30))[mine != theirs]
    return len(away), float(away.max()) if len(away) else 0.0
