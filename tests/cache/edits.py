"""Edits of a small layer, as the tests of edits and of their refusals write them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Edit
from tests.cache.build import World

N = 8
ALL = torch.ones(N, dtype=torch.bool)


def apply(made: World, seq: int, *edits: Edit, index: int = 0) -> None:
    made.cache.apply(seq, Decision({index: edits}), allow_window=False)


def into(*merges: tuple[int, int, int], heads: int = 2, tokens: int = N) -> Tensor:
    """(head, source, target) as `Merge.into`."""
    out = torch.full((heads, tokens), -1)
    for head, source, target in merges:
        out[head, source] = target
    return out
