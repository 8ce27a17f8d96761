"""`kvassay policies`: what policies there are, and what their cards say."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvassay.errors import PolicyError

MARKS = {"reference": "†", "reconstruction": "‡", "external": "§"}


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--markdown", is_flag=True, help="Print the cards of all built-in policies as a Markdown page.")
def policies(name: str | None, as_json: bool, markdown: bool) -> None:
    """List all policies, or show the card of NAME.

    NAME is a built-in policy, the entry point of an installed plug-in, or path/to/file.py:ClassName; add
    ~flipped, ~shuffled or ~merge-off for a control twin. A composition, "snapkv+int8", has a card too.
    """
    from kvassay.policy import registry
    from kvassay.policy.describe import describe

    if markdown:
        from kvassay.policy import cards

        click.echo(cards.markdown(registry.get(each) for each in registry.BUILT_IN), nl=False)
        return
    if name is not None:
        card = describe(registry.parse(name) if "+" in name else registry.get(name))
        click.echo(json.dumps(card, indent=2)) if as_json else _show(card)
        return
    rows = [_row(each) for each in registry.names()]
    click.echo(json.dumps(rows, indent=2)) if as_json else _table(rows)


def _row(name: str) -> dict[str, Any]:
    """A policy's card, or what is wrong with a plug-in, which must not hide the others."""
    from kvassay.policy import registry
    from kvassay.policy.describe import describe

    try:
        return describe(registry.get(name))
    except PolicyError as error:
        return {"name": name, "error": str(error)}


def _table(rows: list[dict[str, Any]]) -> None:
    table = Table("name", "effect", "budget", "exact", "what it does", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], f"[red]{escape(row['error'])}[/red]")
            continue
        table.add_row(
            row["name"] + "".join(mark for key, mark in MARKS.items() if row[key]),
            ", ".join(row["effects"]),
            ", ".join(row["budgets"]) or "-",
            "yes" if row["exact"] else "no",
            escape(row["summary"]),
        )
    console = Console()
    console.print(table)
    console.print(
        "\n† reference: a yardstick that no engine could run   ‡ reconstruction: gaps of the source were filled in\n"
        "§ external: another project's code decides, in an environment of its own\n"
        "exact: attention over what is retained is exact\n"
        "kvassay policies NAME shows the whole card: evidence, source, deviations, parameters",
        markup=False,
    )


def _show(card: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in card.items():
        if key == "parameters":
            value = [f"{k}={v['default']} ({v['type']})" for k, v in value.items()]
        text = "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        table.add_row(key, escape(text) or "-")
    Console().print(table)
