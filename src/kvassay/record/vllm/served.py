"""Traces from what a running server did: its requests sorted by the context they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvassay.errors import RecordError
from kvassay.record.load import describe
from kvassay.record.models import CATALOGUE, model_dir
from kvassay.record.vllm.assemble import Account, assemble
from kvassay.record.vllm.capture import Arrived, Capture
from kvassay.record.vllm.sequences import Conversation, Request, Sequences, conversations
from kvassay.trace.reader import Trace
from kvassay.trace.schema import BranchEntry, Recipe, Sampling

RECIPE = "vllm-server"
"""What the header names as workload: there is none, so such a trace is not recorded again from its recipe."""


def served_traces(
    folder: str | Path, out: str | Path, *, model: str | None = None, share: float = 0.5, overwrite: bool = False
) -> Iterator[Trace]:
    """Write a trace for each context in the capture `folder` into `out`, named `context-000`, ...

    `model` is the model's name or place here, if it is not where the server had it; `share` the part of the shorter
    prompt that two requests of a trace have in common. Requests cut off by the capture's limits, preempted, or
    resting on what was cached before it began are left out; `RecordError` if none is left.
    """
    capture = Capture(folder)
    sequences = Sequences(capture)
    found = conversations(sequences, share)
    if not found:
        raise RecordError(
            f"{capture.folder}: {len(sequences.requests)} requests in {len(capture.steps)} steps, none of them whole"
        )
    files = describe(model or _known_name(capture.head.model))
    identity = files.identity()
    for index, conversation in enumerate(found):
        requests = [sequences.requests[name] for name in conversation.branches]
        account = Account(
            files=files,
            identity=identity,
            recipe=Recipe(name=RECIPE, seed=0, index=index, length=conversation.tokens),
            sampling=_sampling(requests[0].arrived),
            entries=tuple(_entry(request, conversation, files.tokenizer) for request in requests),
        )
        yield assemble(
            capture, sequences, conversation, account, Path(out) / f"context-{index:03d}", overwrite=overwrite
        )


def _entry(request: Request, conversation: Conversation, tokenizer: Any) -> BranchEntry:
    prompt = len(request.arrived.prompt_ids)
    answer = request.tokens[prompt:]
    return BranchEntry(
        tokens=len(request.tokens) - conversation.tokens,
        question_tokens=prompt - conversation.tokens,
        answer_text=tokenizer.decode(answer) if answer else "",
        meta={"request": request.arrived.id, "scored": list(range(len(answer)))},
    )


def _sampling(arrived: Arrived) -> Sampling:
    if arrived.temperature == 0.0:
        return Sampling(mode="greedy", max_new_tokens=arrived.max_tokens)
    return Sampling(
        mode="sampled",
        temperature=arrived.temperature,
        top_p=arrived.top_p,
        seed=arrived.seed,
        max_new_tokens=arrived.max_tokens,
    )


def _known_name(model: str) -> str:
    """The catalogue's name of an embedded model's folder, so that its manifest speaks for it; else as it is."""
    return next((name for name in CATALOGUE if Path(model) == model_dir(name)), model)
