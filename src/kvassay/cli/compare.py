"""`kvassay compare`: what changed between two runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command("compare")
@click.argument("a", metavar="RUN_A", type=click.Path(path_type=Path))
@click.argument("b", metavar="RUN_B", type=click.Path(path_type=Path))
@click.option(
    "--metric", "metrics", multiple=True, metavar="NAME", help="Quality metric; repeatable.  [top1, task, nll]"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def compare(a: Path, b: Path, metrics: tuple[str, ...], as_json: bool) -> None:
    """Compare run folder RUN_B with RUN_A.

    Names what only one of them has and what differs in code, versions, machine and settings; for arms in both,
    differences paired by question (same model, same tokens), with intervals clustered by context.
    """
    from kvassay.experiment.compare import METRICS
    from kvassay.experiment.compare import compare as compare_runs
    from kvassay.experiment.results import Results

    found = compare_runs(Results.open(a), Results.open(b), metrics or METRICS)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=1, ensure_ascii=False))
        return
    from kvassay.report.compare import ComparisonTables
    from kvassay.report.table import console_for

    console_for().print(ComparisonTables(found))
