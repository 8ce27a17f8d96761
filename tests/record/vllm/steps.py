"""Hand-made captures: what an engine would have written, made from rows that a tiny model really computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvassay.record.vllm.capture import Arrived, Capture, CapturedGroup, CaptureWriter, Head, Ran, Step, Tables
from kvassay.trace.reader import Segment, Trace

BLOCK = 4


def head_of(layers: Sequence[int], groups: Sequence[CapturedGroup] | None = None, **changes: Any) -> Head:
    """A head with plain values; one group of blocks of 4 unless given."""
    values: dict[str, Any] = {
        "model": "m",
        "vllm": "0.32.0",
        "dtype": "float32",
        "num_blocks": 100,
        "prefill_chunk": 8,
        "groups": tuple(groups or [CapturedGroup(layers=tuple(layers), block_size=BLOCK)]),
        "layers": tuple(layers),
        "q_from": 0,
        "output": False,
        "logits_k": 0,
        "logits_from": 0,
    }
    return Head(**{**values, **changes})


def step(number: int, *ran: tuple[str, int, Sequence[int]], tables: dict[str, Tables], **more: Any) -> Step:
    """A step of rows (request, first position, ids)."""
    rows = tuple(Ran(id=name, first=first, ids=tuple(ids)) for name, first, ids in ran)
    return Step(step=number, ran=rows, tables=tables, **more)


def arrived(name: str, prompt: Sequence[int], hit: int = 0, **more: Any) -> Arrived:
    return Arrived(id=name, prompt_ids=tuple(prompt), hit=hit, **more)


def slots_of(head: Head, made: Step, group: int) -> torch.Tensor:
    """The slots that the tables give a step's rows."""
    size = head.groups[group].block_size
    return torch.tensor(
        [
            made.tables[ran.id][group][position // size] * size + position % size
            for ran in made.ran
            for position in range(ran.first, ran.first + len(ran.ids))
        ]
    )


def write(folder: Path, head: Head, steps: Sequence[Step], rows: Any = None) -> Capture:
    """Store steps; `rows(step)` gives their tensors besides slots."""
    writer = CaptureWriter(folder, head)
    for made in steps:
        slots = {f"slots.{group}": slots_of(head, made, group) for group in range(len(head.groups))}
        writer.tensors(made.step, slots | ({} if rows is None else rows(made)))
        writer.line(made)
    return Capture(folder)


class Rows:
    """The rows of a recorded trace by position: of its prefix and one branch per request name."""

    def __init__(self, trace: Trace, branch_of: dict[str, int], head: Head) -> None:
        self.trace, self.branch_of, self.head = trace, branch_of, head

    def __call__(self, made: Step) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for layer in self.head.layers:
            for name in ("k", "v", "q", "output"):
                least = 0 if name in "kv" else self.head.q_from
                found[f"{layer}.{name}"] = torch.stack(
                    [
                        self._row(ran.id, layer, name, position)
                        for ran in made.ran
                        for position in range(ran.first, ran.first + len(ran.ids))
                        if position >= least
                    ]
                )
        wanted = [
            (ran.id, position)
            for ran in made.ran
            for position in range(ran.first, ran.first + len(ran.ids))
            if position >= self.head.logits_from
        ]
        if wanted and self.head.logits_k:
            tops = [self._segment(*at).top_logits for at in wanted]
            at = [position - self.trace.prefix.tokens for _, position in wanted]
            for i, name in enumerate(("values", "ids", "logsumexp")):
                found[f"logits.{name}"] = torch.stack([top[i][row] for top, row in zip(tops, at, strict=True)])
        return found

    def _segment(self, name: str, position: int) -> Any:
        return self.trace.prefix if position < self.trace.prefix.tokens else self.trace.branches[self.branch_of[name]]

    def _row(self, request: str, layer: int, name: str, position: int) -> torch.Tensor:
        segment: Segment = self._segment(request, position)
        if name == "output":
            return segment.tap(f"output_{layer:03d}")[position - segment.q_start]
        if name == "q":
            return segment.q(layer)[position - segment.q_start]
        return segment.cache(layer, name)[position - segment.start]
