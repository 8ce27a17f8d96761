"""Units side by side: worker processes that each hold a model and take one unit at a time.

Much of a replay is bookkeeping that no thread count speeds up, so two units at once on two cores finish far
sooner than one after the other on both. A worker plans the experiment again by itself, since policies from
files cannot be sent between processes, and ends when the process that started it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import RunFolder
from kvassay.experiment.memory import memory_plan
from kvassay.experiment.plan import Plan, Unit, make_plan
from kvassay.experiment.schema import Experiment
from kvassay.experiment.unit import Done, Session
from kvassay.trace.reader import Trace

MOST_JOBS = 8
UNKNOWN_BYTES = 7 << 30
"""Memory a worker is taken to need where its model is not here yet: a small one's."""


def suggested_jobs(plan: Plan) -> int:
    """As many units at once as cores and memory allow; depends on the plan and the machine, not on what is left."""
    if plan.experiment.experiment.device != "cpu":
        return 1
    need = max((need.total for need in memory_plan(plan)), default=UNKNOWN_BYTES)
    by_memory = int(0.8 * psutil.virtual_memory().total // need)
    return max(1, min(os.cpu_count() or 1, len(plan.units), by_memory, MOST_JOBS))


def threads_for(jobs: int) -> int:
    """Threads of each of `jobs` workers."""
    return max(1, (os.cpu_count() or 1) // jobs)


@dataclass(frozen=True)
class _Start:
    """What a worker needs to know."""

    experiment: Experiment
    source: str
    base: Path
    folder: Path
    code: str
    """The plan's: a policy's file may change before this process reads it."""
    threads: int
    parent: int


class Workers:
    """A pool of workers for one run; processes start with the first unit that is submitted."""

    def __init__(self, plan: Plan, folder: Path, jobs: int) -> None:
        start = _Start(plan.experiment, plan.source, plan.base, folder, plan.code, threads_for(jobs), os.getpid())
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(start,))
        self._waiting: list[Future[Done]] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # whoever is in the middle of a unit would finish it first
            for process in multiprocessing.active_children():
                process.terminate()
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def submit(self, unit: Unit) -> None:
        """Queue a unit."""
        # Workers start here, and inherit this: Ctrl-C is the parent's to handle, which then ends them.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._waiting.append(self._pool.submit(_compute, unit))
        finally:
            signal.signal(signal.SIGINT, before)

    def results(self) -> Iterator[Done]:
        """Units as they finish; the first error ends the run, finished units stay."""
        try:
            for future in as_completed(self._waiting):
                yield future.result()
        except BrokenProcessPool:
            raise ExperimentError(
                "a worker process died, perhaps for lack of memory; the same command continues, --jobs 1 needs less"
            ) from None


# In a worker process.


@dataclass
class _Worker:
    start: _Start
    plan: Plan
    fits: ExitStack
    """Keeps what offline policies have learnt for as long as this process lives."""
    session: Session | None = None
    model: str = ""
    calibration: Trace | None = None


_WORKER: list[_Worker] = []
"""The one worker of this process."""


def _begin(start: _Start) -> None:
    import numba
    import torch

    from kvassay.experiment.fits import KeptFits
    from kvassay.replay.calibration import fitting_once

    threading.Thread(target=_end_with, args=(start.parent,), daemon=True).start()
    torch.set_num_threads(start.threads)
    numba.set_num_threads(min(start.threads, numba.config.NUMBA_NUM_THREADS))
    plan, fits = make_plan(start.experiment, start.source, start.base), ExitStack()
    fits.enter_context(fitting_once(KeptFits(RunFolder(start.folder), plan.code)))
    _WORKER.append(_Worker(start, plan, fits))


def _end_with(parent: int) -> None:
    """End this process when its parent has gone: nobody would take its results."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _compute(unit: Unit) -> Done:
    from kvassay.record.load import load
    from kvassay.replay.closed import replay_trace

    worker = _WORKER[0]
    if worker.plan.code != worker.start.code:
        raise ExperimentError("the code of a policy changed while the run was starting; run the same command again")
    if worker.session is None or worker.model != unit.trace_set.model:
        worker.session = None  # let go of one model before the next is loaded
        loaded = load(unit.trace_set.model, device=worker.plan.experiment.experiment.device)
        folder = RunFolder(worker.start.folder)
        worker.session = Session(loaded, worker.plan, folder, replay_trace, lambda doing: None)
        worker.model = unit.trace_set.model
        worker.calibration = worker.session.calibration(worker.model)
    return worker.session.compute(unit, worker.session.sample(unit), worker.calibration)
