"""What a policy's own work on one layer of a long context costs: CPU time, and peak memory beyond the cache.

The layer is made of random rows: cost does not depend on what they say. What a policy is given (keys, values, recorded
queries, taps) lies in memory before the clock starts and is not counted; all that it makes of it is.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.errors import PolicyError
from kvassay.layout.model import KV, Component, Layer, Rope
from kvassay.policy.base import Artefact, Calibration, Memory, Policy
from kvassay.policy.budget import Allowance, Budget, Protection
from kvassay.policy.card import LATE, Evidence, When
from kvassay.policy.queries import Queries
from kvassay.policy.views import BlockView, CacheView, LayerView, Meter, Rows, StepView

BUCKET = 32
"""Tokens of a bucket, as recorded for SelKV."""
CALIBRATION = 2048
"""Tokens that methods which learn offline are fitted on, outside the clock."""
INDEX = 10
PERIOD = 1_000_003
UNFIT = {Evidence.WEIGHTS, Evidence.OCCLUSION}
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Shape:
    """A layer's heads and the share of the context that a budget keeps or reads."""

    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    budget: float = 0.1

    def layer(self) -> Layer:
        """The layer, deep enough to be none of those that a method leaves dense."""
        kv = Component(KV(self.kv_heads, self.dim, self.dim))
        return Layer(INDEX, self.q_heads, (kv,), scale=self.dim**-0.5, rope=Rope(10_000.0, self.dim))


@dataclass(frozen=True)
class PlanCost:
    """One policy on one layer of `tokens` tokens, measured here; seconds are the process's CPU time, which other work
    on the machine does not lengthen."""

    tokens: int
    plan_seconds: float
    """Once per context: summaries of all its blocks, scores and decision; 0 for a method that only acts later."""
    step_seconds: float
    """Per later token at that length: choosing what to read, or a decision while decoding (every n: one in n)."""
    peak_bytes: int
    """Most memory beyond what was given, in either."""


def plan_cost(policy: Policy, tokens: int, shape: Shape | None = None, seed: int = 0) -> PlanCost:
    """Measure one policy; Linux only, and one measurement at a time in a process.

    Raises `PolicyError` for a method that learns from a model's weights (it plans nothing per context), and whatever
    the policy raises: methods that score every prompt query refuse a long context.
    """
    asks = sorted(policy.card.evidence & UNFIT)
    if asks:
        raise PolicyError(f"policy '{policy.card.name}' learns from a model's {asks[0]}: nothing to plan per context")
    made = _Synthetic(policy, tokens, shape or Shape(), seed)
    plan, step = made.plan, made.step
    made.load()
    base = _restart_peak()
    with torch.inference_mode():
        plan_seconds = _seconds(plan)
        step_seconds = _seconds(step)
    return PlanCost(tokens, plan_seconds, step_seconds, max(0, _status("VmHWM") - base))


def _seconds(work: Callable[[], object] | None) -> float:
    if work is None:
        return 0.0
    start = time.process_time()
    work()
    return time.process_time() - start


def _restart_peak() -> int:
    """Bytes resident now, the peak set back to it."""
    ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


