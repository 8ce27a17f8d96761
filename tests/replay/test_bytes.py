"""What a lane holds, by value."""

from __future__ import annotations

import pytest

from kvassay.policy.base import Policy
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.compose import Composed
from kvassay.policy.composition import Part
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.bytes import held
from kvassay.replay.lane import Lane
from tests.replay.watch import Watch
from tests.replay.worlds import World

RING = 8 * 2 * 4 * 16 * 2
"""Bytes of the last 8 queries of 2 full layers with 4 query heads of 16 in bfloat16: 2,048."""
ROW = (16 + 16) * 2
"""Bytes of a token's key and value in one KV head."""
KARA = make("kara", interval=8)


@pytest.mark.parametrize(
    ("policy", "unit", "ring"),
    [
        (KARA, "per_window", RING),
        (make("kara", interval=24), "per_window", 3 * RING),  # full or not: an engine sets it aside
        (Composed((Part(KARA), Part(make("exact_mass"), Budget("read_tokens", 0.5)))), "per_window", RING),
        (make("snapkv", window=8), "keep_tokens", 0),  # asks for queries only once, after the prompt
    ],
    ids=lambda value: value.label if isinstance(value, Policy) else str(value),
)
def test_the_ring_of_queries_is_held_as_long_as_the_policy_decides_while_decoding(
    gemma: World, watch: Watch, policy: Policy, unit: str, ring: int
) -> None:
    arm, totals = Arm(policy, Budget(unit, 0.5), Protection(0, 0)), set[float]()

    def each(lane: Lane) -> None:
        tokens = sum(int((lane.cache.layer(lane.seq, layer).positions >= 0).sum()) for layer in lane.layers)
        side = sum(t.numel() * t.element_size() for layer in lane.side.values() for t in layer.values())
        own = ring if lane.arm == arm else 0
        assert held(lane).total == tokens * ROW + side + own and held(lane).state == own
        if own:
            totals.add(held(lane).total)

    watch.each = each
    rows = watch.run(gemma, [Arm(make("dense"), None, Protection(0, 0)), arm])
    assert ring == 0 or {row.retained_bytes for row in rows if row.arm == arm.label} <= totals
