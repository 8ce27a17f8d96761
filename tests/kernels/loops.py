"""Attention written out, one query head, one query and one token at a time, in Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def weights(logits: Sequence[float], sink: float | None = None) -> list[float]:
    """Softmax; a sink takes its share of the mass."""
    everything = [*logits] + ([] if sink is None else [sink])
    top = max(everything)
    total = sum(math.exp(x - top) for x in everything)
    return [math.exp(x - top) / total for x in logits]


def logit(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    inner_bias: float = 0.0,
    bias: float = 0.0,
) -> float:
    """One query vector and one key vector."""
    x = sum(a * b for a, b in zip(q.tolist(), k.tolist(), strict=True)) * scale + inner_bias
    return (math.tanh(x / softcap) * softcap if softcap else x) + bias


def mean(rows: Sequence[Sequence[float]], by: Sequence[float]) -> list[float]:
    """Weighted sum of value vectors."""
    return [sum(w * row[d] for w, row in zip(by, rows, strict=True)) for d in range(len(rows[0]))]
