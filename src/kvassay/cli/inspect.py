"""`kvassay inspect`: what a model's KV cache looks like and weighs."""

from __future__ import annotations

import json

import click
from rich.console import Console

from kvassay.cli.params import TokenCount
from kvassay.layout.config import from_config
from kvassay.layout.render import DEFAULT_CONTEXTS, inspect_report, inspect_table


@click.command("inspect")
@click.argument("model", metavar="NAME|PATH")
@click.option("--context", "contexts", type=TokenCount(), multiple=True, help="Tokens, e.g. 8k; repeatable.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens per block.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def inspect(model: str, contexts: tuple[int, ...], block_size: int, as_json: bool) -> None:
    """Show the cache layout of a model: shapes, KV cache groups, bytes by context.

    NAME|PATH is an embedded model (smollm2-135m, gemma-3-270m), a config.json or its folder, or a
    Hugging Face id that is in the local cache.
    """
    report = inspect_report(from_config(model), model, contexts or DEFAULT_CONTEXTS, block_size)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        Console(soft_wrap=False).print(inspect_table(report))
