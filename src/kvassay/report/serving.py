"""What `kvassay serve-replay` prints: one row per arm, the four levels, and what they mean."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvassay.replay.serving.result import SCHEMA, Levels, ServingResult
from kvassay.replay.serving.serve import Comparison
from kvassay.report import words

SCOPE = (
    "Admission and cache sharing follow vLLM's rules but are not judged here: capacity is. Times are modelled or from "
    "a table; a footprint measured at one context length is applied to every request. Generated text is never shared "
    "between requests, as traces do not say whether it could be, so hit rates are lower bounds."
)
LEGEND = (
    "hit: prompt tokens found in the prefix cache at first admission / prompt tokens admitted. TTFT, TPOT: seconds, "
    "median / p99. goodput: right answers in time per second (share of right answers measured in the closed loop). "
    "Levels are fractions of dense's: tokens read -> bytes held -> blocks freed (of the context) -> mean tokens and "
    "requests in the pool -> mean-length requests that fit at once."
)


def serving_data(comparison: Comparison, about: dict[str, Any]) -> dict[str, Any]:
    """Plain data for JSON: `about`, the results, the levels; `docs/serving.md` says what every field means."""
    return {
        "schema": SCHEMA,
        "scope": SCOPE,
        **about,
        "results": [result.as_data() for result in comparison.results],
        "levels": [asdict(levels) for levels in comparison.levels],
    }


def serving_tables(comparison: Comparison) -> RenderableType:
    """The tables of a comparison, with what their columns mean."""
    served = Table("arm", "served", "preempted", "hit", "TTFT s", "TPOT s", "out tok/s", "in time", "goodput /s")
    pool = Table("arm", "pool blocks", "mean", "peak", "by component", "requests", "peak", "fit at once")
    for result in comparison.results:
        served.add_row(*_served(result))
        pool.add_row(*_pool(result))
    parts: list[RenderableType] = [served, pool]
    if comparison.levels:
        levels = Table("arm / dense", "selected", "retained", "freed", "hits", "pool tokens", "requests", "fit at once")
        for one in comparison.levels:
            levels.add_row(*_levels(one))
        parts.append(levels)
    for table in parts:
        for column in table.columns[1:] if isinstance(table, Table) else ():
            column.justify = "right"
    first = comparison.results[0]
    about = f"Step times: {first.times}. Manager: {first.backend}. {_sources(comparison)}{LEGEND}"
    return Group(*parts, Text(about), Text(SCOPE))


def _sources(comparison: Comparison) -> str:
    """Where the footprints are from, each place once."""
    arms: dict[str, list[str]] = {}
    for result in comparison.results[1:]:
        given = result.footprint
        arms.setdefault(f"{given['how']} ({given['source']}; blocks by {given['mode']})", []).append(result.arm)
    return "".join(f"Footprint of {', '.join(names)}: {place}. " for place, names in arms.items())


def _served(result: ServingResult) -> list[str]:
    refused = f" ({result.refused:,} refused)" if result.refused else ""
    return [
        result.arm,
        f"{result.finished:,}{refused}",
        f"{result.preempted_requests:,}",
        "-" if result.hit_rate is None else f"{100 * result.hit_rate:.2f}%",
        f"{words.number(result.ttft.p50)} / {words.number(result.ttft.p99)}",
        f"{words.number(result.tpot.p50, 4)} / {words.number(result.tpot.p99, 4)}",
        f"{result.output_tokens_per_second:,.0f}",
        f"{result.in_time:,}",
        words.number(result.goodput),
    ]


def _pool(result: ServingResult) -> list[str]:
    parts = ", ".join(f"{kind} {count:,.0f}" for kind, count in result.by_component.items())
    return [
        result.arm,
        f"{result.pool_blocks:,} x {words.size(result.block_bytes)}",
        f"{result.mean_blocks:,.0f}",
        f"{result.peak_blocks:,}",
        parts or "-",
        f"{result.mean_requests:,.1f}",
        f"{result.peak_requests:,}",
        f"{result.capacity:,.1f}",
    ]


def _levels(levels: Levels) -> list[str]:
    shares = (levels.selected, levels.retained, levels.blocks_freed)
    gains = (levels.pool_tokens, levels.requests, levels.capacity)
    return [
        levels.arm,
        *(f"{share:.2f}" for share in shares),
        "-" if levels.hits is None else f"{100 * levels.hits:+.2f} pt",
        *("-" if gain is None else f"{gain:.2f}x" for gain in gains),
    ]
