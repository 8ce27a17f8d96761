"""Tiny random models with a recorded trace each, and the same model in float64 for the oracle."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvassay.layout.config import from_config
from kvassay.policy.base import EVERY_QUERY
from kvassay.record.load import LoadedModel, ModelIdentity
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.workload.sample import Branch, Sample
from tests.record import tiny

S, F = "sliding_attention", "full_attention"
HYBRID = {"layer_types": [S, F, S, S, F, S], "num_hidden_layers": 6, "sliding_window": 24}
QUESTION, ANSWERS = 6, (20, 4)
"""Tokens of each branch: a question, then a long or a short answer."""


class Words:
    """A tokenizer as far as a replay needs one."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class World:
    """A model, the same one in float64, and what was recorded of it."""

    loaded: LoadedModel
    exact: Any
    trace: Trace
    calibration: Trace
    """Of another text."""
    folder: Path

    def record(self, name: str, sample: Sample, chunk: int = 64) -> Trace:
        """Another recording of this model."""
        taps = ("lse", "bucket", "layer_input")
        options = RecordOptions(prefill_chunk=chunk, q_tail=EVERY_QUERY, taps=taps, logits="full")
        silent = LoadedModel(self.loaded.model, None, self.loaded.layout, self.loaded.identity)
        return record_sample(silent, sample, self.folder / name, options)


def fed(branch: int) -> int:
    """Tokens that a teacher-forced lane takes in after the context: all but the last of the answer."""
    return QUESTION + ANSWERS[branch] - 1


def sample(context: int, index: int) -> Sample:
    """Random tokens: a context and its branches."""
    ids = tiny.token_ids(context + sum(QUESTION + answer for answer in ANSWERS), seed=100 + index)
    branches, first = [], context
    for answer in ANSWERS:
        middle, end = first + QUESTION, first + QUESTION + answer
        question, gold = tuple(ids[first:middle]), tuple(ids[middle:end])
        branches.append(Branch(question, gold, "question", "answer", tuple(range(answer)), 0.5))
        first = end
    return Sample("needle_multikey", 0, index, tuple(ids[:context]), tuple(branches), False)


def make(folder: Path, family: str, context: int, **changes: Any) -> World:
    """Build a model and record it."""
    model = tiny.build(family, **changes)
    layout = from_config(model.config)
    kv_heads = layout.storing[0].kv.kv_heads
    identity = ModelIdentity(f"tiny-{family}-{kv_heads}", "folder", str(kv_heads) * 64, "1" * 64)
    loaded = LoadedModel(model, Words(), layout, identity)
    exact = copy.deepcopy(model).double()
    unrecorded = World(loaded, exact, None, None, folder)  # type: ignore[arg-type]
    trace = unrecorded.record("trace", sample(context, 0))
    calibration = unrecorded.record("calibration", sample(200, 1))
    return World(loaded, exact, trace, calibration, folder)
