"""Whether synthetic rows may judge: where their ordering of policies was compared with recorded rows, and agreed.

`benchmarks/synthetic_validity.py` makes the comparison and writes `validity.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from scipy.stats import kendalltau

from kvassay.layout.model import KV, Layer
from kvassay.record.synthetic.statistics import Statistics

LEAST_TAU = 0.8
"""Kendall's tau-b from which two orderings count as agreeing."""
LEAST_POLICIES = 12
LEAST_BUDGETS = 3
FILE = "validity.json"


@dataclass(frozen=True)
class Comparison:
    """One recorded context against a synthetic one of the same shape and length."""

    statistics: str
    """sha256 of the statistics that were drawn from."""
    model: str
    """The recorded model."""
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    tokens: int
    policies: int
    tau: Mapping[str, float]
    """Kendall's tau-b of the policies' mean output errors, by budget; higher is better, 1 is the same ordering."""

    @property
    def agrees(self) -> bool:
        """Whether the ordering holds at every budget, over enough policies and budgets."""
        enough = self.policies >= LEAST_POLICIES and len(self.tau) >= LEAST_BUDGETS
        return enough and min(self.tau.values()) >= LEAST_TAU


def tau(recorded: Sequence[float], synthetic: Sequence[float]) -> float:
    """Kendall's tau-b of two lists of the same policies' figures."""
    return float(kendalltau(recorded, synthetic).statistic)


@cache
def known() -> tuple[Comparison, ...]:
    """The comparisons that come with the package."""
    found = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return tuple(Comparison(**entry) for entry in found)


def write(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write comparisons as `known` reads them."""
    path.write_text(json.dumps([_plain(entry) for entry in comparisons], indent=1) + "\n", encoding="utf-8")


def _plain(entry: Comparison) -> dict[str, Any]:
    return asdict(entry) | {"tau": {name: round(value, 4) for name, value in entry.tau.items()}}


def judges(statistics: Statistics, layer: Layer, comparisons: Sequence[Comparison] | None = None) -> bool:
    """Whether rows of this layer's shape drawn from these statistics may judge: every comparison of that shape agrees,
    and there is one."""
    kv = layer.kv
    if not isinstance(kv, KV):
        return False
    shape = layer.q_heads, kv.kv_heads, kv.k_dim, kv.v_dim
    mine = [
        entry
        for entry in (known() if comparisons is None else comparisons)
        if entry.statistics == statistics.sha256 and (entry.q_heads, entry.kv_heads, entry.k_dim, entry.v_dim) == shape
    ]
    return bool(mine) and all(entry.agrees for entry in mine)
