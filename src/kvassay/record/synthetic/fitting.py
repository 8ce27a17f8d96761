"""Measured heads in another layer's shape: which recorded channels stand for which of its own.

A head wider than the recorded ones is made of several recorded heads side by side, a narrower one of every n-th pair
of channels. Pairs that rotate together are dealt out in order of rotary frequency, so that what turned fast still turns
fast; channels that do not rotate take the slowest. Queries are scaled so that logits keep their variance under the
layer's own factor. Query heads beyond the recorded group repeat its statistics with other noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.layout.model import Layer, Rope
from kvassay.record.synthetic.statistics import LayerStatistics, Side


@dataclass(frozen=True)
class Stream:
    """Rows of one head of the target layer, before rotation."""

    centres: Tensor
    """[types, dim]."""
    basis: Tensor
    """[dim, directions]."""
    rest: Tensor
    """[dim]."""
    lasting: Tensor
    """[spans, directions + dim]: share of the noise that lasts over each span."""
    first: Tensor | None = None
    """[dim]: the row of position 0, where it is known."""
    question: Tensor | None = None
    """[dim]: centre of rows after the context, of whatever type, where it differs."""

    @property
    def width(self) -> int:
        """Independent normal numbers that one row takes."""
        return self.lasting.shape[-1]

    def rows(self, ids: Tensor, noise: Tensor, lasting: Sequence[Tensor]) -> Tensor:
        """Rows [tokens, dim] of types `ids` from standard normal numbers: `noise` [tokens, width], and for each span
        one row for all of its tokens, [tokens / span, width]."""
        scatter = noise * (1 - self.lasting.sum(0)).clamp(min=0).sqrt()
        for share, rows in zip(self.lasting, lasting, strict=True):
            scatter = (scatter.unflatten(0, (len(rows), -1)) + (rows * share.sqrt())[:, None]).flatten(0, 1)
        directions = self.basis.shape[1]
        return torch.addcmul(
            self.centres[ids] + scatter[:, :directions] @ self.basis.T, scatter[:, directions:], self.rest
        )


@dataclass(frozen=True)
class FittedHead:
    """One KV head of the target layer with its query heads."""

    key: Stream
    value: Stream
    queries: tuple[Stream, ...]
    aimed: tuple[float, ...]
    """By query head: share of the queries aimed at one token."""


def fit_head(layer: Layer, head: int, known: LayerStatistics, scale: float) -> FittedHead:
    """KV head `head` of a layer with K/V of its own; `scale` is the recorded factor of the logits."""
    kv, group = layer.kv, layer.group_size
    wide = math.ceil(kv.k_dim / known.keys.dim)
    parts = [(head * wide + i) % known.kv_heads for i in range(wide)]
    places = _key_places(kv.k_dim, known.keys.dim, len(parts), layer.rope)
    value_parts = [parts[i % len(parts)] for i in range(math.ceil(kv.v_dim / known.values.dim))]
    # So many independent recorded logits add up in one of this layer's.
    factor = scale / (layer.scale * math.sqrt(kv.k_dim / known.keys.dim))
    members = [[part * known.group + g % known.group for part in parts] for g in range(group)]
    return FittedHead(
        _stream(known.keys, parts, places, first=known.first_key),
        _stream(known.values, value_parts, torch.arange(kv.v_dim), first=known.first_value),
        tuple(_stream(known.queries, chosen, places, factor, question=known.question) for chosen in members),
        tuple(float(known.aimed[chosen[0]]) for chosen in members),
    )


def _key_places(dim: int, recorded: int, parts: int, rope: Rope | None) -> Tensor:
    """For each target channel the channel of the recorded heads laid side by side that it takes: int64 [dim]."""
    half = recorded // 2
    sources = [(part * recorded + pair, part * recorded + pair + half) for pair in range(half) for part in range(parts)]
    targets = _pairs(dim, rope)
    places = torch.zeros(dim, dtype=torch.int64)
    for ordinal, pair in enumerate(targets):
        taken = sources[ordinal * len(sources) // len(targets)]
        places[list(pair)] = torch.tensor(taken)
    return places


def _pairs(dim: int, rope: Rope | None) -> list[tuple[int, int]]:
    """Channels that rotate together, fastest first, then those that do not rotate."""
    turning = 0 if rope is None else rope.dims
    if rope is not None and rope.interleaved:
        return [(i, i + 1) for i in range(0, dim - 1, 2)]
    half = turning // 2
    still = range(turning, dim - 1, 2)
    return [(i, i + half) for i in range(half)] + [(i, i + 1) for i in still]


def _stream(
    side: Side,
    parts: list[int],
    places: Tensor,
    factor: float = 1.0,
    first: Tensor | None = None,
    question: Tensor | None = None,
) -> Stream:
    basis = torch.block_diag(*(side.basis[part] for part in parts))[places]
    rank = side.basis.shape[-1]
    shares = [side.lasting[part].clamp(0, 1)[:, None] for part in parts]
    own = torch.cat([share.expand(-1, side.dim) for share in shares], 1)[:, places]
    return Stream(
        torch.cat([side.centres[part] for part in parts], -1)[:, places] * factor,
        basis * factor,
        torch.cat([side.rest[part] for part in parts])[places] * factor,
        torch.cat([*(share.expand(-1, rank) for share in shares), own], 1),
        None if first is None else torch.cat([first[part] for part in parts])[places],
        None if question is None else torch.cat([question[part] for part in parts])[places] * factor,
    )