class _Synthetic:
    """A layer of random rows, and what one policy does with it."""

    def __init__(self, policy: Policy, tokens: int, shape: Shape, seed: int) -> None:
        self.policy, self.tokens, self.shape = policy, tokens, shape
        self.rng = torch.Generator().manual_seed(seed)
        self.layer = shape.layer()
        self.side: dict[str, Tensor] = {}
        self.state: Mapping[str, Tensor] = {}
        self.sha256 = "random rows"
        unit = "keep_tokens" if "keep_tokens" in policy.card.budgets else next(iter(sorted(policy.card.budgets)), None)
        self.late = When.AFTER_PREFILL not in policy.card.when
        self.context = max(1, tokens - self._generated()) if self.late and policy.writes_decide else tokens
        budget = None if unit is None else Budget(unit, shape.budget if unit != "per_window" else 0.5)
        self.allowance = Allowance.resolve(budget, tokens, Protection())

    def _generated(self) -> int:
        """Tokens since the context, for a method that only acts on those."""
        return max(int(getattr(self.policy, "interval", 0) or 0), 512)

    @cached_property
    def data(self) -> LayerData:
        k, v = (self._random(self.shape.kv_heads, self.tokens, self.shape.dim) for _ in "kv")
        return LayerData.dense(k, v)

    @cached_property
    def recorded(self) -> Queries:
        count = min(self.policy.queries_needed, self.tokens) if Evidence.QUERIES in self.policy.card.evidence else 1
        count = max(count, 1)
        positions = torch.arange(self.tokens - count, self.tokens)
        return Queries(self._random(self.shape.q_heads, count, self.shape.dim), positions)

    @cached_property
    def taps(self) -> dict[Evidence, Rows]:
        at, found = torch.arange(self.tokens), {}
        asked = self.policy.card.evidence
        if Evidence.ROW_LSE in asked:
            found[Evidence.ROW_LSE] = Rows(self._random(self.tokens, self.shape.q_heads) + 8, at)
        if Evidence.BUCKET in asked:
            found[Evidence.BUCKET] = Rows(self._random(self.tokens, self.shape.q_heads, BUCKET), at)
        return found

    @cached_property
    def artefact(self) -> Artefact | None:
        # Of a calibration it has the layers, and nothing of a model: `UNFIT`.
        return self.policy.fit(cast(Calibration, self)) if When.OFFLINE in self.policy.card.when else None

    def layers(self) -> Iterator[tuple[int, LayerView]]:
        """Text to be fitted on: another, shorter layer of random rows."""
        text = _Synthetic(self.policy, min(CALIBRATION, self.tokens), self.shape, 1)
        text.recorded = Queries(
            self._random(self.shape.q_heads, text.tokens, self.shape.dim), torch.arange(text.tokens)
        )
        yield INDEX, text._view()

    def load(self) -> None:
        """Put everything that is given into memory."""
        _ = self.data, self.recorded, self.taps, self.artefact

    @property
    def plan(self) -> Callable[[], object] | None:
        """What the policy does once per context."""
        wanted = [self._summarize] if self.policy.writes_summarize else []
        wanted += [self._decide] if self.policy.decides_at(When.AFTER_PREFILL) else []
        return (lambda: [work() for work in wanted]) if wanted else None

    @property
    def step(self) -> Callable[[], None] | None:
        """What it does per later token."""
        if self.policy.writes_read:
            return self._read
        return self._observe_and_decide if self.policy.decides_at(*LATE) else None

    def _summarize(self) -> None:
        size = self.shape.block_size
        whole = self.tokens // size * size
        k, v = (x[:, :whole].unflatten(1, (-1, size)).transpose(0, 1) for x in (self.data.k, self.data.v))
        learnt = {} if self.artefact is None else self.artefact.tensors
        self.side = dict(self.policy.summarize(BlockView(self.layer, k, v, learnt)))

    def _read(self) -> None:
        query = self.recorded.q[:, -1:]
        self.policy.read(self._view(), query, self._memory(), self.allowance, None)

    def _decide(self) -> None:
        self._decided(CacheView({INDEX: self._view()}, self.tokens, self.tokens))

    def _observe_and_decide(self) -> None:
        moment = next(moment for moment in LATE if self.policy.decides_at(moment))
        cache = CacheView({INDEX: self._view()}, self.tokens, self.context, moment)
        if self.policy.writes_observe:
            fed = range(self.context, self.tokens)
            hidden = {layer: self._random(len(fed), self.shape.q_heads * self.shape.dim) for layer in (0, 1)}
            self.state = self.policy.observe({}, StepView(tuple(fed), tuple(fed), cache, hidden))
        self._decided(cache)

    def _decided(self, cache: CacheView) -> None:
        memory = self._memory()
        scores = (
            {i: self.policy.score(view, memory) for i, view in cache.layers.items()} if self.policy.writes_score else {}
        )
        self.policy.decide(cache, scores, memory, self.allowance)

    def _memory(self) -> Memory:
        return Memory(self.state, self.artefact, torch.Generator().manual_seed(0))

    def _view(self) -> LayerView:
        return LayerView(
            self.layer,
            self.policy.card,
            lambda: self.data,
            length=self.tokens,
            protection=self.allowance.protection,
            meter=Meter(2.0),
            queries={kind: lambda: self.recorded for kind in (Evidence.QUERIES, Evidence.FUTURE_QUERIES)},
            rows={kind: (lambda rows=rows: rows) for kind, rows in self.taps.items()},  # type: ignore[misc]
            side=self.side,
            block_size=self.shape.block_size,
        )

    def _random(self, *shape: int) -> Tensor:
        """Normal numbers, the same ones again and again, shifted: a long layer is made in no time."""
        count = math.prod(shape)
        numbers = torch.randn(min(count, PERIOD), generator=self.rng)
        return numbers.repeat(-(-count // PERIOD))[:count].view(shape)
