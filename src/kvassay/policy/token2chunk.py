"""Token2Chunk of KARA (arXiv 2607.01237), as reconstructed: join neighbouring chosen tokens into runs.

Some of the budget goes to the most important tokens (candidates); then gaps between neighbouring candidates are
filled whole, best first, while tokens remain; what is left goes to the next-best single tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Order = Literal["value", "cost"]


def token2chunk(
    importance: Tensor, keep: int, *, share: float, longest: int, order: Order = "value", forced: Sequence[int] = ()
) -> Tensor:
    """bool [tokens] with exactly `keep` true.

    importance: float [tokens], in position order; ties go to the earlier token
    share: of what `forced` leaves of `keep` that candidates take; 1 leaves nothing to fill
    longest: longest chunk one gap and its two candidates may make; below 3 nothing is filled
    order: of gaps: importance of both ends and the mean inside, per token it costs; or cheapest first
    forced: tokens that are kept first, inside `keep`; they end gaps as candidates do
    """
    best = torch.sort(importance, descending=True, stable=True).indices.tolist()
    candidates = len(forced) + math.ceil(share * max(0, keep - len(forced)))
    ranked = [*forced, *(t for t in best if t not in set(forced))]
    kept = set(ranked[:candidates])
    for first, last in _gaps(importance, sorted(kept), longest, order):
        if last - first - 1 <= keep - len(kept):
            kept.update(range(first + 1, last))
    for token in ranked[candidates:]:
        if len(kept) == keep:
            break
        kept.add(token)
    mask = torch.zeros_like(importance, dtype=torch.bool)
    mask[sorted(kept)] = True
    return mask


def _gaps(importance: Tensor, chosen: Sequence[int], longest: int, order: Order) -> list[tuple[int, int]]:
    """Neighbouring candidates with something between them that a chunk may span, best first."""
    gaps = [(a, b) for a, b in pairwise(chosen) if b - a > 1 and b - a + 1 <= longest]

    def value(gap: tuple[int, int]) -> float:
        a, b = gap
        return float(importance[a] + importance[b] + importance[a + 1 : b].mean()) / (b - a - 1)

    return sorted(gaps, key=lambda gap: -value(gap) if order == "value" else gap[1] - gap[0])
