"""From rows of single questions to one cell per arm: means, intervals, paired differences, flips, noise.

All arms of a trace set are averaged over the questions that every one of them answered, so that a difference
between two means is a paired difference; what had to be left out is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from kvassay.errors import ExperimentError
from kvassay.measure.metrics import AMOUNTS, CARDS, QUALITY
from kvassay.measure.resample import Estimate, Floats, Resampling
from kvassay.measure.result import RECLAIM_MODES, BranchResult, measured
from kvassay.measure.statistics import Flips, flips, noise, worst_deciles

DENSE = "dense"
"""Label of the arm all others are compared with."""
AGAIN = f"{DENSE}'"
"""Label of dense in another batch split, whose distance from dense is noise."""
FLIPPED = ("task", "top1")
"""Metrics that make an answer right or wrong."""

FULL_MARKS = 1 - 1e-9
"""From which score on an answer is right: a hair of float noise is not a wrong one."""

_AMOUNTS = attrgetter(*AMOUNTS)

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
    """Mean and interval by metric (`metrics.QUALITY`), without those that were not measured (`result.measured`)."""
    difference: Mapping[str, Estimate]
    """Arm minus dense, paired by question; empty if there is no dense arm."""
    noise: Mapping[str, float | None]
    """What a difference must exceed to mean anything (`statistics.noise`), by metric; None with too few contexts."""
    worst: Mapping[str, float]
    """Mean of the worst tenth of the questions (at least one), by metric; the longest for output length."""
    worst_difference: Mapping[str, float]
    """Mean of the tenth of the questions where the arm loses most against dense, by metric."""
    flips: Mapping[str, Flips]
    """Against dense, for `task` (full score or not; where measured) and `top1` (every scored token right or not)."""
    diverged: int | None
    """Questions whose generated tokens differ from dense's somewhere; None if nothing was generated."""
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
    answered = {arm: [found[key] for key in shared] for arm, found in by_arm.items()}
    return Aggregate(_cells(answered, Resampling(tuple(trace for trace, _ in shared), seed)), missing)


def _by_arm(rows: Sequence[BranchResult]) -> dict[str, dict[Key, BranchResult]]:
    by_arm: dict[str, dict[Key, BranchResult]] = {}
    for row in rows:
        answered = by_arm.setdefault(row.arm, {})
        key = (row.trace, row.branch)
        if key in answered:
            raise ExperimentError(f"{row.arm}: {row.trace} question {row.branch} appears twice")
        answered[key] = row
    return by_arm


def _cells(answered: Mapping[str, Sequence[BranchResult]], resampling: Resampling) -> tuple[Cell, ...]:
    """One cell per arm; the means of all arms and metrics are resampled together."""
    arms, names = list(answered), measured(chain(*answered.values()), QUALITY)
    values = np.stack([_table(rows, names) for rows in answered.values()])
    quality = _estimates(values, arms, names, resampling, paired=False)
    worst = _worst(values, arms, names)
    difference: dict[str, dict[str, Estimate]] = {}
    lost: dict[str, dict[str, float]] = {}
    if DENSE in arms:
        differences = values - values[arms.index(DENSE)]
        difference = _estimates(differences, arms, names, resampling, paired=True)
        lost = _worst(differences, arms, names)
    again = difference.get(AGAIN, {})
    return tuple(
        _cell(
            rows,
            answered.get(DENSE),
            quality=quality[arm],
            difference=difference.get(arm, {}),
            noise={name: noise(found, again.get(name)) for name, found in difference.get(arm, {}).items()},
            worst=worst[arm],
            worst_difference=lost.get(arm, {}),
        )
        for arm, rows in answered.items()
    )


def _table(rows: Sequence[BranchResult], names: Sequence[str]) -> Floats:
    """Quality of one arm in the metrics `names`, [questions, metrics]."""
    return np.array(list(map(attrgetter(*names), rows)), dtype=np.float64)


def _estimates(
    values: Floats, arms: Sequence[str], names: Sequence[str], resampling: Resampling, *, paired: bool
) -> dict[str, dict[str, Estimate]]:
    """Estimates by arm and metric from `values` [arms, questions, metrics]."""
    bounds = [CARDS[name].paired_bounds if paired else CARDS[name].bounds for name in names]
    found = iter(resampling.estimates(_columns(values), bounds * len(arms)))
    return {arm: {name: next(found) for name in names} for arm in arms}


def _worst(values: Floats, arms: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, float]]:
    directions = [CARDS[name].better for name in names] * len(arms)
    found = iter(worst_deciles(_columns(values), directions).tolist())
    return {arm: {name: next(found) for name in names} for arm in arms}


def _columns(values: Floats) -> Floats:
    """[arms, questions, metrics] as [questions, arms x metrics]."""
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)


def _cell(rows: Sequence[BranchResult], dense: Sequence[BranchResult] | None, **numbers: Any) -> Cell:
    flipped: dict[str, Flips] = {}
    if dense is not None:
        for name in measured((*dense, *rows), FLIPPED):
            flipped[name] = flips([right(row, name) for row in dense], [right(row, name) for row in rows])
    return Cell(
        arm=rows[0].arm,
        workload=rows[0].workload,
        query_aware=rows[0].query_aware,
        samples=len(rows),
        contexts=len({row.trace for row in rows}),
        flips=flipped,
        diverged=sum(row.divergence is not None for row in rows) if "task" in numbers["quality"] else None,
        amounts=dict(zip(AMOUNTS, map(_mean, zip(*map(_AMOUNTS, rows), strict=True)), strict=True)),
        peak_bytes=max(row.peak_bytes for row in rows),
        blocks_freed={
            mode: _mean([row.blocks_freed[mode] for row in rows])
            for mode in RECLAIM_MODES
            if all(mode in row.blocks_freed for row in rows)
        },
        **numbers,
    )


def right(row: BranchResult, name: str) -> bool:
    """Whether a question counts as answered right: full marks in `name` (`FLIPPED`)."""
    return float(getattr(row, name)) >= FULL_MARKS


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
