"""One layer in the open loop, one KV head at a time: what long contexts take, in the memory of one head.

Attention and eviction know no other KV head than their own, so a layer is replayed as so many layers of one. Policies
whose answer does depend on other heads (one set for all of them, a shared budget) are shown their scores alone; what
they decide is dealt out to the heads. Cache, edits and policies' questions are those of the other loops.

Policies that decide again while decoding decide here once, after prefill.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvassay.cache.edits import Decision
from kvassay.layout.model import Layout
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.views import CacheView, LayerView, Meter
from kvassay.replay import asking
from kvassay.replay.arms import Arm
from kvassay.replay.onehead import ArmRun, Clock, LayerSource, OneHead, Outcome, kv_of
from kvassay.replay.protocol import Protocol
from kvassay.replay.whole import AllHeads

WINDOW = 128
"""Last queries of the context that policies may be shown, unless one needs more."""


def replay_heads(
    source: LayerSource,
    layout: Layout,
    arms: Sequence[Arm],
    protocol: Protocol,
    progress: Callable[[str], None] = lambda message: None,
    clock: Clock = time.perf_counter,
) -> list[Outcome]:
    """Replay one layer of `layout` under all arms, in the memory of one KV head; in the order of `arms`.

    clock: what the seconds are taken with
    Raises `PolicyError` for an arm that `replay.limits.refusal` says no to, and what the policies raise.
    """
    runs = [
        ArmRun(
            arm,
            Allowance.resolve(arm.budget, source.context, arm.protection),
            Memory(rng=torch.Generator().manual_seed(protocol.seed)),
            Outcome(arm),
        )
        for arm in arms
    ]
    together = [run for run in runs if _together(run.arm.policy)]
    for number, run in enumerate(together):
        progress(f"decide for all heads {number + 1}/{len(together)}: {run.arm.label}")
        run.decision = _decided_together(source, run, layout, clock)
    for head in range(kv_of(source.layer).kv_heads):
        progress(f"KV head {head + 1}/{kv_of(source.layer).kv_heads}")
        OneHead(source, layout, protocol, head, _window(arms), clock).replay(runs)
        gc.collect()
    return [run.outcome for run in runs]


def _window(arms: Sequence[Arm]) -> int:
    return max([WINDOW, *(arm.policy.queries_needed for arm in arms)])


def _together(policy: Policy) -> bool:
    """Whether a policy decides for all KV heads at once."""
    asked = {"score", "decide"} if policy.writes_score else {"decide"}
    return policy.writes_decide and not asked <= policy.per_head


def _decided_together(source: LayerSource, run: ArmRun, layout: Layout, clock: Clock) -> Decision:
    """What a policy that looks at all KV heads decides: from scores made head by head, if it makes them so."""
    start, policy = clock(), run.arm.policy
    meter = Meter(layout.element_bytes)
    whole = AllHeads(source, policy.card, run.arm.protection, meter, _window([run.arm]), clock)
    shown = CacheView({source.layer.index: whole}, source.context, source.context)
    scores: dict[int, Tensor] = {}
    if policy.writes_score:
        if "score" in policy.per_head:
            heads = range(kv_of(source.layer).kv_heads)
            rows = [asking.scored(policy, _only(whole.one(head)), run.memory) for head in heads]
            scores[source.layer.index] = torch.cat([row[source.layer.index] for row in rows])
        else:
            scores = asking.scored(policy, shown, run.memory)
    decision = asking.decided(policy, shown, scores, run.memory, run.allowance)
    run.outcome.decide_seconds += clock() - start - whole.drawing
    run.outcome.touched += meter.total
    return decision


def _only(view: LayerView) -> CacheView:
    return CacheView({view.index: view}, view.length, view.length)
