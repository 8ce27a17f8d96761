"""`kvassay show`: the results of a run, in the form asked for."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print manifest and cells as JSON.")
@click.option("--html", is_flag=True, help="Write RUN/report.html anew and print its path.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the run to this .png, .svg or .pdf file.")
def show(run: Path, as_json: bool, html: bool, picture: Path | None) -> None:
    """Show the results of the run folder RUN as a table (or as asked)."""
    from kvassay.experiment.results import Results, as_data

    results = Results.open(run)
    if as_json:
        click.echo(json.dumps(as_data(results), indent=1, ensure_ascii=False))
    if html:
        from kvassay.report.html import write_html

        click.echo(write_html(results))
    if picture is not None:
        from kvassay.report.picture import write_picture

        click.echo(write_picture(results, picture))
    if not (as_json or html or picture):
        from kvassay.report.table import ReportTable, console_for

        console_for().print(ReportTable(results))
