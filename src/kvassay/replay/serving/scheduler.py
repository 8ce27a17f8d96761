"""Continuous batching as vLLM's scheduler does it, on a cache manager, with modelled step times.

Each step has a token budget: running requests first, in order of admission (one token for who decodes, a chunk
for who prefills), then the head of the queue if its whole prompt fits the pool. When a running request gets no
block, the one admitted last is preempted: it loses its blocks and computes its tokens again later, from the head
of the queue. Runs of decode steps in which nothing else can happen are taken in one leap (`leap`). First come,
first served; deterministic. Speculation, priorities, LoRA and asynchronous scheduling are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kvassay.errors import CacheError
from kvassay.replay.serving.backend import Backend
from kvassay.replay.serving.cost import Chunk, StepTimes
from kvassay.replay.serving.flight import Flight
from kvassay.replay.serving.footprint import Footprint
from kvassay.replay.serving.geometry import Geometry, unit_ids
from kvassay.replay.serving.leap import fitting, leap
from kvassay.replay.serving.log import Log
from kvassay.trace.requests.record import Request

SAMPLE_EVERY = 64
"""Batches between two looks at what lies in the pool."""


@dataclass(frozen=True)
class Limits:
    """The engine's knobs; defaults as in vLLM."""

    batched_tokens: int = 8192
    """Tokens computed per step at most."""
    requests: int = 256
    """Requests running at once at most."""
    max_tokens: int | None = None
    """Longest prompt and answer together; None: whatever fits the pool."""


