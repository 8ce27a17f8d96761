"""`kvassay columns`: what every column of the result files is."""

from __future__ import annotations

import click


@click.command("columns")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON, as schema.json in a run folder.")
@click.option("--markdown", is_flag=True, help="Print the page docs/results-schema.md.")
def columns(name: str | None, as_json: bool, markdown: bool) -> None:
    """Say what the column NAME of a run folder's Parquet files is, in every file that has it; or list all."""
    from kvassay.experiment.columns import files, schema_json
    from kvassay.report.columns import lines
    from kvassay.report.columns import markdown as page

    if as_json or markdown:
        click.echo(schema_json() if as_json else page(files()), nl=False)
        return
    for line in lines(files(), name):
        click.echo(line)
