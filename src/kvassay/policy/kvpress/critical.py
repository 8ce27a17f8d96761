"""CriticalKV and CriticalAdaKV (Feng et al. 2025, arXiv 2502.03805) of kvpress, which read output projections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.policy.base import Artefact, Calibration, Memory
from kvassay.policy.card import Card, Evidence, When
from kvassay.policy.kvpress.policy import Kvpress
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class KvpressCritical(Kvpress):
    """Keep what a press keeps that weighs values by what the output projection makes of them.

    press: CriticalKVPress or CriticalAdaKVPress round another
    options: of the presses, as window_size=32;first_stage_ratio=0.5
    version: of kvpress; another one is refused
    """

    press: str = "CriticalKVPress(SnapKVPress)"

    card: ClassVar[Card] = dataclasses.replace(
        Kvpress.card,
        name="kvpress-critical",
        summary="keeps what a press of kvpress keeps that weighs values by the output projection",
        when=Kvpress.card.when | {When.OFFLINE},
        evidence=Kvpress.card.evidence | {Evidence.WEIGHTS},
    )

    def __post_init__(self) -> None:
        if not self.chain.output:
            raise PolicyError(f"policy 'kvpress-critical': {self.press} reads no output projection; use kvpress")

    def fit(self, source: Calibration) -> Artefact:
        """Each layer's output projection, float32 [hidden, q_heads * dim]; nothing is learnt from the text."""
        outputs = source.outputs()
        return Artefact({f"layer{index}": outputs[index].weight for index in outputs}, source.sha256)

    def shown(self, layer: LayerView, memory: Memory) -> dict[str, Tensor]:
        """The projection as well; `PolicyError` without an artefact."""
        if memory.artefact is None:
            raise PolicyError("policy 'kvpress-critical' has no artefact: fit it on a calibration trace first")
        return super().shown(layer, memory) | {"output": memory.artefact.tensors[f"layer{layer.index}"]}
