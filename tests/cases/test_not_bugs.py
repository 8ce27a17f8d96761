"""Reports that look like faults and are none: the number is right, and nothing raises an alarm."""

from __future__ import annotations

from pathlib import Path

from kvassay.trace.requests.record import Request, RequestFile
from kvassay.trace.requests.stats import request_stats


def trace(requests: list[tuple[int, tuple[int, ...]]], block_size: int) -> RequestFile:
    made = [Request(str(i), float(i), tokens, 1, blocks) for i, (tokens, blocks) in enumerate(requests)]
    return RequestFile(Path("made"), "kvassay", block_size, "ceil", lambda: iter(made))


def test_a_repeated_prompt_hits_from_its_second_request_on() -> None:
    """1CatAI/1Cat-vLLM #90: one prompt, 5 at a time, 3 rounds: the engine's log said 21.3 %, a rolling rate over its
    last 1,000 requests. From counters, requests in order: the first computes all, the other 14 nothing."""
    rounds = [(50_000, tuple(range(3125)))] * 15
    pool = request_stats(trace(rounds, 16)).pools[0]
    assert pool.token_rate == 14 / 15
    first, *others = (request_stats(trace(rounds[: 5 * n], 16)).pools[0] for n in (1, 2, 3))
    assert first.hit_tokens == 4 * 50_000
    assert [later.hit_tokens for later in others] == [9 * 50_000, 14 * 50_000]


def test_a_shared_prefix_shorter_than_a_block_is_no_hit() -> None:
    """vllm #54607: about 240 tokens in common and blocks of 784: no hit is right. With blocks of 16 the same traffic
    hits 240 of 1,000 tokens."""
    large = request_stats(trace([(1000, (2 * i, 2 * i + 1)) for i in range(5)], 784)).pools[0]
    small = [(1000, (*range(15), *range(100 * (i + 1), 100 * (i + 1) + 48))) for i in range(5)]
    assert (large.hit_tokens, large.token_rate) == (0, 0.0)
    assert request_stats(trace(small, 16)).pools[0].hit_tokens == 4 * 240
