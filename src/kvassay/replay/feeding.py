"""Feeding many lanes at once: in one batch what can go together, in pieces what a policy's steps part."""

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

    Each lane takes as many at once as it may (`Lane.takes`).
    """
    out: dict[int, Tensor] = {}
    for rows in _batches(lanes, tokens):
        batch, ids = [lanes[row] for row in rows], [tokens[row] for row in rows]
        count, at, parts = len(ids[0]), 0, list[Tensor]()
        while at < count:
            size = min(lane.takes(count - at) for lane in batch)
            wanted = min(size, max(0, at + size - (count - last)))
            parts.append(engine.forward(batch, [one[at : at + size] for one in ids], wanted, committed=committed))
            at += size
        out.update(zip(rows, torch.cat(parts, dim=1), strict=True))
    return [out[row] for row in range(len(lanes))]


def _batches(lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Rows that run together: those with equally many tokens that take as many of them at once.

    Lanes that must, or may have to, go step by step never run with the others, so that dense' is another batch's dense.
    """
    kinds: dict[tuple[int, bool, int], list[int]] = {}
    for row, (lane, ids) in enumerate(zip(lanes, tokens, strict=True)):
        kinds.setdefault((len(ids), lane.stepwise, -lane.takes(len(ids))), []).append(row)
    for kind in sorted(kinds):
        yield kinds[kind]
