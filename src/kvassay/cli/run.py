"""`kvassay run`: an experiment file into a run folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("run")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: runs/NAME]")
@click.option("--jobs", type=click.IntRange(1), help="Contexts at a time, a process each.  [default: by cores]")
def run(file: Path, out: Path | None, jobs: int | None) -> None:
    """Run the experiment FILE (TOML) and print its table.

    May be stopped at any moment; the same command continues where it stopped. Files of finished units are
    reused, so a second run of a finished experiment only prints.
    """
    from kvassay.experiment.schema import load_experiment
    from kvassay.report.session import run_and_report

    run_and_report(load_experiment(file), str(file), file.parent, out, jobs)
