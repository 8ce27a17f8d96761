"""Arms: a policy with its parameters, a budget, what is protected, and how it is prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvassay.errors import BudgetError, ExperimentError, PolicyError
from kvassay.policy.base import Policy
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.card import Prefill
from kvassay.policy.registry import make


@dataclass(frozen=True)
class Arm:
    """One arm of an experiment. Arms of one replay differ in policy, budget and prefill mode alone."""

    policy: Policy
    budget: Budget | None = None
    protection: Protection = field(default_factory=Protection)
    prefill: Prefill = Prefill.SHARED_DENSE
    again: bool = False
    """The same arm once more in another batch split: by halves of what comes, up to the end of a block (dense')."""

    def __post_init__(self) -> None:
        card = self.policy.card
        if self.budget is None and card.budgets:
            raise BudgetError(f"policy '{card.name}' needs a budget in {', '.join(sorted(card.budgets))}")
        if self.budget is not None and self.budget.unit not in card.budgets:
            allowed = ", ".join(sorted(card.budgets)) or "none: its size is a parameter"
            raise BudgetError(f"policy '{card.name}' takes no {self.budget.unit} budget (takes {allowed})")
        if reason := self.policy.refuses(self.prefill):
            raise PolicyError(f"policy '{card.name}' {reason}")

    @property
    def label(self) -> str:
        """Unique name within a replay, e.g. ``snapkv keep=0.25``."""
        parts = [self.policy.label + ("'" if self.again else "")]
        if self.budget is not None:
            parts.append(self.budget.label)
        if self.prefill is Prefill.OWN:
            parts.append("own-prefill")
        return " ".join(parts)


def grid(policies: Sequence[Policy], budgets: Sequence[Budget], protection: Protection) -> list[Arm]:
    """Every policy at every budget, in the unit the policy takes (keep becomes read for select policies).

    Policies without a budget appear once. A budget in a unit that a policy cannot honour is an error.
    """
    arms: list[Arm] = []
    for policy in policies:
        units = policy.card.budgets
        if not units:
            arms.append(Arm(policy, None, protection))
            continue
        for budget in budgets:
            unit = budget.unit
            if unit == "keep_tokens" and unit not in units and "read_tokens" in units:
                unit = "read_tokens"
            arms.append(Arm(policy, Budget(unit, budget.amount), protection))
    labels = [arm.label for arm in arms]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise ExperimentError(f"arms appear twice: {', '.join(twice)}")
    return arms


ALWAYS_ON = ("dense", "random", "recency", "streaming", "exact_mass", "hindsight", "fp8", "paged-eviction")


def always_on(budgets: Sequence[Budget], protection: Protection) -> list[Arm]:
    """The arms that run beside every candidate; a policy that loses to them deserves nothing.

    `dense'` is dense again in another batch split: its distance to `dense` is the noise of the machine.
    """
    dense = Arm(make("dense"), None, protection)
    again = Arm(make("dense"), None, protection, again=True)
    return [dense, again, *grid([make(name) for name in ALWAYS_ON[1:]], budgets, protection)]
