"""`kvassay workloads`: what can be generated, with parameters, scores and floors; or the text of one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from kvassay.cli.params import TokenCount


@click.command("workloads")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
@click.option("--length", type=TokenCount(), default="1200", show_default=True, help="Of the preview, in words.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the preview.")
@click.option("--index", type=click.IntRange(0), default=0, show_default=True, help="Which sample to preview.")
@click.option("--query-aware", is_flag=True, help="Preview with the questions inside the context.")
def workloads(name: str | None, as_json: bool, **options: Any) -> None:
    """List the workloads, or preview the text of the one called NAME (no model needed).

    The list says what each asks, its parameters, its score when running free, and what the dense model must reach
    on answer tokens before a policy is judged on it.
    """
    if name is not None:
        from kvassay.workload.preview import preview

        click.echo(preview(name, options.pop("length"), **options))
    elif as_json:
        click.echo(json.dumps(_rows(), indent=2))
    else:
        _table(_rows())


def _rows() -> list[dict[str, Any]]:
    from kvassay.measure.task import SCORERS
    from kvassay.workload.floor import floor_of
    from kvassay.workload.registry import WORKLOADS

    return [
        {
            "name": entry.name,
            "summary": entry.summary,
            "role": entry.role,
            "parameters": asdict(entry.params()),
            "scorer": entry.scorer,
            "unit": SCORERS[entry.scorer].unit,
            "higher_is_better": SCORERS[entry.scorer].higher_is_better,
            "floor": asdict(floor_of(entry.name)),
        }
        for entry in WORKLOADS.values()
    ]


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it asks (parameters)", "role", "running free", "dense floor", box=None)
    for row in rows:
        # The importer's many parameters are told by --json.
        parameters = " ".join(f"{key}={value}" for key, value in list(row["parameters"].items())[:4])
        floor = f"top-1 {row['floor']['min_top1']:.2f}\nNLL {row['floor']['max_nll']:.1f}"
        table.add_row(row["name"], f"{row['summary']}\n[dim]{parameters}[/]", row["role"], row["scorer"], floor)
    Console().print(table)
