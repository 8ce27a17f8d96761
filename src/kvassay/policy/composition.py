"""What may be composed with what, and the card that comes of it.

Parts are an evictor (it may merge), an encoder and a selector, one of each at most, in that order where it matters:
what is encoded is freed by whole segments, so nothing evicts it any more. A selector reads what the others left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvassay.errors import BudgetError, PolicyError
from kvassay.policy.base import Policy
from kvassay.policy.budget import Budget
from kvassay.policy.card import LATE, Card, Effect, Evidence, Prefill, When

ROLES = {
    "evict": frozenset({Effect.EVICT, Effect.MERGE}),
    "encode": frozenset({Effect.QUANTIZE, Effect.LOW_RANK}),
    "select": frozenset({Effect.SELECT}),
}


@dataclass(frozen=True)
class Part:
    """A policy in a composition, with a budget of its own or, without one, with the arm's if it takes that unit."""

    policy: Policy
    budget: Budget | None = None

    def __post_init__(self) -> None:
        card = self.policy.card
        if self.budget is not None and self.budget.unit not in card.budgets:
            allowed = ", ".join(sorted(card.budgets)) or "none: its size is a parameter"
            raise BudgetError(f"policy '{card.name}' takes no {self.budget.unit} budget (takes {allowed})")

    @property
    def name(self) -> str:
        """The policy's."""
        return self.policy.card.name

    @property
    def label(self) -> str:
        """The policy's label, its own budget the first in the brackets."""
        if self.budget is None:
            return self.policy.label
        name, _, parameters = self.policy.label.partition("(")
        return f"{name}({', '.join(filter(None, [self.budget.label, parameters.rstrip(')')]))})"

    def has(self, role: str) -> bool:
        """Whether it evicts, encodes or selects."""
        return bool(ROLES[role] & self.policy.card.effects)

    @property
    def takes_the_arms(self) -> bool:
        """Whether it needs a budget and brings none."""
        return self.budget is None and bool(self.policy.card.budgets)


def of_role(parts: Sequence[Part], role: str) -> Part | None:
    """The part that evicts, encodes or selects."""
    return next((part for part in parts if part.has(role)), None)


def check(parts: Sequence[Part]) -> None:
    """Raise `PolicyError` or `BudgetError` unless these parts make sense together, in this order."""
    name = "+".join(part.name for part in parts)
    if len(parts) < 2:
        raise PolicyError(f"policy '{name}': a composition has two parts or more")
    for part in parts:
        if not any(part.has(role) for role in ROLES):
            raise PolicyError(f"policy '{name}': '{part.name}' does nothing to the cache; leave it out")
    for role in ROLES:
        twice = [part.name for part in parts if part.has(role)]
        if len(twice) > 1:
            raise PolicyError(f"policy '{name}': {' and '.join(twice)} both {role}; one part may")
    evictor, encoder, selector = (of_role(parts, role) for role in ROLES)
    if evictor and encoder:
        _check_encoding(name, parts, evictor, encoder)
    if evictor and selector and selector.policy.writes_summarize:
        raise PolicyError(
            f"policy '{name}': {selector.name} describes blocks of consecutive tokens, and {evictor.name} makes holes"
        )
    without = [part.name for part in parts if part.takes_the_arms]
    if len(without) > 1:
        raise BudgetError(
            f"policy '{name}': {' and '.join(without)} both take a budget; give one its own, "
            f"e.g. {without[0]}({_example(parts, without[0])})"
        )


