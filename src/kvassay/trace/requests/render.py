"""What `kvassay requests stats` prints: the counts as one line, hit rates as a table, and what they mean."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvassay.trace.requests.record import RequestFile
from kvassay.trace.requests.stats import HitRate, RequestStats

COLUMNS = ("pool (blocks)", "hit tokens", "of prompt tokens", "token rate", "hit blocks", "of blocks", "block rate")
DEFINITIONS = (
    "token rate = hit tokens / prompt tokens of all requests; block rate = hit blocks / block ids of all requests. "
    "A request hits the longest run of leading blocks that the pool holds when it arrives; a pool over its size "
    "drops the least recently touched blocks. Generated tokens are in neither."
)


def stats_tables(file: RequestFile, stats: RequestStats) -> RenderableType:
    """Counts, the table of pools, and the definitions under it."""
    mean = stats.input_tokens / stats.requests if stats.requests else 0
    head = (
        f"{file.path.name}: {file.format}, {file.block_size} tokens a block ({file.rounding}); "
        f"{stats.requests:,} requests{_sessions(stats)} over {stats.seconds:,.0f} s; "
        f"prompts {mean:,.0f} tokens on average, {stats.longest_input:,} at most; {stats.output_tokens:,} generated; "
        f"{stats.distinct_blocks:,} distinct blocks"
    )
    table = Table(
        "pool (blocks)", "hit tokens", "of prompt tokens", "token rate", "hit blocks", "of blocks", "block rate"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for pool in stats.pools:
        table.add_row(*_row(pool))
    notes = [f"{stats.without_ids:,} requests without block ids are in no rate."] if stats.without_ids else []
    return Group(Text(head), table, Text(" ".join([DEFINITIONS, *notes])))


def _sessions(stats: RequestStats) -> str:
    return f" in {stats.sessions:,} sessions, one after the other," if stats.sessions else ""


def _row(pool: HitRate) -> list[str]:
    name = "unbounded" if pool.capacity is None else f"LRU {pool.capacity:,}"
    return [
        name,
        f"{pool.hit_tokens:,}",
        f"{pool.tokens:,}",
        _percent(pool.token_rate),
        f"{pool.hit_blocks:,}",
        f"{pool.blocks:,}",
        _percent(pool.block_rate),
    ]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.2f}%"
