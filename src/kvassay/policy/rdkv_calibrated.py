"""RDKV with the distortion table of the model at hand (arXiv 2605.08317, appendix B)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kvassay.errors import PolicyError
from kvassay.policy import distortion
from kvassay.policy.allocation import Table
from kvassay.policy.base import Artefact, Calibration, Memory
from kvassay.policy.card import Card, When
from kvassay.policy.rdkv import RDKV


@dataclass(frozen=True)
class RDKVCalibrated(RDKV):
    """RDKV whose table is measured on calibration text, one mean over layers and heads per side."""

    card: ClassVar[Card] = dataclasses.replace(
        RDKV.card,
        name="rdkv-calibrated",
        summary="RDKV with distortion measured on calibration text of this model",
        when=RDKV.card.when | {When.OFFLINE},
        evidence=RDKV.card.evidence | distortion.EVIDENCE,
        deviations=(*RDKV.card.deviations, "calibrated on one text of a few thousand tokens; the paper on 32 of 4k"),
    )

    def fit(self, source: Calibration) -> Artefact:
        """Normalised error at 2, 4 and 8 bits: `key` and `value`."""
        return distortion.measure(source, self.clamp_zero)

    def tables(self, memory: Memory) -> tuple[Table, Table]:
        """Distortion of keys and of values, as fitted."""
        if memory.artefact is None:
            raise PolicyError("policy 'rdkv-calibrated' has no artefact: fit it on a calibration trace first")
        keys, values = (tuple(memory.artefact.tensors[side].tolist()) for side in ("key", "value"))
        return distortion.table(keys), distortion.table(values)
