"""What offline methods are shown of a model itself: projection weights, what goes into them, gradients at them.

Orientation throughout: y = x W' + b with rows x [tokens, in], W [out, in], as `torch.nn.Linear`; the KV heads lie one
after the other along `out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Projection:
    """A linear layer: weight float32 [out, in], bias float32 [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class HeadNorm:
    """An RMS norm over each head's dimension: x / sqrt(mean(x^2) + eps) * weight, weight float32 [dim]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """The key and value projections of one attention layer, and the norm between key projection and rotation."""

    key: Projection
    value: Projection
    key_norm: HeadNorm | None = None


@dataclass(frozen=True)
class LayerGradients:
    """Gradient of a pass's mean next-token loss (nats) at both weights, float32 of their shapes."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Occlusions:
    """What blanking pieces of a text, each replaced by padding, does to the answer that follows it."""

    starts: Tensor
    """int64 [pieces]: where each of the blanked pieces begins."""
    width: int
    """Tokens per piece."""
    change: Tensor
    """float32 [pieces]: rise of the answer's mean loss (nats per token)."""
    hidden: Mapping[int, Tensor]
    """Output of every decoder layer over the whole text, float32 [tokens, hidden]."""


@dataclass(frozen=True)
class CalibrationPass:
    """One forward pass over a piece of calibration text, by layer in the policy's scope."""

    inputs: Mapping[int, Tensor]
    """What the layer's projections read: float32 [tokens, in]."""
    gradients: Mapping[int, LayerGradients]
    """Empty unless the card asks for gradients."""