def _check_encoding(name: str, parts: Sequence[Part], evictor: Part, encoder: Part) -> None:
    if parts.index(encoder) < parts.index(evictor):
        raise PolicyError(
            f"policy '{name}': {evictor.name} would evict what {encoder.name} has encoded; "
            f"write {evictor.name}+{encoder.name}"
        )
    if evictor.policy.decides_at(*LATE):
        raise PolicyError(
            f"policy '{name}': {evictor.name} evicts while decoding, from what {encoder.name} has encoded by then, "
            "and a code is freed only as a whole"
        )
    if Effect.MERGE in evictor.policy.card.effects and encoder.policy.card.evidence:
        raise PolicyError(
            f"policy '{name}': {encoder.name} looks at {', '.join(sorted(encoder.policy.card.evidence))}, and what "
            f"{evictor.name} merges is written only afterwards"
        )


def _example(parts: Sequence[Part], name: str) -> str:
    units = next(part.policy.card.budgets for part in parts if part.name == name)
    return "read=0.1" if "read_tokens" in units else "window=0.5" if "per_window" in units else "keep=0.5"


def composed_card(parts: Sequence[Part]) -> Card:
    """What the parts do together: unions, and each part's words with its name before them."""
    cards = [part.policy.card for part in parts]
    return Card(
        name="+".join(card.name for card in cards),
        effects=frozenset[Effect]().union(*(card.effects for card in cards)),
        source="; ".join(f"{card.name}: {card.source}" for card in cards),
        summary="; then ".join(card.summary for card in cards),
        when=frozenset[When]().union(*(card.when for card in cards)),
        unit=", ".join(dict.fromkeys(card.unit for card in cards)),
        evidence=frozenset[Evidence]().union(*(card.evidence for card in cards)),
        acts_on=frozenset[str]().union(*(card.acts_on for card in cards)),
        approximates=frozenset().union(*(card.approximates for card in cards)),
        prefill=_prefill(parts),
        budgets=_budgets(parts),
        taps=frozenset[int]().union(*(card.taps for card in cards)),
        reference=any(card.reference for card in cards),
        external=any(card.external for card in cards),
        reconstruction=any(card.reconstruction for card in cards),
        gaps=_named(parts, "gaps"),
        deviations=_named(parts, "deviations"),
        limits=(*_named(parts, "limits"), *_together(parts)),
    )


def _named(parts: Sequence[Part], field: str) -> tuple[str, ...]:
    return tuple(f"{part.name}: {text}" for part in parts for text in getattr(part.policy.card, field))


def _prefill(parts: Sequence[Part]) -> Prefill:
    """A prefill of its own where a part has one, and no part would evict what it has encoded."""
    own = any(part.policy.card.prefill is Prefill.OWN for part in parts)
    return Prefill.OWN if own and of_role(parts, "evict") is None else Prefill.SHARED_DENSE


def _budgets(parts: Sequence[Part]) -> frozenset[str]:
    """The units of the part that brings no budget; bytes too, where the share to keep follows from the code's size."""
    found = frozenset[str]().union(*(part.policy.card.budgets for part in parts if part.takes_the_arms))
    return found | {"bytes"} if sized_by_bytes(parts) else found


def sized_by_bytes(parts: Sequence[Part]) -> bool:
    """Whether one number of kept tokens makes evictor and encoder together fit into bytes."""
    evictor, encoder = of_role(parts, "evict"), of_role(parts, "encode")
    if evictor is None or encoder is None or not evictor.takes_the_arms:
        return False
    card = evictor.policy.card
    return "keep_tokens" in card.budgets and "bytes" not in card.budgets and Effect.MERGE not in card.effects


def _together(parts: Sequence[Part]) -> tuple[str, ...]:
    """What the parts do to each other."""
    evictor, encoder, selector = (of_role(parts, role) for role in ROLES)
    found = []
    if evictor and encoder:
        found.append(f"{encoder.name} sees only what {evictor.name} has left")
    if encoder and selector:
        found.append("attention is timed over all codes, chosen or not: an upper bound")
    if encoder and selector and selector.policy.writes_summarize:
        found.append(
            f"{selector.name} describes a block as it lies when it fills: decoded keys of what {encoder.name} has "
            "encoded by then, raw keys of what it encodes later"
        )
    return tuple(found)
