"""Keep and read everything: the arm that all others are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvassay.policy.base import Policy
from kvassay.policy.card import Card, Effect


@dataclass(frozen=True)
class Dense(Policy):
    """No edits, full reads."""

    card: ClassVar[Card] = Card(
        name="dense",
        effects=frozenset({Effect.NONE}),
        source="the unmodified model",
        summary="keeps and reads everything",
        budgets=frozenset(),
    )
