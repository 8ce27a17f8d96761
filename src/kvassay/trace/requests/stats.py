"""Prefix hit rates of a request trace, with an unbounded cache and with LRU pools of given sizes.

A request hits the longest run of leading blocks that the pool holds when it arrives; then all its blocks are
touched in order, first block first, and a pool over its size drops the least recently touched ones.

block rate = hit blocks / blocks of all requests. token rate = hit tokens / prompt tokens of all requests, where
a hit block counts the prompt's tokens in it (the last one may be partial) and tokens without a block id are in the
denominator. Both are fractions of what was asked, higher is better. Requests without ids are left out of both,
and counted. Generated tokens are in neither. No engine's rule is applied: vLLM, for one, always computes the
last token of a prompt again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvassay.errors import TraceError
from kvassay.trace.requests.record import Request, RequestFile


@dataclass
class HitRate:
    """Hits of one pool, counted two ways; `capacity` is in blocks, None for a cache that forgets nothing."""

    capacity: int | None
    hit_blocks: int = 0
    blocks: int = 0
    hit_tokens: int = 0
    tokens: int = 0

    @property
    def block_rate(self) -> float | None:
        """Hit blocks / blocks of all requests; None if there were none."""
        return self.hit_blocks / self.blocks if self.blocks else None

    @property
    def token_rate(self) -> float | None:
        """Hit tokens / prompt tokens of all requests; None if there were none."""
        return self.hit_tokens / self.tokens if self.tokens else None

    def as_data(self) -> dict[str, Any]:
        """Counts and both rates."""
        return {**asdict(self), "block_rate": self.block_rate, "token_rate": self.token_rate}


@dataclass
class RequestStats:
    """What a trace asks for, and how much of it could be had from a prefix cache."""

    requests: int = 0
    sessions: int = 0
    without_ids: int = 0
    """Requests whose blocks the file does not name: in no hit rate."""
    input_tokens: int = 0
    output_tokens: int = 0
    longest_input: int = 0
    seconds: float = 0.0
    """Latest arrival."""
    distinct_blocks: int = 0
    pools: list[HitRate] = field(default_factory=list)
    """The unbounded cache first."""

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "pools": [pool.as_data() for pool in self.pools]}


def request_stats(requests: RequestFile, capacities: Sequence[int] = ()) -> RequestStats:
    """Read a trace once and count, for the unbounded cache and LRU pools of `capacities` blocks."""
    if any(capacity < 1 for capacity in capacities):
        raise TraceError(f"an LRU pool needs at least 1 block, not {min(capacities)}")
    stats = RequestStats(pools=[HitRate(capacity) for capacity in (None, *capacities)])
    caches = [_Lru(capacity) for capacity in capacities]
    sessions: set[str] = set()
    for request in requests:
        _describe(stats, request)
        sessions.update({request.session} if request.session is not None else ())
        if request.blocks is None:
            stats.without_ids += 1
            continue
        # Blocks are numbered by first appearance: what is new in this request has the largest numbers.
        hits = [_leading(block < stats.distinct_blocks for block in request.blocks)]
        hits += [cache.serve(request.blocks) for cache in caches]
        stats.distinct_blocks = max([stats.distinct_blocks, *(block + 1 for block in request.blocks[-1:])])
        for pool, hit in zip(stats.pools, hits, strict=True):
            pool.hit_blocks += hit
            pool.blocks += len(request.blocks)
            pool.hit_tokens += min(hit * requests.block_size, request.input_tokens)
            pool.tokens += request.input_tokens
    stats.sessions = len(sessions)
    return stats


def _describe(stats: RequestStats, request: Request) -> None:
    stats.requests += 1
    stats.input_tokens += request.input_tokens
    stats.output_tokens += request.output_tokens
    stats.longest_input = max(stats.longest_input, request.input_tokens)
    stats.seconds = max(stats.seconds, request.arrival)


def _leading(known: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    run = 0
    for one in known:
        if not one:
            break
        run += 1
    return run


class _Lru:
    """The `capacity` most recently touched blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()

    def serve(self, blocks: Sequence[int]) -> int:
        """Leading blocks held; then touch all of them."""
        held = self._held
        hits = _leading(block in held for block in blocks)
        for block in blocks:
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity:
            held.popitem(last=False)
        return hits
