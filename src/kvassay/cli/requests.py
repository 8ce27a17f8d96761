"""`kvassay requests`: what a request trace asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.group("requests")
def requests() -> None:
    """Request traces: prefix hit rates of Mooncake, agentic and plain JSONL files."""


@requests.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--lru", "capacities", multiple=True, type=click.IntRange(1), help="Blocks of an LRU pool; repeatable.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens per id of a Mooncake-like file.  [default: 512]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def stats(file: Path, capacities: tuple[int, ...], block_size: int | None, as_json: bool) -> None:
    """Count FILE's requests and what a prefix cache could serve of them, by tokens and by blocks."""
    from kvassay.report.table import console_for
    from kvassay.trace.requests.formats import open_requests
    from kvassay.trace.requests.render import DEFINITIONS, stats_tables
    from kvassay.trace.requests.stats import request_stats

    opened = open_requests(file, block_size)
    counted = request_stats(opened, capacities)
    if as_json:
        about = {"file": str(file), "format": opened.format, "block_size": opened.block_size}
        click.echo(
            json.dumps(
                {**about, "rounding": opened.rounding, "definitions": DEFINITIONS, **counted.as_data()}, indent=1
            )
        )
    else:
        console_for(sys.stdout).print(stats_tables(opened, counted), markup=False)
