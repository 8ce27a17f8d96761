"""Feeding many lanes at once: in one batch what can go together, token by token what must."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvassay.replay.engine import Engine
from kvassay.replay.lane import Lane


def feed(
    engine: Engine, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]], last: int, *, committed: bool = True
) -> list[Tensor]:
    """Feed each lane its next tokens; returns per lane the logits [last, vocab] of its last ones, in order.

    Lanes that only compressed once take theirs as one chunk, the others one token at a time.
    """
    out: dict[int, Tensor] = {}
    for rows, stepwise in _batches(lanes, tokens):
        batch, ids = [lanes[row] for row in rows], [tokens[row] for row in rows]
        if stepwise:
            wanted = [int(at >= len(ids[0]) - last) for at in range(len(ids[0]))]
            steps = zip(zip(*ids, strict=True), wanted, strict=True)
            parts = [engine.forward(batch, [[t] for t in step], w, committed=committed) for step, w in steps]
            logits = torch.cat(parts, dim=1)
        else:
            logits = engine.forward(batch, ids, last, committed=committed)
        out.update(zip(rows, logits, strict=True))
    return [out[row] for row in range(len(lanes))]


def _batches(lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], bool]]:
    """Rows that run together, and whether they must go token by token."""
    for length in sorted({len(ids) for ids in tokens}):
        for stepwise in (False, True):
            rows = [row for row, lane in enumerate(lanes) if lane.stepwise is stepwise and len(tokens[row]) == length]
            if rows:
                yield rows, stepwise
