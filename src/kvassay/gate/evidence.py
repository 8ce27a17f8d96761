"""What a gate judges: one trace set of a run with everything that is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvassay.experiment.folder import SAMPLES
from kvassay.experiment.results import Results, SetResult
from kvassay.experiment.rows import from_row, read_table
from kvassay.measure.aggregate import AGAIN, DENSE, Cell
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.metrics import CARDS
from kvassay.measure.resample import Estimate, Floats, Resampling
from kvassay.measure.result import BranchResult

Pair = tuple[str, str, str]
"""(arm, other arm, metric): the first minus the second."""
_COLUMNS = 256
"""Pairs resampled at a time, which bounds memory."""


@dataclass(frozen=True)
class SetEvidence:
    """One model on one workload, with its questions and times."""

    found: SetResult
    rows: Sequence[BranchResult] = ()
    """Every question under every arm."""
    latency: Sequence[LatencyResult] = ()
    cost: Sequence[CostResult] = ()
    seed: int = 0

    @property
    def place(self) -> str:
        """The trace set in words."""
        return f"{self.found.model}, {self.found.label}"

    @property
    def dense(self) -> Cell | None:
        """The arm that all are compared with."""
        return self.found.cell(DENSE)

    def reach_of(self, metric: str) -> Estimate | None:
        """dense' minus dense, None if it did not run."""
        again = self.found.cell(AGAIN)
        return again.difference.get(metric) if again is not None else None

    def differences(self, pairs: Iterable[Pair]) -> dict[Pair, Estimate]:
        """Paired differences between arms, over the questions that every arm answered."""
        wanted = list(dict.fromkeys(pairs))
        if not wanted:
            return {}
        answers = _Answers.of(self.rows)
        resampling = Resampling(tuple(trace for trace, _ in answers.questions), self.seed)
        estimates: list[Estimate] = []
        for first in range(0, len(wanted), _COLUMNS):
            part = wanted[first : first + _COLUMNS]
            columns = np.column_stack([answers.column(a, metric) - answers.column(b, metric) for a, b, metric in part])
            estimates += resampling.estimates(columns, [CARDS[metric].paired_bounds for *_, metric in part])
        return dict(zip(wanted, estimates, strict=True))


@dataclass(frozen=True)
class _Answers:
    """Rows by arm, over the questions that all arms answered, in one order."""

    questions: tuple[tuple[str, int], ...]
    arms: Mapping[str, Sequence[BranchResult]]
    columns: dict[tuple[str, str], Floats] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[BranchResult]) -> _Answers:
        by_arm: dict[str, dict[tuple[str, int], BranchResult]] = {}
        for row in rows:
            by_arm.setdefault(row.arm, {})[row.trace, row.branch] = row
        everything = dict.fromkeys(key for answered in by_arm.values() for key in answered)
        shared = tuple(key for key in everything if all(key in answered for answered in by_arm.values()))
        return cls(shared, {arm: [answered[key] for key in shared] for arm, answered in by_arm.items()})

    def column(self, arm: str, metric: str) -> Floats:
        """One metric of one arm, a number per question."""
        if (arm, metric) not in self.columns:
            values = [float(getattr(row, metric)) for row in self.arms[arm]]
            self.columns[arm, metric] = np.array(values, dtype=np.float64)
        return self.columns[arm, metric]


def gather(results: Results) -> tuple[SetEvidence, ...]:
    """The evidence of every trace set of a run."""
    rows: dict[tuple[str, str], list[BranchResult]] = {}
    for row in read_table(results.path / SAMPLES):
        rows.setdefault((row["model"], row["trace_set"]), []).append(from_row(row))
    return tuple(
        SetEvidence(
            found,
            rows.get((found.model, found.label), []),
            [row for row in results.latency if (row.model, row.trace_set) == (found.model, found.label)],
            [row for row in results.cost if (row.model, row.trace_set) == (found.model, found.label)],
            int(results.manifest["protocol"]["seed"]),
        )
        for found in results.sets
    )
