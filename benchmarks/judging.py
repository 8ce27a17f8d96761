"""How long judging takes: statistics, checks and report of 100 arms x 1,000 questions from hand-made rows.

python benchmarks/judging.py [--arms 100] [--contexts 125] [--questions 8]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kvassay.experiment.arminfo import ArmInfo
from kvassay.experiment.folder import CELLS, MANIFEST, SAMPLES
from kvassay.experiment.results import Results, dump_manifest
from kvassay.experiment.rows import write_cells, write_samples
from kvassay.measure.aggregate import Cell, aggregate
from kvassay.measure.checks import ArmFacts, SetFacts
from kvassay.measure.inspect import inspect
from kvassay.measure.result import KEPT_BINS, RECLAIM_MODES, BranchResult
from kvassay.policy.budget import Protection

LIMIT_SECONDS = 10.0
"""What statistics and report of 100 arms x 1,000 questions may take together."""
LIMIT_BYTES = 5_000_000
"""Of the page."""


def made_up(arms: int, contexts: int, questions: int, seed: int = 0) -> list[BranchResult]:
    """Rows of `arms` arms, dense and dense' among them; quality differs by arm, context and question."""
    rng = np.random.default_rng(seed)
    labels = ["dense", "dense'", *(f"policy{n} keep=0.25" for n in range(arms - 2))]
    hard = rng.normal(size=contexts)
    rows = []
    for place, label in enumerate(labels):
        lost = 0.0 if place < 2 else 0.02 * place
        for context in range(contexts):
            for branch in range(questions):
                nll = float(np.exp(0.3 * hard[context] + 0.1 * rng.normal()) + lost)
                right = float(rng.random() < np.exp(-nll))
                rows.append(_row(label, f"context{context}", branch, nll, right, lost))
    return rows


def _row(arm: str, trace: str, branch: int, nll: float, right: float, lost: float) -> BranchResult:
    fraction = 1.0 if lost == 0 else 0.25
    return BranchResult(
        trace=trace, workload="kv_short", branch=branch, arm=arm, query_aware=False,
        context_tokens=2048, question_tokens=6, answer_tokens=4,
        nll=nll, top1=right, kl=lost * nll, agree=1 - lost / 4, task=right, divergence=None, wrong_step=None,
        generated=f"{nll:.3f}" * 12, generated_tokens=6, kept=(fraction,) * KEPT_BINS if branch == 0 else (),
        retained_bytes=fraction * 1e6, retained_fraction=fraction, retained_bytes_scope=fraction * 1e6,
        retained_fraction_scope=fraction, peak_bytes=1e6, selected_tokens=fraction * 2048, blocks_total=128,
        blocks_freed=dict.fromkeys(RECLAIM_MODES, 96.0), read_bytes=fraction * 1e6, read_fraction=fraction,
    )  # fmt: skip


def write_run(folder: Path, rows: Sequence[BranchResult], cells: Sequence[Cell], questions: int) -> Results:
    """A run folder with these rows and cells, as a run leaves one behind."""
    labels = {"model": "made-up", "trace_set": "kv_short 2k"}
    write_samples([(labels, rows)], folder / SAMPLES)
    write_cells([(labels, cells)], folder / CELLS)
    about = {"name": "kv_short", "length": 2048, "contexts": cells[0].contexts, "questions": questions}
    manifest = {
        "name": "judging", "started": "", "finished": "now", "commit": None, "models": [], "units": [],
        "machine": dict.fromkeys(("cpu", "cpu_count", "memory_gib", "torch", "transformers", "kvassay"), 0)
        | {"device": "cpu"},
        "protocol": {"block_size": 16, "free_tokens": 16}, "protection": {"sink": 4, "recent": 32},
        "arms": [asdict(_arm(cell.arm)) for cell in cells],
        "trace_sets": [{**labels, **about, "query_aware": False, "floor": None, "missing": []}],
    }  # fmt: skip
    (folder / MANIFEST).write_text(dump_manifest(manifest), encoding="utf-8")
    return Results.open(folder)


def _arm(label: str) -> ArmInfo:
    policy, _, budget = label.partition(" ")
    return ArmInfo(
        label=label, policy=policy, budget=budget or None, exact=True, approximates=(), reference=False,
        reconstruction=False, always_on=not budget, source="made up", summary="made up",
    )  # fmt: skip


def main() -> None:
    """Time `aggregate`, `inspect` and `write_html` once; imports are part of it, as they are in a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=int, default=100)
    parser.add_argument("--contexts", type=int, default=125)
    parser.add_argument("--questions", type=int, default=8)
    chosen = parser.parse_args()
    rows = made_up(chosen.arms, chosen.contexts, chosen.questions)
    clock = Clock()
    found = aggregate(rows)
    statistics = clock.lap()
    facts = SetFacts(
        arms={cell.arm: ArmFacts(cell.arm, cell.arm.partition(" ")[0]) for cell in found.cells},
        contexts=[], query_aware=False, free_tokens=16, block_size=16, protection=Protection(),
    )  # fmt: skip
    clock.lap()
    findings = inspect(rows, found.cells, facts)
    checking = clock.lap()
    with tempfile.TemporaryDirectory() as folder:
        results = write_run(Path(folder), rows, found.cells, chosen.questions)
        clock.lap()
        from kvassay.report.html import write_html  # late: what the report imports is part of its time

        size = write_html(results).stat().st_size
        report = clock.lap()
    print(
        f"{len(found.cells)} arms x {found.cells[0].samples} questions on {found.cells[0].contexts} contexts: "
        f"statistics in {statistics}, checks in {checking} ({len(findings)} findings), report in {report} "
        f"(limit {LIMIT_SECONDS:g} s together); page of {size / 1e6:.2f} MB (limit {LIMIT_BYTES / 1e6:g} MB)"
    )


class Clock:
    """Wall and processor seconds since the last lap; they differ where other things run."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> str:
        """The lap in words."""
        wall, cpu = time.perf_counter(), time.process_time()
        said = f"{wall - self._wall:.2f} s ({cpu - self._cpu:.2f} s of processor)"
        self._wall, self._cpu = wall, cpu
        return said


if __name__ == "__main__":
    main()
