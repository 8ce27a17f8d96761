"""Tiny pools, traces and step times for serving."""

from __future__ import annotations

from collections.abc import Sequence

from kvassay.cache.ops import GroupSpec
from kvassay.replay.serving.backend import OursBackend
from kvassay.replay.serving.cost import TableTimes
from kvassay.replay.serving.footprint import DENSE, Footprint
from kvassay.replay.serving.geometry import Geometry
from kvassay.replay.serving.scheduler import Limits, Scheduler
from kvassay.trace.requests.record import Request

SECOND = TableTimes(step=1.0)


def full(unit: int = 4) -> Geometry:
    """One group, a block of `unit` tokens."""
    return Geometry((GroupSpec(0, (0,), (1,), 1),), ("full",), unit, 1000)


def hybrid() -> Geometry:
    """Blocks of 8 tokens without a window, of 4 with one of 9 tokens (2 units and the query's own)."""
    groups = (GroupSpec(0, (0,), (1,), 2), GroupSpec(1, (1,), (1,), 1, 3))
    return Geometry(groups, ("full", "sliding"), 4, 1000)


def ask(
    arrival: float, prompt: int, output: int, blocks: Sequence[int] | None = None, session: str | None = None
) -> Request:
    return Request(f"at {arrival:g}", arrival, prompt, output, None if blocks is None else tuple(blocks), session)


def scheduler(
    usable: int,
    *,
    geometry: Geometry | None = None,
    footprint: Footprint = DENSE,
    times: TableTimes = SECOND,
    batched: int = 1000,
    requests: int = 256,
    max_tokens: int | None = None,
    trace_block: int = 4,
) -> Scheduler:
    geometry = geometry or full()
    backend = OursBackend(geometry, usable + 1, 1 << 20)
    return Scheduler(geometry, backend, times, footprint, Limits(batched, requests, max_tokens), trace_block)
