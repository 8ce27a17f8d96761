"""Which arms have nothing to do on a trace: left out by name, never reported as lossless."""

from __future__ import annotations

from collections.abc import Sequence

from kvassay.cache.ops import group_specs
from kvassay.layout.model import Layout
from kvassay.policy import acting
from kvassay.policy.answers import of_arm
from kvassay.policy.base import Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.checks import too_long
from kvassay.replay.arms import Arm
from kvassay.trace.reader import Trace


def not_applicable(trace: Trace, arms: Sequence[Arm], block_size: int) -> dict[str, str]:
    """Label and reason of every arm whose policy cannot act on this model, or on this context and its questions.

    block_size: slots per block of the smallest group
    Raises `BudgetError`, with the arm's name, for a budget that leaves nothing of this context.
    """
    context = trace.prefix.tokens
    longest = context + max((branch.tokens for branch in trace.branches), default=0)
    reasons = {}
    for arm in arms:
        reason = refusal(arm.policy, trace.layout, context, block_size)
        if reason is None:
            with of_arm(arm.label):
                allowance = Allowance.resolve(arm.budget, context, arm.protection)
                reason = arm.policy.not_applicable(context, longest, allowance)
        if reason is not None:
            reasons[arm.label] = reason
    return reasons


def refusal(policy: Policy, layout: Layout, context: int, block_size: int) -> str | None:
    """Why a policy has no place in a model, in blocks of that size, or at that length; None if it has one."""
    return acting.refusal(policy, layout) or _long(policy, layout, context) or _blocks(policy, layout, block_size)


def _long(policy: Policy, layout: Layout, context: int) -> str | None:
    mine = (layer for layer in layout.storing if acting.may_act(policy.card, layer))
    return next(filter(None, (too_long(policy, layer, context) for layer in mine)), None)


def _blocks(policy: Policy, layout: Layout, block_size: int) -> str | None:
    """Where cache blocks are larger than the blocks a policy reads, so that all of a model's weigh the same."""
    if policy.read_block == 1:
        return None
    for group in group_specs(layout, block_size):
        mine = [index for index in group.layers if acting.may_act(policy.card, layout.layers[index])]
        if mine and policy.read_block % group.block_size:
            return (
                f"it reads blocks of {policy.read_block} tokens, the cache's blocks hold {group.block_size} in "
                f"{len(mine)} of {len(layout.storing)} layers: give block={group.block_size} or a multiple"
            )
    return None
