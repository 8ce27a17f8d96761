"""Small ledgers that the ledger's tests share."""

from __future__ import annotations

import numpy as np

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec

FULL = GroupSpec(0, (0, 1), (2, 1), 4)
SLIDING = GroupSpec(1, (2,), (1,), 4, window=6)


def full_ledger(num_blocks: int = 20, **options) -> Ledger:
    return Ledger([FULL], num_blocks, **options)


def filled(ledger: Ledger, tokens: int, salt: bytes = b"") -> int:
    """A sequence of tokens 0, 1, 2, ... in one append."""
    seq, cached = ledger.create(range(tokens), salt)
    ledger.append(seq, range(cached, tokens))
    return seq


def evict_everywhere(ledger: Ledger, seq: int, positions) -> None:
    for layer in FULL.layers:
        ledger.evict_positions(seq, layer, np.asarray(positions))


def rows(arrays) -> list[list[int]]:
    return [array.tolist() for array in arrays]