class Scheduler:
    """One replay of a request trace."""

    def __init__(
        self,
        geometry: Geometry,
        backend: Backend,
        times: StepTimes,
        footprint: Footprint,
        limits: Limits,
        trace_block: int,
    ) -> None:
        self.geometry, self.backend, self.times = geometry, backend, times
        self.footprint, self.limits, self.trace_block = footprint, limits, trace_block
        self.now = 0.0
        self.running: list[Flight] = []
        self.waiting: deque[Flight] = deque()
        self.log = Log()
        self._blocked = False
        self._batches = 0

    def run(self, requests: Iterable[Request]) -> Log:
        """Serve all requests, which come in order of arrival, to the end."""
        arrivals = self._flights(requests)
        coming = next(arrivals, None)
        while True:
            while coming is not None and coming.arrival <= self.now:
                self._enqueue(coming)
                coming = next(arrivals, None)
            if self.running or self.waiting:
                self.step(None if coming is None else coming.arrival)
            elif coming is None:
                break
            else:
                self.now = coming.arrival
        self.log.end = self.now
        return self.log

    def step(self, coming: float | None = None) -> None:
        """One step, or as many decode steps as can be taken at once before `coming`, when a request arrives."""
        plan, preempted = self._schedule_running()
        self._blocked = False
        if not preempted:
            self._schedule_waiting(plan)
        if not plan:
            if not preempted:
                raise CacheError(f"request {self.waiting[0].request.name} fits no empty pool")
            return
        chunks, contexts = [], []
        for flight, n in plan:
            if flight.prefilled:
                contexts.append(flight.computed - flight.let_go + 1)
            else:
                chunks.append(Chunk(n, flight.computed))
        decoding = np.array(contexts, dtype=np.int64)
        steps, seconds = 1, self.times.seconds(decoding, chunks)
        if not chunks and len(plan) == len(self.running):
            steps, seconds = self._leap(decoding, seconds, coming)
            plan = [(flight, steps) for flight, _ in plan]
        ending: list[Flight] = []
        if self.footprint.edits:
            ending = [flight for flight, n in plan if not flight.prefilled and flight.computed + n == flight.tokens]
            seconds += sum(self.times.scan_seconds(flight.tokens) for flight in ending)
        due = [(flight, count) for flight, n in plan if (count := self._due(flight, n))]
        seconds += sum(count * self.times.scan_seconds(self.footprint.interval) for _, count in due)
        self.now += seconds
        self._count(plan, chunks, steps, seconds)
        for flight, n in plan:
            self._computed(flight, n)
        for flight in ending:
            self._edit(flight)
        for flight, count in due:
            self._compress(flight, count)

    # -- scheduling ----------------------------------------------------------------------------------

    def _schedule_running(self) -> tuple[list[tuple[Flight, int]], bool]:
        plan: list[tuple[Flight, int]] = []
        budget, at, preempted = self.limits.batched_tokens, 0, False
        while at < len(self.running) and budget > 0:
            flight = self.running[at]
            n = min(flight.tokens - flight.computed, budget)
            while not (grown := self._grow(flight, n)):
                preempted = True
                if self._preempt_last() is flight:
                    break
            if not grown:
                break
            plan.append((flight, n))
            budget -= n
            at += 1
        return plan, preempted

    def _schedule_waiting(self, plan: list[tuple[Flight, int]]) -> None:
        budget = self.limits.batched_tokens - sum(n for _, n in plan)
        while self.waiting and budget > 0 and len(self.running) < self.limits.requests:
            flight = self.waiting[0]
            n = self._admit(flight, budget)
            if n == 0:
                self._blocked = True
                break
            self.running.append(self.waiting.popleft())
            plan.append((flight, n))
            budget -= n

    def _admit(self, flight: Flight, budget: int) -> int:
        """Tokens to compute in this step, 0 if the pool is short of what the whole sequence needs."""
        unit, backend = self.geometry.unit, self.backend
        total = self.geometry.units(flight.tokens)
        ids = self._ids(flight, 0, total)
        hit = backend.lookup(ids)
        needed = backend.revived(hit) + self.geometry.blocks_after(
            total, [len(blocks) for blocks in hit.blocks], self.geometry.units(self.limits.batched_tokens)
        )
        if needed > backend.free_blocks:
            return 0
        cached = hit.tokens * unit
        n = min(flight.tokens - cached, budget)
        count = self.geometry.units(cached + n) - hit.tokens
        prompt = self.geometry.units(flight.request.input_tokens)
        if backend.admit(flight.name, ids, count, prompt) is None:
            return 0
        if not flight.admitted:
            flight.admitted, flight.cached = True, cached
        flight.recomputed += max(0, flight.lost - cached)
        flight.computed, flight.units, flight.prefilled = cached, hit.tokens + count, False
        flight.windows, flight.let_go = 0, 0
        return n

    def _grow(self, flight: Flight, n: int) -> bool:
        """Slots for the next `n` tokens."""
        if flight.computed + n <= flight.units * self.geometry.unit:
            return True
        units = self.geometry.units(flight.computed + n)
        grown = self.backend.append(flight.name, self._ids(flight, flight.units, units))
        if grown:
            flight.units = units
        return grown

    def _preempt_last(self) -> Flight:
        flight = self.running.pop()
        self.backend.free(flight.name)
        flight.lost, flight.computed, flight.units = flight.computed, 0, 0
        flight.preemptions += 1
        self.log.preemptions += 1
        self.waiting.appendleft(flight)
        return flight

    # -- leaping and its consequences ----------------------------------------------------------------

    def _leap(self, contexts: np.ndarray, first: float, coming: float | None) -> tuple[int, float]:
        """How many decode steps to take at once, and their seconds; slots for all of them are taken."""
        most = min(flight.output - flight.generated for flight in self.running)
        if self.footprint.windows:
            most = min(most, *(self._until_due(flight) for flight in self.running))
        if self.geometry.windowed:
            # A window lets blocks go when a unit begins, and then whoever waits for blocks must be asked again.
            unit = self.geometry.unit
            most = min(most, *(f.units * unit - f.computed for f in self.running)) if self._blocked else min(most, unit)
        if self._blocked or len(self.running) >= self.limits.requests:
            coming = None  # Nobody can be admitted before one of these ends, whoever arrives.
        elif self.waiting:
            most = 1
        until = None if coming is None else coming - self.now
        steps = leap(self.times, contexts, first, most, until)
        steps = fitting(self.geometry, self.running, steps, self.backend.free_blocks)
        # In the order in which single steps would ask: what windows let go is lost from the cache in that order.
        for flight in sorted(self.running, key=lambda one: one.units * self.geometry.unit - one.computed):
            if not self._grow(flight, steps):
                raise CacheError(f"request {flight.request.name}: {steps} tokens do not fit, though they were counted")
        last = first if steps == 1 else self.times.seconds(contexts + (steps - 1), ())
        return steps, steps * (first + last) / 2

    def _computed(self, flight: Flight, n: int) -> None:
        """`n` more tokens are in the cache; once all known ones are, each step gives the next."""
        flight.computed += n
        new = flight.computed - flight.tokens + 1
        if new < 1:
            return
        flight.generated += new
        flight.prefilled = True
        if flight.first_token is None:
            flight.first_token = self.now
        if flight.generated >= flight.output:
            flight.finished = self.now
            self.backend.free(flight.name)
            self.running.remove(flight)

    def _edit(self, flight: Flight) -> None:
        """Apply the policy's footprint to a request whose prefill has ended, if no other's edit preempted it."""
        if flight.finished is not None or flight.units == 0:
            return
        self.backend.release(flight.name, self.footprint.freed_fraction, flight.computed // self.geometry.unit)
        while self.footprint.writes and not self.backend.rewrite(flight.name):
            if self._preempt_last() is flight:
                return

    # -- what a policy compresses as it is generated -----------------------------------------------------

    def _due(self, flight: Flight, n: int) -> int:
        """Intervals that `n` more tokens complete; after a preemption all those that are computed again."""
        if not self.footprint.windows or (not flight.prefilled and flight.computed + n < flight.tokens):
            return 0
        generated = flight.computed + n - flight.request.input_tokens
        return max(generated // self.footprint.interval - flight.windows, 0)

    def _until_due(self, flight: Flight) -> int:
        """Decode steps until the next interval is complete."""
        interval = self.footprint.interval
        return interval - (flight.computed - flight.request.input_tokens) % interval

    def _compress(self, flight: Flight, count: int) -> None:
        """Let go of the footprint's share of the blocks that lie wholly in each of `count` intervals."""
        if flight.finished is not None or flight.units == 0:
            return
        unit, interval = self.geometry.unit, self.footprint.interval
        for _ in range(count):
            first = flight.request.input_tokens + flight.windows * interval
            units = -(-first // unit), (first + interval) // unit
            flight.let_go += unit * self.backend.release(flight.name, self.footprint.freed_fraction, units[1], units[0])
            flight.windows += 1

    # -- bookkeeping ---------------------------------------------------------------------------------

    def _flights(self, requests: Iterable[Request]) -> Iterator[Flight]:
        for number, request in enumerate(requests):
            yield Flight(request, number, request.arrival, max(request.output_tokens, 1))

    def _enqueue(self, flight: Flight) -> None:
        self.log.flights.append(flight)
        tokens = flight.request.input_tokens + flight.output
        longest, chunk = self.limits.max_tokens, self.geometry.units(self.limits.batched_tokens)
        none = [0] * len(self.geometry.groups)
        if (longest is not None and tokens > longest) or (
            self.geometry.blocks_after(self.geometry.units(tokens), none, chunk) > self.backend.usable
        ):
            self.log.refused += 1
        else:
            self.waiting.append(flight)

    def _ids(self, flight: Flight, start: int, stop: int) -> list[int]:
        return unit_ids(flight.request, flight.number, self.geometry.unit, self.trace_block, start, stop)

    def _count(self, plan: list[tuple[Flight, int]], chunks: list[Chunk], steps: int, seconds: float) -> None:
        log = self.log
        prefilled = sum(chunk.tokens for chunk in chunks)
        log.prefilled_tokens += prefilled
        log.decoded_tokens += sum(n for _, n in plan) - prefilled
        held = sum(flight.computed for flight in self.running) + sum(n for _, n in plan)
        log.lasted(seconds, steps, len(self.running), held, self.backend.usable - self.backend.free_blocks)
        if self._batches % SAMPLE_EVERY == 0:
            log.sample(self.geometry, (self.backend.tables(flight.name) for flight in self.running))
        self._batches += 1
