"""`kvassay applicability`: on which kinds of attention state each candidate makes sense, and why."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table


@click.command()
@click.argument("policies", nargs=-1, metavar="[POLICY]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def applicability(policies: tuple[str, ...], as_json: bool) -> None:
    """Show for each candidate and kind of attention state: applicable, redundant or blocked, and the reason.

    Of POLICY..., names of any other policies, it shows what follows from their cards: what a run goes by.
    """
    from kvassay.policy.applicability import STATES, judged
    from kvassay.policy.applicability import applicability as answers
    from kvassay.policy.registry import get

    found = {name: {state: judged(get(name).card, state) for state in STATES} for name in policies} or answers()
    if as_json:
        click.echo(json.dumps({n: {s: asdict(c) for s, c in row.items()} for n, row in found.items()}, indent=2))
        return
    console = Console()
    for state, meaning in STATES.items():
        table = Table(title=f"{state}: {meaning}", title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("candidate", "answer", "why"):
            table.add_column(column)
        for name, row in found.items():
            table.add_row(name, row[state].answer, row[state].reason)
        console.print(table, "")
