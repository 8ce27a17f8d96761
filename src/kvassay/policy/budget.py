"""How much a policy may keep or read, and what is protected: set by the experiment, equal for all arms."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvassay.errors import BudgetError, did_you_mean

UNITS = {"keep": "keep_tokens", "read": "read_tokens", "bytes": "bytes", "window": "per_window"}


@dataclass(frozen=True)
class Protection:
    """The first `sink` and last `recent` tokens are never evicted; they count inside the budget."""

    sink: int = 4
    recent: int = 32

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise BudgetError(f"protection sink={self.sink}, recent={self.recent}: both must be 0 or more")


@dataclass(frozen=True)
class Budget:
    """Exactly one unit and an amount: a fraction in (0, 1] of the context, or a whole number of the unit."""

    unit: str
    amount: float

    def __post_init__(self) -> None:
        if self.unit not in UNITS.values():
            raise BudgetError(f"budget unit '{self.unit}' is unknown{did_you_mean(self.unit, UNITS.values())}")
        if not math.isfinite(self.amount) or self.amount <= 0:
            raise BudgetError(f"budget {self.label}: must be more than 0")
        if self.amount > 1 and self.amount != int(self.amount):
            raise BudgetError(f"budget {self.label}: a fraction in (0, 1] or a whole number of tokens")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse ``keep=0.25``, ``keep=512``, ``read=0.1``, ``bytes=0.25``; a bare number means ``keep``.

        A number with a decimal point is a fraction of the context, one without is a count.
        """
        match = re.fullmatch(r"\s*(?:(\w+)\s*=\s*)?([0-9.eE+-]+)\s*", text)
        if not match:
            raise BudgetError(f"budget '{text}' is not of the form keep=0.25, keep=512, read=0.1 or bytes=0.5")
        key, number = match.group(1) or "keep", match.group(2)
        unit = UNITS.get(key, key)
        if unit not in UNITS.values():
            raise BudgetError(f"budget '{text}': unit '{key}' is unknown{did_you_mean(key, UNITS)}")
        try:
            amount = float(number)
        except ValueError:
            raise BudgetError(f"budget '{text}': '{number}' is not a number") from None
        if amount == 1 and "." not in number:
            raise BudgetError(f"budget '{text}': write {key}=1.0 for all of the context; 1 token is too few")
        return cls(unit, amount)

    @property
    def label(self) -> str:
        """Short text form, as `parse` reads it."""
        key = next((k for k, v in UNITS.items() if v == self.unit), self.unit)
        return f"{key}={self.amount:g}" if self.amount != 1 else f"{key}=1.0"

    def tokens(self, context: int) -> int:
        """Tokens per KV head for a context of that many tokens; `BudgetError` if that leaves none.

        A `bytes` budget is a fraction of dense's bytes, and so of its tokens.
        """
        if self.unit == "bytes" and self.amount > 1:
            raise BudgetError(f"budget {self.label}: bytes are given as a fraction of dense's, e.g. bytes=0.25")
        count = math.floor(self.amount * context + 1e-9) if self.amount <= 1 else int(self.amount)
        if count < 1:
            raise BudgetError(f"budget {self.label} of {context} tokens leaves none; the least is 1 token")
        return count


@dataclass(frozen=True)
class Allowance:
    """A budget resolved for one context: fixed at compression time, whatever is generated later.

    `tokens` is the mean number of tokens per KV head and layer that may be kept (or read); protection is
    inside it. `context` is the length it was resolved for.
    """

    budget: Budget | None
    tokens: int
    context: int
    protection: Protection

    @classmethod
    def resolve(cls, budget: Budget | None, context: int, protection: Protection) -> Allowance:
        """Resolve a budget; `None` (a method without a budget) allows the whole context."""
        tokens = context if budget is None else budget.tokens(context)
        needed = protection.sink + protection.recent
        if budget is not None and tokens < context and tokens <= needed:
            raise BudgetError(
                f"budget {budget.label} gives {tokens} of {context} tokens, not more than the {needed} protected "
                f"(sink {protection.sink} + recent {protection.recent}); raise it or protect fewer"
            )
        return cls(budget, tokens, context, protection)

    def spares(self, length: int) -> bool:
        """True if a sequence of that length is left as it is: a budget of all of it, or of at least as many tokens.

        Never without a budget: such methods decide themselves.
        """
        if self.budget is None:
            return False
        counts_tokens = self.budget.unit in ("keep_tokens", "read_tokens")
        return self.budget.amount == 1 or (counts_tokens and self.tokens >= length)

    @property
    def covers_all(self) -> bool:
        """True if nothing needs to go."""
        return self.tokens >= self.context
