"""A family's tiny model, recorded once: what every test of the family starts from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvassay.layout.config import from_config
from kvassay.policy.base import EVERY_QUERY
from kvassay.record.load import LoadedModel, ModelIdentity
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.workload.sample import Branch, Sample
from tests.families import models
from tests.replay.worlds import Words, World

CONTEXT, QUESTION, ANSWER, CHUNK = 111, 3, 6, 40
"""Tokens. The context fills no last block and no last chunk, and is many windows long."""


def ids() -> list[int]:
    """Random tokens: a context and one question with its answer."""
    return models.token_ids(CONTEXT + QUESTION + ANSWER)


def sample() -> Sample:
    """These tokens."""
    tokens, middle = ids(), CONTEXT + QUESTION
    branch = Branch(
        tuple(tokens[CONTEXT:middle]), tuple(tokens[middle:]), "question", "answer", tuple(range(ANSWER)), 0.5
    )
    return Sample("needle_multikey", 0, 0, tuple(tokens[:CONTEXT]), (branch,), False)


def chunks() -> list[int]:
    """How many of them each pass of a recording takes."""
    whole, rest = divmod(CONTEXT, CHUNK)
    return [*[CHUNK] * whole, *([rest] if rest else []), QUESTION + ANSWER]


def both(trace: Trace, read: str, *what: Any) -> Tensor:
    """What a method of the prefix gives, and then of the branch."""
    return torch.cat([getattr(segment, read)(*what) for segment in trace.segments])


def record(folder: Path, family: str, **changes: Any) -> World:
    """Build a family's model and record it with all queries, full logits and every layer's attention output."""
    model = models.build(family, **changes)
    loaded = LoadedModel(model, Words(), from_config(model.config), ModelIdentity(family, "folder", "0" * 64, "1" * 64))
    options = RecordOptions(prefill_chunk=CHUNK, q_tail=EVERY_QUERY, taps=("output",), logits="full")
    silent = LoadedModel(model, None, loaded.layout, loaded.identity)
    trace = record_sample(silent, sample(), folder / family, options)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the others take no float64
    return World(loaded, exact, trace, trace, folder)
