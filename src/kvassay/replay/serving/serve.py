"""One request trace served under several arms, dense first: the entry point of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from kvassay.errors import CacheError
from kvassay.layout.model import Layout
from kvassay.measure.cost import Weights
from kvassay.measure.hardware.files import Hardware
from kvassay.replay.serving.backend import Backend, OursBackend
from kvassay.replay.serving.cost import RooflineTimes, TableTimes
from kvassay.replay.serving.footprint import DENSE, Footprint
from kvassay.replay.serving.geometry import Geometry
from kvassay.replay.serving.result import Levels, ServingResult, Targets, summarise
from kvassay.replay.serving.scheduler import Limits, Scheduler
from kvassay.trace.requests.record import Request, RequestFile

BackendName = Literal["ours", "vllm"]
MAX_UNITS = 1 << 20
"""Longest request the managers are made for, in units; the pool refuses long before."""


@dataclass(frozen=True)
class Setting:
    """What all arms of a comparison have in common."""

    layout: Layout
    pool_bytes: int
    hardware: Hardware
    weights: Weights
    block_size: int | None = None
    """Tokens per block; None: those of the trace's block ids, the grain at which sharing is known."""
    limits: Limits = field(default_factory=Limits)
    targets: Targets = field(default_factory=Targets)
    backend: BackendName = "ours"
    table: TableTimes | None = None
    """Step times in place of the roofline."""
    step_overhead: float = 0.0
    """Seconds added to every modelled step."""
    speedup: float = 1.0
    """Arrivals come so many times faster."""
    count: int | None = None
    """Only the first so many requests."""


@dataclass(frozen=True)
class Comparison:
    """Dense and the arms, and the four levels of each against dense."""

    results: tuple[ServingResult, ...]
    levels: tuple[Levels, ...]


def compare(trace: RequestFile, setting: Setting, footprints: Sequence[Footprint]) -> Comparison:
    """Serve the trace dense, then under each footprint, with the same pool bytes."""
    known = [footprint.dense_correct for footprint in footprints if footprint.dense_correct is not None]
    dense = replace(DENSE, correct=known[0] if known else None)
    results = [serve(trace, setting, footprint) for footprint in (dense, *footprints)]
    return Comparison(tuple(results), tuple(Levels.of(result, results[0]) for result in results[1:]))


def serve(trace: RequestFile, setting: Setting, footprint: Footprint) -> ServingResult:
    """Serve the trace under one footprint."""
    geometry = Geometry.of(setting.layout, setting.block_size or trace.block_size)
    if footprint.timing == "from_start" and footprint.freed_fraction and geometry.windowed:
        raise CacheError(
            f"{footprint.arm}: is smaller from the first token on, but only in groups that no window bounds; blocks of "
            "one pool must be equal, so this cannot be modelled for a model with windows; --timing after_prefill "
            "has it shrink when its prefill ends"
        )
    num_blocks = geometry.pool_blocks(setting.pool_bytes, footprint.block_scale)
    backend = _BACKENDS[setting.backend](geometry, num_blocks, footprint.edits or footprint.windows)
    times = setting.table or RooflineTimes(
        setting.layout, setting.hardware, setting.weights, footprint, setting.step_overhead
    )
    scheduler = Scheduler(geometry, backend, times, footprint, setting.limits, trace.block_size)
    log = scheduler.run(arrivals(trace, setting.speedup, setting.count))
    return summarise(log, geometry, footprint, backend.usable, backend.name, times, setting.targets)


def arrivals(trace: Iterable[Request], speedup: float, count: int | None) -> Iterator[Request]:
    """The first `count` requests in order of arrival, sessions side by side, time compressed."""
    picked = islice(iter(trace), count)
    for request in sorted(picked, key=lambda request: request.arrival):
        yield replace(request, arrival=request.arrival / speedup) if speedup != 1 else request


def _ours(geometry: Geometry, num_blocks: int, edits: bool) -> Backend:
    return OursBackend(geometry, num_blocks, MAX_UNITS)


def _vllm(geometry: Geometry, num_blocks: int, edits: bool) -> Backend:
    from kvassay.replay.serving.vllm import VllmBackend

    return VllmBackend(geometry, num_blocks, MAX_UNITS, edits)


_BACKENDS: dict[BackendName, Callable[[Geometry, int, bool], Backend]] = {"ours": _ours, "vllm": _vllm}
