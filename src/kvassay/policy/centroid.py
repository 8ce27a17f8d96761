"""Control for LOCKS: the mean key of each page alone, no directions (its rank-0 row, arXiv 2607.24555)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.locks import MassSelector
from kvassay.policy.spectral import Widths


@dataclass(frozen=True)
class Centroid(MassSelector):
    """A page's mass as if all its keys were their mean.

    block: page size in tokens, a multiple of the cache's block size, each of which keeps a mean
    bits: of the mean: 8, or 32 (float32, not coded)
    combine: as in `Locks`
    """

    card: ClassVar[Card] = Card(
        name="centroid",
        effects=frozenset({Effect.SELECT}),
        source="LOCKS, arXiv 2607.24555: its centroid-only control",
        summary="reads the pages whose mean key promises the largest attention mass",
        when=frozenset({When.BLOCK_FULL, When.EVERY_STEP}),
        unit="block",
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY}),
        budgets=frozenset({"read_tokens"}),
        deviations=(
            "pages with protected tokens are always read, inside the budget, beside page 0 and the page still filling",
            "the mean is an int8 code with a float16 scale, as in LOCKS; the paper does not say how its control "
            "stores it",
        ),
        limits=("a page whose keys point apart has a mean near none of them: a control, not a candidate",),
    )

    @property
    def widths(self) -> Widths:
        """The mean alone."""
        return Widths(0, self.bits, self.bits)
