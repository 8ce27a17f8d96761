"""Low-rank factors of projection weights, and what an offline fit gathers to make them.

Orientation: keys y = x W' + b, W [out, in]. A truncated SVD of W' (or of the whitened C W', with C'C the inputs' second
moment M) comes to a projection of y - b on the leading eigenvectors V of W W' (or of W M W'): x L R = x W' V V'. So a
basis [out, rank] is all there is to keep, and coefficients can be had from keys as well as from inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.cache.edits import LowRank
from kvassay.policy.base import Calibration
from kvassay.policy.weights import LayerWeights


@dataclass(frozen=True)
class LayerStats:
    """What the calibration text says about one layer."""

    weights: LayerWeights
    moment: Tensor
    """Sum of x x' over the inputs, float64 [in, in]."""
    gram: Tensor
    """The same of centred inputs."""
    fisher: tuple[float, float]
    """Fisher scores of the key and the value projection."""


class _Sums:
    """Running sums of one layer."""

    def __init__(self, weights: LayerWeights) -> None:
        width = weights.key.weight.shape[1]
        self.moment, self.total = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width).double()
        self.squares = [torch.zeros(side.weight.shape).double() for side in (weights.key, weights.value)]


def gather(source: Calibration, samples: int, tokens: int) -> Mapping[int, LayerStats]:
    """Second moments of the layers' inputs and Fisher scores, from up to `samples` passes of `tokens` tokens."""
    weights = source.weights()
    sums, batches, count = {index: _Sums(mine) for index, mine in weights.items()}, 0, 0
    for found in source.passes(samples, tokens):
        batches += 1
        count += len(next(iter(found.inputs.values())))
        for index, own in sums.items():
            x = found.inputs[index].double()
            own.moment += x.T @ x
            own.total += x.sum(0)
            gradients = found.gradients[index]
            for square, gradient in zip(own.squares, (gradients.key, gradients.value), strict=True):
                square += gradient.double().square()
    return {
        index: LayerStats(
            weights[index],
            own.moment,
            own.moment - torch.outer(own.total, own.total) / count,
            (fisher(own.squares[0] / batches), fisher(own.squares[1] / batches)),
        )
        for index, own in sums.items()
    }


def fisher(mean_square: Tensor) -> float:
    """Mean over a weight's elements of the root of its gradient's mean square over batches."""
    return float(mean_square.sqrt().mean())


def spectrum(weight: Tensor) -> list[float]:
    """Squared singular values of a weight [out, in], largest first, as many as it can have ranks."""
    values: list[float] = torch.linalg.svdvals(weight.double()).square().tolist()
    return values


def basis(weight: Tensor, moment: Tensor | None, rank: int) -> Tensor:
    """Orthonormal float64 [out, rank] on which to project the outputs; whitened by the inputs' `moment` if given."""
    w = weight.double()
    vectors = torch.linalg.eigh(w @ w.T if moment is None else w @ moment @ w.T).eigenvectors
    return vectors.flip(1)[:, :rank]


def lost(weight: Tensor, onto: Tensor) -> float:
    """Squared Frobenius norm of what the projection on a basis leaves out of a weight."""
    w = weight.double()
    return float((w - onto @ (onto.T @ w)).square().sum())


def value_basis(weight: Tensor, moment: Tensor, rank: int, passes: int) -> Tensor:
    """Orthonormal float64 [out, rank] for values: the SVD of the whole projection, refined `passes` times (ReCalKV).

    A pass takes W = L R to L = W M R' (R M R')^-1 and R = (L'L)^-1 L' W, so what is rebuilt is y projected on the
    columns of L, whatever basis of them is kept. R's rows span W'Q, Q the old columns' basis: a pass is one step of
    subspace iteration, span(L) = span(W M W' Q), and needs no inverse.
    """
    w = weight.double()
    q = torch.linalg.svd(w, full_matrices=False).U[:, :rank]
    for _ in range(passes):
        q = torch.linalg.qr(w @ (moment @ (w.T @ q))).Q
    return q


def kept(edits: Collection[LowRank]) -> dict[str, float]:
    """What a decision reports: mean key groups per layer, and the shares of key and value dimensions that are kept."""
    if not edits:
        return {}
    keys = [encoder for edit in edits for encoder in edit.key_encode or ()]
    values = [encoder for edit in edits for encoder in edit.value_encode or ()]
    key, value = (sum(e.shape[1] for e in side) / sum(e.shape[0] for e in side) for side in (keys, values))
    return {"key_groups": len(keys) / len(edits), "key_rank": key, "value_rank": value}
