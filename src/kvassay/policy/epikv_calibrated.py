"""EpiKV with its two layers found on the model at hand, by blanking pieces of a text (arXiv 2606.26472, appendix C)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.stats import spearmanr
from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.policy.base import Artefact, Calibration, Memory
from kvassay.policy.card import Card, Evidence, When
from kvassay.policy.checks import at_least
from kvassay.policy.epikv import EpiKV
from kvassay.policy.epikv_rule import MotionEviction
from kvassay.policy.motion import changes
from kvassay.policy.weights import Occlusions


@dataclass(frozen=True)
class EpiKVCalibrated(MotionEviction):
    """EpiKV at the layers whose rolling change goes most with, and most against, what the answer needs.

    tokens: of the calibration text, its last ones, that are blanked piece by piece
    piece, stride: tokens blanked at once, and from one piece to the next (paper: 32 and 16)
    """

    tokens: int = 512
    piece: int = 32
    stride: int = 16

    card: ClassVar[Card] = dataclasses.replace(
        EpiKV.card,
        name="epikv",
        summary="EpiKV at the two layers that blanking pieces of a calibration text points to on this model",
        when=EpiKV.card.when | {When.OFFLINE},
        evidence=EpiKV.card.evidence | {Evidence.OCCLUSION},
        gaps=(
            "a position's importance is the largest rise of the answer's loss over the pieces that cover it; the paper "
            "blanks reasoning the model wrote and counts answers that flip",
            "the layers of greatest and of least correlation are taken, whatever size or sign; its own were .04 to .25",
            *EpiKV.card.gaps[1:],
        ),
        deviations=(
            *EpiKV.card.deviations,
            "the text is the calibration's, teacher-forced, with one question; the paper's are many correct traces",
            "carries z-scores of all layers and bills them; an engine that is told the layers carries two",
        ),
        limits=(
            *EpiKV.card.limits,
            "one short text points to other layers than the next: see how far before trusting it "
            "(benchmarks/epikv_calibration.py)",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, tokens=2, piece=1, stride=1)

    def taps_in(self, layers: int) -> frozenset[int]:
        """Every layer: which two count is learnt."""
        return frozenset(range(layers))

    def fit(self, source: Calibration) -> Artefact:
        """`rho` float64 [layers], each layer's rank correlation; `early`, `late` int64, its highest and lowest."""
        found = source.occlusions(self.tokens, self.piece, self.stride)
        if len(found.hidden) < 2 or bool((found.change == found.change[0]).all()):
            raise PolicyError("policy 'epikv': blanking pieces of the text changes nothing, or the model has one layer")
        rho = correlations(found, self.window)
        return Artefact({"rho": rho, "early": rho.argmax(), "late": rho.argmin()}, source.sha256)

    def columns(self, memory: Memory) -> tuple[int, int]:
        """As fitted."""
        if memory.artefact is None:
            raise PolicyError("policy 'epikv' has no artefact: fit it on a calibration trace first")
        return int(memory.artefact.tensors["early"]), int(memory.artefact.tensors["late"])


def importance(found: Occlusions, tokens: int) -> Tensor:
    """float64 [tokens]: largest rise of the loss over the pieces that cover a token; NaN where none does."""
    best = torch.full((tokens,), -torch.inf, dtype=torch.float64)
    for start, change in zip(found.starts.tolist(), found.change.double(), strict=True):
        covered = slice(start, start + found.width)
        best[covered] = torch.maximum(best[covered], change)
    return best.masked_fill(best.isinf(), torch.nan)


def correlations(found: Occlusions, window: int) -> Tensor:
    """Spearman's rho, float64 [layers], of the trailing mean change of the hidden state with importance."""
    moves = changes(torch.stack([found.hidden[layer] for layer in sorted(found.hidden)])).double()
    rolling = torch.stack([moves[:, max(0, at + 1 - window) : at + 1].nanmean(1) for at in range(moves.shape[1])], 1)
    wanted = importance(found, moves.shape[1])
    held = ~wanted.isnan() & ~rolling.isnan().any(0)
    return torch.tensor([spearmanr(one[held].numpy(), wanted[held].numpy()).statistic for one in rolling]).double()
