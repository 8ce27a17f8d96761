"""Putting a recorder into vLLM: five methods of its classes are wrapped, for every engine made from then on.

`GPUModelRunner.__init__` and `Scheduler.__init__` (a config is refused before it costs anything; the second sees
engines whose model runs elsewhere), `GPUModelRunner.initialize_kv_cache` (model and cache are there, nothing has
run), `Scheduler.schedule` (requests, block tables, hits) and `GPUModelRunner.execute_model` (one step). The runner for
CPUs inherits from the GPU one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvassay.record.vllm.recorder import Recorder
from kvassay.record.vllm.refusals import check_engine, check_version

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def install(recorder: Recorder) -> ExitStack:
    """Wrap vLLM's methods; closing what is returned unwraps them. `RecordError` for a vLLM not supported."""
    check_version(str(importlib.import_module("vllm").__version__))
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    undo = ExitStack()
    _wrap(undo, runner, "__init__", _checking)
    _wrap(undo, scheduler, "__init__", _checking)
    _wrap(undo, runner, "initialize_kv_cache", functools.partial(_attaching, recorder))
    _wrap(undo, scheduler, "schedule", functools.partial(_noting, recorder))
    _wrap(undo, runner, "execute_model", functools.partial(_stepping, recorder))
    return undo


def _wrap(undo: ExitStack, owner: Any, name: str, wrapper: Wrapper) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    undo.callback(setattr, owner, name, original)


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: Any, vllm_config: Any, *args: Any, **more: Any) -> None:
        check_engine(vllm_config)
        original(self, vllm_config, *args, **more)

    return begin


def _attaching(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **more: Any) -> Any:
        result = original(self, kv_cache_config, is_profiling, **more)
        if not is_profiling:
            recorder.attach(self)
        return result

    return initialize_kv_cache


def _noting(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **more: Any) -> Any:
        output = original(self, *args, **more)
        recorder.scheduled(self, output)
        return output

    return schedule


def _stepping(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, output: Any, *args: Any, **more: Any) -> Any:
        with recorder.step(output):
            return original(self, output, *args, **more)

    return execute_model
