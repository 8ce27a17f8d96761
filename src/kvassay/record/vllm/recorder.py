"""The recorder inside vLLM: what it notes of each step, from the scheduler's decision to the last layer's output."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Arrived, CaptureWriter, Step, Tables
from kvassay.record.vllm.engine import Engine, arrived, block_tables
from kvassay.record.vllm.limits import Limits
from kvassay.record.vllm.taking import Taking

PLAN = "kvassay_plan"
"""Attribute of vLLM's `SchedulerOutput` under which a plan travels to the model's process, if that is another one."""


@dataclass
class Plan:
    """What the scheduler decided for one step."""

    arrived: tuple[Arrived, ...]
    tables: dict[str, Tables]
    finished: tuple[str, ...]
    preempted: tuple[str, ...]
    seconds: float = 0.0
    """What noting it took."""


class Recorder:
    """Captures the steps of one engine while a folder is open; `install` puts it into vLLM.

    Given `folder`, it opens that when the model is there (a server: one recorder notes in the scheduler's process,
    another captures in the model's, unless they are one); `start` and `stop` do so later, any number of times
    (offline, one process).
    """

    def __init__(self, folder: str | Path | None = None, limits: Limits | None = None) -> None:
        self._first = None if folder is None else (folder, limits or Limits())
        self._engine: Engine | None = None
        self._writer: CaptureWriter | None = None
        self._limits = Limits()
        self._noting = folder is not None
        self._live: set[str] = set()
        self._gone: list[tuple[str, bool]] = []
        self._steps = 0
        self._scheduled: dict[str, int] | None = None
        self._taking: Taking | None = None
        self._spent = 0.0

    def attach(self, runner: Any) -> None:
        """Check the engine and hook its layers; `RecordError` if it cannot be recorded."""
        self._engine = Engine.of(runner)
        runner.model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        runner.model.register_forward_hook(self._after_model)
        for index, module in self._engine.modules.items():
            module.register_forward_pre_hook(functools.partial(self._before_layer, index), with_kwargs=True)
            module.register_forward_hook(functools.partial(self._after_layer, index))
        if self._first is not None:
            self.start(*self._first)

    def start(self, folder: str | Path, limits: Limits) -> None:
        """Open a capture folder; the engine must be idle, so that every request is seen from its beginning."""
        self._writer = CaptureWriter(folder, self._known().head(limits))
        self._limits, self._steps, self._live, self._gone = limits, 0, set(), []
        self._noting = True

    def stop(self) -> None:
        """Close the capture folder; what follows is not captured."""
        self._writer, self._noting = None, False

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """Note what the scheduler decided, on `output`, which `step` is given."""
        if not self._noting:
            return
        began = time.perf_counter()
        running = {request.request_id for request in scheduler.running}
        self._gone += [(name, name in output.finished_req_ids) for name in sorted(self._live - running)]
        self._live = running
        if not output.total_num_scheduled_tokens:
            return
        manager = scheduler.kv_cache_manager
        plan = Plan(
            arrived=tuple(arrived(new) for new in output.scheduled_new_reqs),
            tables={name: block_tables(manager, name) for name in output.num_scheduled_tokens},
            finished=tuple(name for name, done in self._gone if done),
            preempted=tuple(name for name, done in self._gone if not done),
        )
        self._gone = []
        plan.seconds = time.perf_counter() - began
        setattr(output, PLAN, plan)

    @contextmanager
    def step(self, output: Any) -> Iterator[None]:
        """Round `execute_model`: capture what it computes, if it is to be captured."""
        plan: Plan | None = getattr(output, PLAN, None)
        first, end = self._limits.steps
        number, self._steps = self._steps, self._steps + (plan is not None)
        if plan is None or self._writer is None or number < first or (end is not None and number >= end):
            yield
            return
        self._spent = plan.seconds
        began, self._scheduled = time.perf_counter() - plan.seconds, output.num_scheduled_tokens
        try:
            yield
            self._write(self._writer, number, plan, began)
        finally:
            self._scheduled, self._taking = None, None

    def _write(self, writer: CaptureWriter, number: int, plan: Plan, began: float) -> None:
        taking = self._taking
        if taking is None:
            raise RecordError(f"step {number} computed tokens, but the model was not called through its hooks")
        with self._timed():
            writer.tensors(number, taking.rows)
        writer.line(
            Step(
                step=number,
                finished=plan.finished,
                preempted=plan.preempted,
                arrived=plan.arrived,
                tables=plan.tables,
                ran=taking.ran,
                seconds=time.perf_counter() - began,
                recording_seconds=self._spent,
            )
        )

    def _before_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._scheduled is None:
            return
        with self._timed():
            engine = self._known()
            self._taking = Taking(engine.layout, self._limits, engine.batch(self._scheduled))
            self._taking.begin(kwargs.get("input_ids"), kwargs["positions"])

    def _before_layer(self, index: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taking, engine = self._taking, self._known()
        if taking is None:
            return
        with self._timed():
            group = engine.group_of(index)
            if not taking.has_slots(group):
                context = importlib.import_module("vllm.forward_context").get_forward_context()
                taking.slots(group, context.slot_mapping[module.layer_name])
            if self._wants(index):
                named = (kwargs[name] for name in ("query", "key", "value")[len(args) :])
                taking.inputs(index, *args[:3], *named)

    def _after_layer(self, index: int, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._taking is not None and self._limits.output and self._wants(index):
            with self._timed():
                self._taking.output(index, output)

    def _after_model(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._taking is not None:
            with self._timed():
                self._taking.logits(module, output)

    def _wants(self, index: int) -> bool:
        return self._limits.layers is None or index in self._limits.layers

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - began

    def _known(self) -> Engine:
        if self._engine is None:
            raise RecordError("no vLLM engine was made since the recorder was installed")
        return self._engine
