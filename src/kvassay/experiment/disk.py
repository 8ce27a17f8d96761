"""Recorded contexts on disk: what a run will take, said before it begins (`modelled`), and giving it back afterwards.

Sizes come from the shapes that a trace stores. Only the length of a question with its answer is not known yet.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from kvassay.errors import ExperimentError, LayoutError
from kvassay.experiment.folder import RunFolder, os_errors
from kvassay.experiment.plan import Plan
from kvassay.experiment.results import Results
from kvassay.layout.config import from_config
from kvassay.layout.model import Layout
from kvassay.record.options import RecordOptions
from kvassay.trace.files import free_bytes, shard_bytes
from kvassay.trace.schema import BranchEntry, PrefixEntry, TraceHeader
from kvassay.trace.shapes import expected_shards

QUESTION = 32
"""Tokens that a question with its answer is taken to have."""


def disk_line(plan: Plan, folder: RunFolder) -> str:
    """What the plan's recorded contexts take in `folder`, what is there already, and how it is given back."""
    needed, there = sum(_sizes(plan)), bytes_in(folder.traces)
    free = free_bytes(folder.path)
    room = f"{_gib(free)} free" if isinstance(free, int) else "free space unknown"
    tight = isinstance(free, int) and needed - there > free
    return (
        f"disk, modelled: about {_gib(needed)} of recorded contexts in {folder.traces} ({_gib(there)} there now, {room}"
        f"{': TOO LITTLE, the run will stop when it is full' if tight else ''}); once finished, `kvassay clean "
        f"{folder.path}` drops them and keeps the results"
    )


def drop_traces(results: Results) -> int:
    """Remove the recorded contexts of a finished run and return their bytes; every result stays.

    A later run into the folder records and computes its contexts again. Raises `ExperimentError` if another run
    holds the folder or it cannot be written.
    """
    folder = RunFolder(results.path)
    with folder.locked(), os_errors(folder.traces):
        held = bytes_in(folder.traces)
        if folder.traces.is_symlink():
            raise ExperimentError(f"{folder.traces}: is a link to elsewhere, which is left alone")
        if folder.traces.is_dir():
            shutil.rmtree(folder.traces)
        return held


def bytes_in(folder: Path) -> int:
    """Bytes of all files below a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def trace_bytes(layout: Layout, context: int, branches: int, options: RecordOptions) -> int:
    """Bytes of the tensor files of one recorded context with so many questions."""
    q_from = max(context - options.q_tail, 0)
    # A header without what no size depends on: model, text, versions.
    header = TraceHeader.model_construct(
        layout=layout,
        dtype=options.dtype,
        q_from=q_from,
        taps=options.header_taps(layout, q_from),
        logits=options.logits_spec(layout.vocab_size),
        prefix=PrefixEntry(tokens=context),
        branches=(BranchEntry(tokens=QUESTION, question_tokens=0),) * branches,
    )
    return sum(shard_bytes(specs) for specs in expected_shards(header).values())


def _sizes(plan: Plan) -> Iterator[int]:
    """Bytes of every context to be recorded, calibrations included; of models whose configuration is here."""
    for trace_set in plan.trace_sets:
        layout = _layout(trace_set.model)
        if layout is not None:
            work = trace_set.workload
            yield work.contexts * trace_bytes(layout, work.length, work.questions, plan.options)
    for model in plan.experiment.experiment.models if plan.calibration else ():
        layout = _layout(model)
        if layout is not None:
            yield trace_bytes(layout, min(plan.experiment.calibration.length, layout.native_context), 1, plan.options)


def _layout(model: str) -> Layout | None:
    try:
        return from_config(model)
    except LayoutError:
        return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
