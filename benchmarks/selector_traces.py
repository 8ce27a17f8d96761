"""The traces that the selector benchmarks look at: one context per embedded model, and another to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvassay.record.load import load
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.workload.registry import build

MODELS = ("smollm2-135m", "gemma-3-270m")
WORKLOAD = "needle_multikey"


class Pair(NamedTuple):
    """A test trace, and a calibration trace of other prose with many recorded queries."""

    model: str
    test: Trace
    calibration: Trace


def pairs(folder: Path, context: int, *, calibration: int = 2048, models: tuple[str, ...] = MODELS) -> list[Pair]:
    """Traces in `folder`, recorded if they are not there: `context` tokens, three questions each."""
    return [
        Pair(
            model,
            _trace(folder / f"{model}-{context}", model, WORKLOAD, context, q_tail=64, split="test"),
            _trace(folder / f"{model}-cal-{calibration}", model, "prose", calibration, q_tail=512, split="calibration"),
        )
        for model in models
    ]


def _trace(folder: Path, model: str, workload: str, context: int, *, q_tail: int, split: str) -> Trace:
    if not folder.exists():
        loaded = load(model)
        sample = build(workload, loaded.tokenizer, context, split=split)
        record_sample(loaded, sample, folder, RecordOptions(q_tail=q_tail, logits="none"))
    return Trace.open(folder)
