"""Which questions of two runs are the same ones: same model weights, same context tokens, same question and answer.

Two recordings of one text may differ in the last bits of K and V (another machine, another recorder); they are
the same question all the same, and that they differ is said.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvassay.experiment.folder import SAMPLES, RunFolder
from kvassay.experiment.results import Results
from kvassay.experiment.rows import from_row, read_table
from kvassay.measure.result import BranchResult
from kvassay.trace.identity import context_sha256, question_sha256
from kvassay.trace.reader import read_header
from kvassay.trace.schema import HEADER_FILE, TraceHeader

SetKey = tuple[str, str]
"""A trace set: (model, label)."""


class Pair(NamedTuple):
    """One question under one arm, as two runs answered it."""

    context: Hashable
    """What both contexts hold; questions that share it are not independent."""
    before: BranchResult
    after: BranchResult


@dataclass(frozen=True)
class Questions:
    """The answers of one run, by trace set, arm and question."""

    rows: Mapping[SetKey, Mapping[str, Mapping[Hashable, BranchResult]]]
    contents: Mapping[Hashable, str | None]
    """What of K, V and queries lies behind a context, by its tokens; None where the trace is gone."""
    gone: tuple[str, ...]
    """Traces that are no longer there, of runs before rows said what was asked: their questions are known by the
    trace's name, which hashes the sample and the recorder's code."""

    @classmethod
    def of(cls, results: Results) -> Questions:
        """Read them; `ExperimentError` or `TraceError` for a damaged file."""
        traces = RunFolder(results.path).traces
        rows: dict[SetKey, dict[str, dict[Hashable, BranchResult]]] = {}
        headers: dict[str, TraceHeader | None] = {}
        contents: dict[Hashable, str | None] = {}
        gone: dict[str, None] = {}
        for raw in read_table(results.path / SAMPLES):
            row = from_row(raw)
            if row.trace not in headers:
                headers[row.trace] = _header(traces / row.trace)
            context, question = _asked(row, headers[row.trace])
            contents[context] = _content(headers[row.trace])
            if context == row.trace:
                gone[row.trace] = None
            arms = rows.setdefault((raw["model"], raw["trace_set"]), {})
            arms.setdefault(row.arm, {})[context, question] = row
        return cls(rows, contents, tuple(gone))


def pairs(before: Mapping[Hashable, BranchResult], after: Mapping[Hashable, BranchResult]) -> list[Pair]:
    """The questions that both answered, in the first run's order."""
    return [Pair(key[0], row, after[key]) for key, row in before.items() if key in after and isinstance(key, tuple)]


def rerecorded(before: Questions, after: Questions, contexts: Sequence[Hashable]) -> int:
    """How many of these contexts lie in both runs with other bits of K, V or queries."""
    there = [(before.contents.get(one), after.contents.get(one)) for one in contexts]
    return sum(a is not None and b is not None and a != b for a, b in there)


def _header(folder: Path) -> TraceHeader | None:
    return read_header(folder)[0] if (folder / HEADER_FILE).is_file() else None


def _asked(row: BranchResult, header: TraceHeader | None) -> tuple[Hashable, Hashable]:
    """(context, question): what was asked of what."""
    if row.question_sha256:
        return row.context_sha256, (row.branch, row.question_sha256)
    if header is not None:
        return context_sha256(header), (row.branch, question_sha256(header, row.branch))
    return row.trace, row.branch


def _content(header: TraceHeader | None) -> str | None:
    """Hashes of all shards as one text; equal for bit-identical recordings."""
    return None if header is None else " ".join(f"{name}={one.sha256}" for name, one in sorted(header.shards.items()))
