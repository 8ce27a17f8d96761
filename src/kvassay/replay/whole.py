"""A layer with all its KV heads as a policy may see it when their keys and values do not fit into memory together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol as Interface

import torch
from torch import Tensor

from kvassay.cache.data import LayerData, Run
from kvassay.errors import PolicyError
from kvassay.layout.model import KV, Component, Layer
from kvassay.policy.budget import Protection
from kvassay.policy.card import Card, Evidence
from kvassay.policy.queries import Queries
from kvassay.policy.views import LayerView, Meter


class Rows(Interface):
    """What is needed of `replay.onehead.LayerSource`."""

    layer: Layer
    context: int

    def keys(self, head: int, first: int, count: int) -> Tensor:
        """[count, k_dim]."""

    def values(self, head: int, first: int, count: int) -> Tensor:
        """[count, v_dim]."""

    def queries(self, head: int, first: int, count: int) -> Tensor:
        """[count, k_dim]."""


class AllHeads(LayerView):
    """Positions and attention of all heads, the latter made head by head; keys and values only of one (`one`)."""

    def __init__(
        self,
        source: Rows,
        card: Card,
        protection: Protection,
        meter: Meter,
        window: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`window`: how many of the context's last queries are offered."""
        self.clock = clock
        self.drawing = 0.0
        """Seconds in which rows were drawn or read, which is no work of the policy's."""
        kv = source.layer.kv
        assert isinstance(kv, KV)
        self.source, self._window, self._kv = source, min(window, source.context), kv
        first = source.context - self._window
        positions = torch.arange(source.context).expand(kv.kv_heads, -1)
        # Geometry alone: a sum over it is an error of torch's, never a silent zero.
        rows = Run(
            lambda: torch.empty(kv.kv_heads, source.context, kv.k_dim, device="meta"),
            lambda: torch.empty(kv.kv_heads, source.context, kv.v_dim, device="meta"),
            source.context,
        )
        super().__init__(
            source.layer,
            card,
            lambda: LayerData(rows, positions, positions),
            length=source.context,
            protection=protection,
            meter=meter,
            queries={Evidence.QUERIES: lambda: self._asked(range(source.layer.q_heads), first)},
        )

    def one(self, head: int) -> LayerView:
        """The view of one KV head, charged to the same meter."""
        layer, kv = self.source.layer, self._kv
        group = layer.q_heads // kv.kv_heads
        part = Component(KV(1, kv.k_dim, kv.v_dim), layer.components[0].visibility)
        members = range(head * group, (head + 1) * group)
        positions = torch.arange(self.length)[None]
        rows = Run(
            lambda: self._side(self.source.keys, head), lambda: self._side(self.source.values, head), self.length
        )
        return LayerView(
            replace(layer, q_heads=group, components=(part,)),
            self.card,
            lambda: LayerData(rows, positions, positions),
            length=self.length,
            protection=self.protection,
            meter=self._meter,
            queries={Evidence.QUERIES: lambda: self._asked(members, self.length - self._window)},
        )

    def attend(self, queries: Queries) -> Tensor:
        """Softmax rows [q_heads, queries, tokens] of given queries, one KV head after the other."""
        group = self.layer.q_heads // self.kv_heads
        parts = []
        for head in range(self.kv_heads):
            mine = Queries(queries.q[head * group : (head + 1) * group], queries.positions)
            parts.append(self.one(head).attend(mine))
        return torch.cat(parts)

    @property
    def keys(self) -> Tensor:
        """Refused: all heads' keys at once are what a long context has no memory for."""
        raise self._too_large("keys")

    @property
    def keys_unrotated(self) -> Tensor:
        """Refused as `keys`."""
        raise self._too_large("keys")

    @property
    def values(self) -> Tensor:
        """Refused as `keys`."""
        raise self._too_large("values")

    def _too_large(self, what: str) -> PolicyError:
        return PolicyError(
            f"policy '{self.card.name}' looks at the {what} of all {self.kv_heads} KV heads of layer {self.index} at "
            "once; here they are shown one head at a time"
        )

    def _side(self, side: Callable[[int, int, int], Tensor], head: int) -> Tensor:
        start = self.clock()
        rows = side(head, 0, self.source.context)[None]
        self.drawing += self.clock() - start
        return rows

    def _asked(self, members: range, first: int) -> Queries:
        start, count = self.clock(), self.source.context - first
        q = torch.stack([self.source.queries(member, first, count) for member in members])
        self.drawing += self.clock() - start
        return Queries(q, torch.arange(first, self.source.context))
