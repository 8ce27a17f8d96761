"""`kvassay inspect`: what a model's KV cache looks like and weighs, and which models are known by name."""

from __future__ import annotations

import json

import click
from rich.console import Console

from kvassay.cli.params import TokenCount


@click.command("inspect")
@click.argument("model", metavar="[NAME|PATH]", required=False)
@click.option("--context", "contexts", type=TokenCount(), multiple=True, help="Tokens, e.g. 8k; repeatable.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens per block.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--markdown", is_flag=True, help="Print the whole registry as a Markdown page.")
def inspect(model: str | None, contexts: tuple[int, ...], block_size: int, as_json: bool, markdown: bool) -> None:
    """List the models known by name, or show the cache layout of one: shapes, KV cache groups, bytes by context.

    NAME|PATH is a model of the registry (hy3, gemma-4-31b, ...), a config.json or its folder, or a Hugging Face id
    that is in the local cache. A folder called like a registry model is meant by its path: ./hy3.
    """
    from kvassay.layout.config import from_config
    from kvassay.layout.registry import listing, rows
    from kvassay.layout.render import DEFAULT_CONTEXTS, inspect_report, inspect_table

    if markdown and model is not None:
        raise click.UsageError("--markdown is the page of all models: leave NAME out")
    console = Console(soft_wrap=False)
    if markdown:
        click.echo(listing.markdown(), nl=False)
    elif model is None:
        found = listing.entries()
        click.echo(json.dumps(found, indent=2)) if as_json else console.print(listing.entry_table(found))
    else:
        report = inspect_report(from_config(model), model, contexts or DEFAULT_CONTEXTS, block_size, rows.find(model))
        click.echo(json.dumps(report, indent=2)) if as_json else console.print(inspect_table(report))
