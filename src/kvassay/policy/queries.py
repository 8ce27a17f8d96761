"""Queries that were recorded, or are asked now: evidence that views offer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.policy.readset import ReadSet


@dataclass(frozen=True)
class Queries:
    """Post-RoPE queries [q_heads, queries, dim] and their true positions [queries].

    chosen: what the model's own index let each of them read; None where it has none
    """

    q: Tensor
    positions: Tensor
    chosen: ReadSet | None = None

    def last(self, count: int) -> Queries:
        """The last `count` of them (all, if there are fewer)."""
        return self.part(slice(-count, None))

    def before(self, position: int) -> Queries:
        """Those at earlier positions."""
        return self.part(self.positions < position)

    def part(self, rows: slice | Tensor) -> Queries:
        """Some of them: a slice, or bool [queries]."""
        chosen = None if self.chosen is None else self.chosen.part(rows)
        return Queries(self.q[:, rows], self.positions[rows], chosen)

    def then(self, more: Queries) -> Queries:
        """These and more."""
        both = None if self.chosen is None or more.chosen is None else self.chosen.then(more.chosen)
        return Queries(torch.cat([self.q, more.q], 1), torch.cat([self.positions, more.positions]), both)
