"""A run from the command line: progress to stderr, the table to stdout, the page into the folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from kvassay.experiment.plan import Plan
from kvassay.experiment.progress import listening
from kvassay.experiment.results import Results
from kvassay.experiment.run import run
from kvassay.report import words
from kvassay.report.acceptance import AcceptanceTable
from kvassay.report.html import write_html
from kvassay.report.table import ReportTable, console_for
from kvassay.report.verdicts import verdict_table

RUNS = Path("runs")
"""Where run folders go unless told otherwise."""


def run_and_report(
    plan: Plan,
    out: Path | None,
    jobs: int | None = None,
    *,
    begin: Callable[[Path], None] = lambda folder: None,
    judge: Callable[[Results], object] = lambda results: None,
) -> Results:
    """Run (or continue) a plan in `out` (default `runs/NAME`), print its table and write its page.

    A dense arm below its workload's floor is a result, said in the last line, not an error. `begin` is called with
    the run folder before anything runs, `judge` with the results before they are shown.
    """
    folder = out or RUNS / plan.experiment.experiment.name
    begin(folder)
    says = Console(stderr=True, highlight=False)
    says.print(f"{len(plan.arms)} arms x {len(plan.units)} contexts into {folder}", markup=False, soft_wrap=True)
    with listening(says, len(plan.units)) as listener:
        results = run(plan, folder, listener, jobs=jobs)
    judge(results)
    page = write_html(results)
    console = console_for(sys.stdout)
    verdicts = verdict_table(results.path)
    if verdicts is not None:
        console.print(verdicts)
        console.print()
    console.print(ReportTable(results), AcceptanceTable(results), sep="")
    console.print(f"\nEvery number, figures and provenance: {page}", markup=False, soft_wrap=True)
    unjudged = words.unjudged(results)
    if unjudged is not None:
        console.print(f"Finished, but {unjudged}.", markup=False, soft_wrap=True)
    return results
