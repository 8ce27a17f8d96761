"""What all arms of a replay share: how it is run, not what is compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """Settings of a closed-loop replay, equal for every arm."""

    free_tokens: int = 16
    """Tokens generated greedily per question in free-running mode; 0 skips it."""
    block_size: int = 16
    """Slots per block of the smallest group."""
    seed: int = 0
    """Seed of the random generators that policies are given."""
    allow_beyond_native: bool = False
    """Whether a context beyond the model's native length may be replayed (a capacity study only)."""
