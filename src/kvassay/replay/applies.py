"""Which arms have nothing to do on a trace: left out by name, never reported as lossless."""

from __future__ import annotations

from collections.abc import Sequence

from kvassay.policy.acting import refusal
from kvassay.policy.budget import Allowance
from kvassay.replay.arms import Arm
from kvassay.trace.reader import Trace


def not_applicable(trace: Trace, arms: Sequence[Arm]) -> dict[str, str]:
    """Label and reason of every arm whose policy cannot act on this model, or on this context and its questions."""
    context = trace.prefix.tokens
    longest = context + max((branch.tokens for branch in trace.branches), default=0)
    reasons = {}
    for arm in arms:
        reason = refusal(arm.policy, trace.layout)
        if reason is None:
            allowance = Allowance.resolve(arm.budget, context, arm.protection)
            reason = arm.policy.not_applicable(context, longest, allowance)
        if reason is not None:
            reasons[arm.label] = reason
    return reasons
