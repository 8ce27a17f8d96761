"""From rows of single questions to one cell per arm: means, intervals, paired differences, flips.

All arms of a trace set are averaged over the questions that every one of them answered, so that a difference
between two means is a paired difference; what had to be left out is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvassay.errors import ExperimentError
from kvassay.measure.metrics import AMOUNTS, QUALITY
from kvassay.measure.result import RECLAIM_MODES, BranchResult
from kvassay.measure.statistics import Estimate, Flips, clustered_mean, flips, worst_decile

DENSE = "dense"
"""Label of the arm all others are compared with."""

Key = tuple[str, int]
"""A question: (trace, branch)."""


@dataclass(frozen=True)
class Cell:
    """One arm over the shared questions of one trace set."""

    arm: str
    workload: str
    query_aware: bool
    samples: int
    """Questions averaged over: those that every arm answered."""
    contexts: int
    quality: Mapping[str, Estimate]
    """Mean and interval by metric (`metrics.QUALITY`)."""
    difference: Mapping[str, Estimate]
    """Arm minus dense, paired by question; empty if there is no dense arm."""
    flips: Mapping[str, Flips]
    """Against dense, for `task` (full score or not) and `top1` (every scored token right or not)."""
    worst_decile_nll: float
    """Mean NLL of the tenth of the questions with the largest, nats per token."""
    diverged: int
    """Questions whose generated tokens differ from dense's somewhere."""
    amounts: Mapping[str, float]
    """Plain means by metric (`metrics.AMOUNTS`)."""
    peak_bytes: float
    """Largest over questions."""
    blocks_freed: Mapping[str, float]
    """Mean blocks freed by reclaim mode, out of `amounts["blocks_total"]`."""


@dataclass(frozen=True)
class Aggregate:
    """The cells of one trace set, in the order in which arms first appear, and what was left out."""

    cells: tuple[Cell, ...]
    missing: tuple[str, ...] = field(default=())
    """One line per arm that lacks questions which others answered."""


def aggregate(rows: Sequence[BranchResult], seed: int = 0) -> Aggregate:
    """Cells of all arms in `rows`, which belong to one trace set.

    Raises:
        ExperimentError: no rows, a question answered twice by one arm, or no question that all arms answered.
    """
    by_arm = _by_arm(rows)
    everything = dict.fromkeys(key for answered in by_arm.values() for key in answered)
    shared = [key for key in everything if all(key in answered for answered in by_arm.values())]
    missing = tuple(
        f"{arm}: lacks {len(lacking)} of {len(everything)} questions, first {lacking[0][0]} question {lacking[0][1]}"
        for arm, answered in by_arm.items()
        if (lacking := [key for key in everything if key not in answered])
    )
    if not shared:
        raise ExperimentError(f"no question was answered by all {len(by_arm)} arms; {'; '.join(missing) or 'no rows'}")
    dense = by_arm.get(DENSE)
    reference = [dense[key] for key in shared] if dense is not None else None
    cells = tuple(_cell(arm, [answered[key] for key in shared], reference, seed) for arm, answered in by_arm.items())
    return Aggregate(cells, missing)


def _by_arm(rows: Sequence[BranchResult]) -> dict[str, dict[Key, BranchResult]]:
    by_arm: dict[str, dict[Key, BranchResult]] = {}
    for row in rows:
        answered = by_arm.setdefault(row.arm, {})
        key = (row.trace, row.branch)
        if key in answered:
            raise ExperimentError(f"{row.arm}: {row.trace} question {row.branch} appears twice")
        answered[key] = row
    return by_arm


def _cell(arm: str, rows: Sequence[BranchResult], dense: Sequence[BranchResult] | None, seed: int) -> Cell:
    contexts = [row.trace for row in rows]
    quality = {name: clustered_mean([_get(row, name) for row in rows], contexts, seed) for name in QUALITY}
    difference: dict[str, Estimate] = {}
    flipped: dict[str, Flips] = {}
    if dense is not None:
        pairs = list(zip(rows, dense, strict=True))
        for name in QUALITY:
            difference[name] = clustered_mean([_get(a, name) - _get(b, name) for a, b in pairs], contexts, seed)
        for name in ("task", "top1"):
            flipped[name] = flips([_right(row, name) for row in dense], [_right(row, name) for row in rows])
    return Cell(
        arm=arm,
        workload=rows[0].workload,
        query_aware=rows[0].query_aware,
        samples=len(rows),
        contexts=len(set(contexts)),
        quality=quality,
        difference=difference,
        flips=flipped,
        worst_decile_nll=worst_decile([row.nll for row in rows]),
        diverged=sum(row.divergence is not None for row in rows),
        amounts={name: _mean([_get(row, name) for row in rows]) for name in AMOUNTS},
        peak_bytes=max(row.peak_bytes for row in rows),
        blocks_freed={
            mode: _mean([row.blocks_freed[mode] for row in rows])
            for mode in RECLAIM_MODES
            if all(mode in row.blocks_freed for row in rows)
        },
    )


def _get(row: BranchResult, name: str) -> float:
    return float(getattr(row, name))


def _right(row: BranchResult, name: str) -> bool:
    """Full marks; a hair of float noise is not a wrong answer."""
    return _get(row, name) >= 1 - 1e-9


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
