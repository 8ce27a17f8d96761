"""`kvassay workloads`: what can be generated, with parameters, scores and floors."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click


@click.command("workloads")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of a table.")
def workloads(as_json: bool) -> None:
    """List the workloads: what each asks, its parameters, its score, its dense floor."""
    rows = _rows()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    _table(rows)


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

    table = Table("name", "what it asks", "role", "parameters", "free-running score", "dense floor")
    for row in rows:
        parameters = ", ".join(f"{key}={value!r}" for key, value in row["parameters"].items())
        floor = f"top-1 >= {row['floor']['min_top1']:.2f}, NLL <= {row['floor']['max_nll']:.1f}"
        score = f"{row['scorer']} ({row['unit']})"
        table.add_row(row["name"], row["summary"], row["role"], parameters, score, floor)
    Console().print(table)
