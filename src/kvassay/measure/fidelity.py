"""Attention fidelity: how far an arm's attention output is from dense's, and what share of the mass it may read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvassay.cache.data import Stored
from kvassay.measure.result import LayerFidelity


@dataclass
class Deviation:
    """Sums over queries of one layer, in double precision."""

    squared_errors: list[float] = field(default_factory=list)
    """By query head."""
    squared_norms: list[float] = field(default_factory=list)
    mass: float = 0.0
    rows: int = 0
    read: float = 0.0
    scanned: float = 0.0
    dense: float = 0.0
    queries: int = 0

    def add(self, mine: Tensor, dense: Tensor, share: Tensor) -> None:
        """Outputs [q_heads, queries, v_dim] of arm and dense, and the arm's share of the mass [q_heads, queries]."""
        errors = (mine.double() - dense.double()).square().sum((1, 2)).tolist()
        norms = dense.double().square().sum((1, 2)).tolist()
        self.squared_errors = _added(self.squared_errors, errors)
        self.squared_norms = _added(self.squared_norms, norms)
        self.mass += float(share.double().sum())
        self.rows += share.numel()

    def charge(self, read: float, scanned: float, dense: float, queries: int) -> None:
        """Bytes that `queries` read of the arm's tokens, scanned to choose them, and read under dense, in all."""
        self.read, self.scanned, self.dense = self.read + read, self.scanned + scanned, self.dense + dense
        self.queries += queries

    def join(self, other: Deviation) -> None:
        """Add the same queries under other query heads, which come after these."""
        self.squared_errors = [*self.squared_errors, *other.squared_errors]
        self.squared_norms = [*self.squared_norms, *other.squared_norms]
        self.mass, self.rows = self.mass + other.mass, self.rows + other.rows
        self.read, self.scanned = self.read + other.read, self.scanned + other.scanned
        self.dense, self.queries = self.dense + other.dense, other.queries

    @property
    def output_error(self) -> float:
        """||arm - dense|| / ||dense|| over all queries and heads; an error where dense is 0 is infinite."""
        return _relative(math.fsum(self.squared_errors), math.fsum(self.squared_norms))

    @property
    def head_errors(self) -> tuple[float, ...]:
        """The same of each query head alone."""
        return tuple(map(_relative, self.squared_errors, self.squared_norms))

    @property
    def retained_mass(self) -> float:
        """Mean share of dense's mass, in [0, 1]."""
        return self.mass / self.rows


def _added(sums: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)


def _relative(squared_error: float, squared_norm: float) -> float:
    if squared_error == 0.0:
        return 0.0
    return math.sqrt(squared_error / squared_norm) if squared_norm else math.inf


def retained_share(weights: Tensor, dense: Stored, data: Stored, seen: Tensor) -> Tensor:
    """Per query, the share of dense's attention mass that lies on tokens the arm reads: [q_heads, queries].

    weights: [q_heads, queries, tokens] of dense over `dense`, whose tokens have consecutive positions
    seen: bool [kv_heads or q_heads, queries, n], what the arm reads of `data`
    A sink's mass belongs to no token and is left out of both.
    """
    kv_heads, n = data.positions.shape
    q_heads, queries, tokens = weights.shape
    grouped = weights.view(kv_heads, q_heads // kv_heads, queries, tokens)
    column = (data.positions - dense.positions[:, :1]).clamp(min=0)
    at = torch.gather(grouped, -1, column[:, None, None].expand(*grouped.shape[:3], n))
    kept = (at * seen.view(kv_heads, -1, queries, n)).sum(-1)
    return (kept / grouped.sum(-1)).view(q_heads, queries)


@dataclass(frozen=True)
class ArmFidelity:
    """One arm over all branches of a trace, and over the layers it may act on."""

    arm: str
    layers: int
    """How many layers it may act on."""
    output_error: float
    """Mean over layers and branches of `LayerFidelity.output_error`; lower is better."""
    worst_error: float
    """The largest of the layers' means over branches."""
    worst_layer: int
    """The layer of `worst_error`."""
    retained_mass: float
    """Mean over layers and branches of `LayerFidelity.retained_mass`; higher is better."""
    least_mass: float
    """The smallest of the layers' means over branches."""
    least_layer: int
    """The layer of `least_mass`."""
    read_fraction: float = 0.0
    """Sum over layers and branches of `LayerFidelity.read_bytes` / the same of dense's; lower is better."""


def screen(rows: Iterable[LayerFidelity]) -> list[ArmFidelity]:
    """One line per arm, in order of appearance; layers that an arm may not act on are left out."""
    found: dict[str, dict[int, list[LayerFidelity]]] = {}
    for row in rows:
        if row.in_scope:
            found.setdefault(row.arm, {}).setdefault(row.layer, []).append(row)
    return [_line(arm, layers) for arm, layers in found.items()]


def _read_fraction(rows: Iterable[LayerFidelity]) -> float:
    """What an arm reads of what dense reads; 0 if nothing was counted."""
    every = list(rows)
    dense = math.fsum(row.dense_bytes for row in every)
    return math.fsum(row.read_bytes for row in every) / dense if dense else 0.0


def _line(arm: str, layers: dict[int, list[LayerFidelity]]) -> ArmFidelity:
    errors = {layer: _mean([row.output_error for row in rows]) for layer, rows in layers.items()}
    masses = {layer: _mean([row.retained_mass for row in rows]) for layer, rows in layers.items()}
    worst, least = max(errors, key=lambda x: errors[x]), min(masses, key=lambda x: masses[x])
    return ArmFidelity(
        arm,
        len(layers),
        _mean(list(errors.values())),
        errors[worst],
        worst,
        _mean(list(masses.values())),
        masses[least],
        least,
        _read_fraction(row for rows in layers.values() for row in rows),
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
