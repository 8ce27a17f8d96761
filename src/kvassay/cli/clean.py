"""`kvassay clean`: give back the disk space of a finished run's recorded contexts."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("clean")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(run: Path, yes: bool) -> None:
    """Drop the recorded contexts (traces/) of the finished run folder RUN; every result, verdict and report stays.

    `kvassay fidelity RUN` needs them, and another run into RUN records and computes its contexts again.
    """
    from kvassay.experiment.disk import bytes_in, drop_traces
    from kvassay.experiment.folder import RunFolder
    from kvassay.experiment.results import Results

    results = Results.open(run)
    traces = RunFolder(run).traces
    if not yes and not click.confirm(f"remove {traces} ({bytes_in(traces) / 2**20:.1f} MiB)?", err=True):
        click.echo("nothing was removed")
        return
    click.echo(f"{traces}: {drop_traces(results) / 2**20:.1f} MiB given back")
