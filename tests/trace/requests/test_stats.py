"""Hit rates worked out by hand, and against a slow recount."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvassay.cli.main import cli
from kvassay.errors import TraceError
from kvassay.trace.requests.record import Request, RequestFile
from kvassay.trace.requests.stats import request_stats


def trace(rows: Sequence[tuple[int, tuple[int, ...] | None]], block_size: int = 4) -> RequestFile:
    requests = [Request(str(i), float(i), tokens, 1, blocks) for i, (tokens, blocks) in enumerate(rows)]
    return RequestFile(Path("made"), "kvassay", block_size, "ceil", lambda: iter(requests))


def test_unbounded_rates_by_hand() -> None:
    """10 tokens in blocks of 4 have a last block of 2: asked again, all 10 hit, not 12.

    Tokens: 0 + 10 + 8 of 10 + 10 + 12; blocks: 0 + 3 + 2 of 3 + 3 + 3.
    """
    stats = request_stats(trace([(10, (0, 1, 2)), (10, (0, 1, 2)), (12, (0, 1, 3))]))
    (pool,) = stats.pools
    assert (pool.hit_tokens, pool.tokens, pool.hit_blocks, pool.blocks) == (18, 32, 5, 9)
    assert pool.token_rate == 18 / 32
    assert pool.block_rate == 5 / 9
    assert (stats.requests, stats.distinct_blocks, stats.longest_input, stats.seconds) == (3, 4, 12, 2.0)


def test_an_lru_pool_drops_the_oldest_touch_and_a_later_block_alone_is_no_hit() -> None:
    """Pool of 3: (0 1) (2 3) leaves 1 2 3; then (0 1) finds no 0, so 1 is no hit; leaves 3 0 1; (2 3) misses 2."""
    rows = [(8, (0, 1)), (8, (2, 3)), (8, (0, 1)), (8, (2, 3)), (8, (2, 3))]
    unbounded, small, large = request_stats(trace(rows), [3, 4]).pools
    assert (unbounded.hit_blocks, small.hit_blocks, large.hit_blocks) == (6, 2, 6)
    assert small.capacity == 3


def test_tokens_without_an_id_are_in_the_denominator_and_requests_without_ids_in_none() -> None:
    stats = request_stats(trace([(6, (0,)), (6, (0,)), (100, None)]))
    assert (stats.pools[0].hit_tokens, stats.pools[0].tokens, stats.without_ids) == (4, 12, 1)
    assert stats.input_tokens == 112


def test_nothing_asked_is_no_rate() -> None:
    pool = request_stats(trace([(3, None)])).pools[0]
    assert (pool.token_rate, pool.block_rate) == (None, None)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(TraceError, match="at least 1 block, not 0"):
        request_stats(trace([(4, (0,))]), [5, 0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12), st.integers(1, 8))
def test_an_lru_pool_agrees_with_a_list(paths: list[list[int]], capacity: int) -> None:
    """The oracle names blocks by their whole path and keeps a plain list, oldest first."""
    numbers: dict[tuple[int, ...], int] = {}
    rows, held, hits = [], [], 0
    for path in paths:
        prefixes = [tuple(path[: i + 1]) for i in range(len(path))]
        rows.append((max(len(path), 1), tuple(numbers.setdefault(prefix, len(numbers)) for prefix in prefixes)))
        known = [prefix in held for prefix in prefixes] + [False]
        hits += known.index(False)
        for prefix in prefixes:
            held = [other for other in held if other != prefix] + [prefix]
        held = held[-capacity:]
    assert request_stats(trace(rows, 1), [capacity]).pools[1].hit_blocks == hits


def test_the_command_prints_rates_and_definitions(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    row = {"timestamp": 0, "input_length": 768, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    result = CliRunner().invoke(cli, ["requests", "stats", str(path), "--json", "--lru", "1"])
    data = json.loads(result.output)
    assert [pool["token_rate"] for pool in data["pools"]] == [0.75, 0.0]
    assert (data["format"], data["requests"], data["pools"][0]["hit_tokens"]) == ("mooncake", 4, 3 * 768)
    shown = CliRunner().invoke(cli, ["requests", "stats", str(path)]).output
    assert "75.00%" in shown
    assert "hit tokens / prompt tokens of all requests" in " ".join(shown.split())
