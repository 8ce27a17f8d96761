"""EpiKV (Kolawole, Smith 2026, arXiv 2606.26472): evict generated tokens by how the hidden state moved at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvassay.errors import PolicyError
from kvassay.policy.base import Memory
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least
from kvassay.policy.epikv_rule import MotionEviction


@dataclass(frozen=True)
class EpiKV(MotionEviction):
    """EpiKV at the paper's depths.

    early, late: decoder layers; below 1 a fraction of the depth (paper: 10 and 21 of 32, for one model)
    """

    early: float = 0.31
    late: float = 0.66

    card: ClassVar[Card] = Card(
        name="epikv-uncal",
        effects=frozenset({Effect.EVICT}),
        source="EpiKV, arXiv 2606.26472 v2, sections 3 and 4",
        summary="evicts generated tokens at which hidden states of two layers moved least, slots reused; prompt stays",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.HIDDEN}),
        reconstruction=True,
        gaps=(
            "the layers are the paper's depths, not calibrated on this model",
            "h is the output of the decoder layer; eps is 1e-6; the deviation is the population's",
            "the first token after the context has no change and scores 0; early ones use the window so far",
            "of equal scores the older token goes",
        ),
        deviations=(
            "positions stay true; the published loop derives them from a cache counter that stops at the budget",
            "tokens of a question asked after the context count as generated",
        ),
        limits=(
            "does nothing to a prompt: where that alone fills the budget it is not applicable",
            "scores are frozen: a token that becomes relevant later cannot come back",
            "compare with random and ~flipped, ~shuffled: protecting the prompt may be all of its gain",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, early=0, late=0)
        if self.early == self.late:
            raise PolicyError(f"policy '{self.card.name}': early and late are both {self.early:g}")

    def taps_in(self, layers: int) -> frozenset[int]:
        """The early and the late layer; `PolicyError` if they are one in so shallow a model."""
        taps = frozenset(round(at * layers) if at < 1 else int(at) for at in (self.early, self.late))
        if len(taps) < 2:
            raise PolicyError(
                f"policy '{self.card.name}': early={self.early:g} and late={self.late:g} are one layer of {layers}"
            )
        return taps

    def columns(self, memory: Memory) -> tuple[int, int]:
        """Early and late, whichever is deeper."""
        return (0, 1) if self.early < self.late else (1, 0)
