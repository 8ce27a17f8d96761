"""The result of one arm's replay: every number with its unit, denominator and direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvassay.replay.serving.cost import StepTimes
from kvassay.replay.serving.flight import Flight
from kvassay.replay.serving.footprint import Footprint, dropped
from kvassay.replay.serving.geometry import Geometry
from kvassay.replay.serving.log import Log

SCHEMA = 1


@dataclass(frozen=True)
class Targets:
    """Latency limits that make a request a good one; None: no limit."""

    ttft: float | None = None
    """Seconds to the first token."""
    tpot: float | None = None
    """Mean seconds per token after the first."""

    def met(self, flight: Flight) -> bool:
        """Whether a finished request kept within both; one token has no time per token to miss."""
        if flight.finished is None or flight.ttft is None:
            return False
        slow_start = self.ttft is not None and flight.ttft > self.ttft
        slow = self.tpot is not None and flight.tpot is not None and flight.tpot > self.tpot
        return not (slow_start or slow)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles over requests, seconds; lower is better."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class ServingResult:
    """One arm. Times are modelled (see `times`), counts of blocks and hits follow from the manager that ran."""

    arm: str
    backend: str
    """Whose cache manager: `ours` or `vllm`."""
    times: str
    """Where step times are from."""
    footprint: dict[str, Any]
    """What the arm changes (`Footprint`), with `how` and `source`."""

    requests: int
    """All that arrived."""
    refused: int
    """Of them, longer than an empty pool or the length limit: never served."""
    admitted: int
    finished: int
    preempted_requests: int
    """Requests preempted at least once; lower is better."""
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again after preemptions and not found in the cache; lower is better."""

    prompt_tokens: int
    """Of admitted requests."""
    hit_tokens: int
    """Of them, found in the prefix cache at the first admission; what a preempted request finds of itself is not
    counted."""
    hit_rate: float | None
    """`hit_tokens / prompt_tokens`; higher is better."""

    ttft: Spread
    """Arrival to first token."""
    tpot: Spread
    """Mean time per token after the first, per request with two or more."""
    seconds: float
    """First arrival to the last token."""
    busy_seconds: float
    """Of them, with a step running."""
    steps: int
    requests_per_second: float
    """Finished / `seconds`; higher is better."""
    output_tokens_per_second: float
    """Generated tokens of finished requests / `seconds`; higher is better."""

    targets: dict[str, float | None]
    """Latency limits in force, seconds."""
    in_time: int
    """Finished requests within both limits."""
    correct: float | None
    """Share of right answers, measured in the closed loop (not of these requests); None: not known."""
    goodput: float | None
    """`in_time * correct / seconds`: right answers in time per second; None if `correct` is. Higher is better."""

    pool_blocks: int
    """Blocks that requests can hold: all but the null block."""
    block_bytes: float
    """Bytes of one, side data included."""
    mean_blocks: float
    """Blocks held, mean over busy time."""
    peak_blocks: int
    by_component: dict[str, float]
    """Distinct blocks held by component (full, sliding, latent, ...), mean over samples. Never one sum."""

    mean_requests: float
    """Requests running at once, mean over busy time."""
    peak_requests: int
    mean_tokens: float
    """Tokens of running requests, freed ones included, mean over busy time."""
    peak_tokens: int
    capacity: float
    """Requests of the trace's mean length that fit the pool at once, nothing shared, after the policy has acted."""

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Levels:
    """From what a policy selects to what serving gains; fractions of dense's, no level standing for another."""

    arm: str
    selected: float
    """Tokens read per decode step / dense's (measured or assumed, see the footprint)."""
    retained: float
    """Bytes held / dense's, in the arm's scope."""
    blocks_freed: float
    """Blocks freed / blocks of the context under the reclaim mode."""
    hits: float | None
    """Hit rate minus dense's, as a fraction of prompt tokens: below 0 where edited or reused blocks lost hits."""
    pool_tokens: float | None
    """Mean tokens of running requests / dense's."""
    requests: float | None
    """Mean running requests / dense's: what the trace came to use."""
    capacity: float
    """Mean-length requests that fit at once / dense's: what the pool would hold."""

    @classmethod
    def of(cls, result: ServingResult, dense: ServingResult) -> Levels:
        """The levels of an arm against dense on the same trace and pool bytes."""
        given = result.footprint
        return cls(
            result.arm,
            given["selected_fraction"],
            given["retained_fraction"],
            given["freed_fraction"],
            None if result.hit_rate is None or dense.hit_rate is None else result.hit_rate - dense.hit_rate,
            _ratio(result.mean_tokens, dense.mean_tokens),
            _ratio(result.mean_requests, dense.mean_requests),
            result.capacity / dense.capacity,
        )


