"""What is wrong, or odd, with the results of a trace set: findings by name, for reports and gates.

`invalid` findings forbid a verdict, `suspect` ones ask for a look before anybody believes the numbers, `note`
explains what might else be taken for a fault. Checks read rows, cells and recorded facts; they replay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvassay.measure.result import BranchResult
from kvassay.policy.budget import Budget, Protection

Severity = Literal["invalid", "suspect", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing a check found, about one arm or (`arm` None) about several or all of the trace set."""

    name: str
    """Which check fired: a key of `NAMES`."""
    severity: Severity
    arm: str | None
    message: str
    """One line with the numbers; does not repeat name, severity or arm."""
    among: tuple[str, ...] = ()
    """The arms it is about where these are some of the trace set's (`arm` None); empty: all."""

    def concerns(self, arm: str) -> bool:
        """Whether it says something of this arm."""
        if self.arm is not None:
            return arm == self.arm
        return not self.among or arm in self.among


NAMES: dict[str, str] = {
    "question_visible": "an arm could see the question while compressing, and others could not",
    "other_prefill": "an arm was prefilled in another way than the arms it is compared with",
    "future_query": "what an arm kept depends on a question asked later",
    "bos": "the context does not begin with exactly the special tokens that the tokenizer puts there",
    "answer_cut": "a reply ends before the protocol and the model end it",
    "denominator": "a fraction is not its numerator over dense's number",
    "budget_base": "what an arm came to is far from its budget",
    "beats_dense": "an arm is better than dense beyond noise",
    "identical_arms": "two arms gave the very same answers",
    "no_effect": "a parameter or budget was varied and nothing changed",
    "underpowered": "too few contexts to tell anything from noise",
}
"""Every finding by name, with what it means."""

LEAKS = ("question_visible", "future_query", "other_prefill")
"""Findings that would explain an arm better than dense."""


@dataclass(frozen=True)
class ArmFacts:
    """What was asked of an arm, beside what its rows say it did."""

    label: str
    policy: str
    """The card's name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    own_prefill: bool = False
    """Declared: prefilled with the policy in the loop."""
    reference: bool = False
    """A yardstick that may see what no engine could."""
    evicts_only: bool = False
    """Whether what it holds is whole tokens as the model wrote them, and nothing else of size."""
    decides_later: bool = False
    """Whether it edits the cache while decoding, so that what it frees depends on what comes."""


@dataclass(frozen=True)
class ContextFacts:
    """How a recorded context begins."""

    trace: str
    first_ids: tuple[int, ...]
    """Its first token ids, a few more than any opening has."""
    opening: tuple[int, ...]
    """What the model's tokenizer puts before a text."""
    bos: int | None
    """Its beginning-of-sequence token."""


@dataclass(frozen=True)
class SetFacts:
    """What was asked of a trace set."""

    arms: Mapping[str, ArmFacts]
    """By label."""
    contexts: Sequence[ContextFacts]
    query_aware: bool
    """Whether the experiment put the question into the context."""
    free_tokens: int
    """Tokens the protocol generates per question."""
    block_size: int
    protection: Protection


Rows = Mapping[str, Mapping[tuple[str, int], BranchResult]]
"""Rows by arm, then by question (trace, branch)."""


def by_arm(rows: Sequence[BranchResult]) -> Rows:
    """Rows by arm and question."""
    found: dict[str, dict[tuple[str, int], BranchResult]] = {}
    for row in rows:
        found.setdefault(row.arm, {})[row.trace, row.branch] = row
    return found


def some(keys: Sequence[tuple[str, int]], total: int) -> str:
    """`3 of 12 questions, first t0 question 1`: where a check fired."""
    return f"{len(keys)} of {total} questions, first {keys[0][0]} question {keys[0][1]}"
