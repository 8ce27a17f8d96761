"""`kvassay show`: the results of a run, in the form asked for."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print manifest, cells, latency and cost as JSON.")
@click.option("--all", "everything", is_flag=True, help="Also what every column means, and what policies report.")
@click.option("--html", is_flag=True, help="Write RUN/report.html anew and print its path.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the run to this .png, .svg or .pdf file.")
@click.option(
    "--export",
    type=(click.Choice(["lm-eval", "results"]), click.Path(path_type=Path)),
    metavar="lm-eval|results DIR",
    help="lm-eval: write lm-evaluation-harness result files below DIR, one per model and arm. results: copy the run "
    "into DIR without its recorded contexts, for others to show, judge and compare.",
)
def show(
    run: Path, as_json: bool, everything: bool, html: bool, picture: Path | None, export: tuple[str, Path] | None
) -> None:
    """Show the results of the run folder RUN as a table (or as asked)."""
    from kvassay.experiment.folder import LONG, MANIFEST
    from kvassay.experiment.results import Results, as_data, refuse_long_only

    if html or picture or export:
        refuse_long_only(run, "no page, picture or export")
    alone = (run / LONG).is_file() and not (run / MANIFEST).is_file()
    if alone or ((run / LONG).is_file() and not (as_json or html or picture or export)):
        _show_long(run, as_json)
    if alone:
        return
    results = Results.open(run)
    if as_json:
        click.echo(json.dumps(as_data(results), indent=1, ensure_ascii=False))
    if html:
        from kvassay.report.html import write_html

        click.echo(write_html(results))
    if picture is not None:
        from kvassay.report.picture import write_picture

        click.echo(write_picture(results, picture))
    if export is not None:
        from kvassay.experiment.publish import export_results
        from kvassay.report.lm_eval_json import write_lm_eval

        kind, folder = export
        for file in (write_lm_eval if kind == "lm-eval" else export_results)(results, folder):
            click.echo(file)
    if not (as_json or html or picture or export):
        from kvassay.report.acceptance import AcceptanceTable
        from kvassay.report.facts import FactsTable
        from kvassay.report.table import ReportTable, console_for
        from kvassay.report.verdicts import verdict_table

        verdicts = verdict_table(run)
        if verdicts is not None:
            console_for().print(verdicts, "")
        facts = (FactsTable(results),) if everything else ()
        console_for().print(ReportTable(results, everything), *facts, AcceptanceTable(results), sep="")


def _show_long(run: Path, as_json: bool) -> None:
    from dataclasses import asdict

    from kvassay.experiment.long import read_long
    from kvassay.report.long import long_tables
    from kvassay.report.table import console_for

    rows, refused = read_long(run)
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows], "refused": refused}, indent=1))
    else:
        console_for().print(long_tables(rows, refused))