def summarise(
    log: Log, geometry: Geometry, footprint: Footprint, usable: int, backend: str, times: StepTimes, targets: Targets
) -> ServingResult:
    """Sum a replay up."""
    flights = log.flights
    done = [flight for flight in flights if flight.finished is not None]
    admitted = [flight for flight in flights if flight.admitted]
    prompt, hits = sum(f.request.input_tokens for f in admitted), sum(f.cached for f in admitted)
    in_time = sum(targets.met(flight) for flight in done)
    seconds = log.end - flights[0].arrival if flights else 0.0
    good = None if footprint.correct is None else _ratio(in_time * footprint.correct, seconds)
    return ServingResult(
        arm=footprint.arm,
        backend=backend,
        times=times.how,
        footprint=asdict(footprint),
        requests=len(flights),
        refused=log.refused,
        admitted=len(admitted),
        finished=len(done),
        preempted_requests=sum(flight.preemptions > 0 for flight in flights),
        preemptions=log.preemptions,
        recomputed_tokens=sum(flight.recomputed for flight in flights),
        prompt_tokens=prompt,
        hit_tokens=hits,
        hit_rate=_ratio(hits, prompt),
        ttft=_spread([f.ttft for f in flights if f.ttft is not None]),
        tpot=_spread([f.tpot for f in done if f.tpot is not None]),
        seconds=seconds,
        busy_seconds=log.busy,
        steps=log.steps,
        requests_per_second=_ratio(len(done), seconds) or 0.0,
        output_tokens_per_second=_ratio(sum(f.generated for f in done), seconds) or 0.0,
        targets=asdict(targets),
        in_time=in_time,
        correct=footprint.correct,
        goodput=good,
        pool_blocks=usable,
        block_bytes=geometry.block_bytes * footprint.block_scale,
        mean_blocks=_ratio(log.block_seconds, log.busy) or 0.0,
        peak_blocks=log.peak_blocks,
        by_component={kind: count / log.samples for kind, count in log.sampled_blocks.items()},
        mean_requests=_ratio(log.request_seconds, log.busy) or 0.0,
        peak_requests=log.peak_requests,
        mean_tokens=_ratio(log.token_seconds, log.busy) or 0.0,
        peak_tokens=log.peak_tokens,
        capacity=_capacity(flights, geometry, footprint, usable),
    )


def _capacity(flights: Sequence[Flight], geometry: Geometry, footprint: Footprint, usable: int) -> float:
    """Requests of mean length that fit at once, each with its whole answer, windows passed."""
    if not flights:
        return 0.0
    prompt = round(sum(f.request.input_tokens for f in flights) / len(flights))
    output = round(sum(f.output for f in flights) / len(flights))
    blocks = geometry.blocks_after(geometry.units(prompt + output), [0] * len(geometry.groups), 0)
    if footprint.edits:
        full = [prompt // geometry.unit // group.block_size for group in geometry.groups if group.window is None]
        blocks -= sum(len(dropped(count, footprint.freed_fraction)) for count in full)
    if footprint.windows:
        unit, interval = geometry.unit, footprint.interval
        for start in range(prompt, prompt + output - interval + 1, interval):
            for size in (group.block_size * unit for group in geometry.groups if group.window is None):
                inside = max((start + interval) // size - -(-start // size), 0)
                blocks -= len(dropped(inside, footprint.freed_fraction))
    return usable / blocks


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0, None, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(values, [50, 90, 99]))
    return Spread(len(values), float(np.mean(values)), p50, p90, p99)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
