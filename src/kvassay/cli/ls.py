"""`kvassay ls`: the run folders there are."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("ls")
@click.argument("folder", type=click.Path(path_type=Path), default="runs")
def ls(folder: Path) -> None:
    """List the run folders in FOLDER (default: runs): finished or not, models, arms, when."""
    from kvassay.experiment.listing import list_runs
    from kvassay.report.table import console_for, runs_table

    console_for().print(runs_table(list_runs(folder)))
