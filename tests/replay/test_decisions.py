"""What a lane carries for its policy while decoding: as many queries as it needs, their bytes, and its own facts."""

from __future__ import annotations

import json

from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.replay.arms import Arm
from kvassay.replay.lane import LEAST_QUERIES, Lane
from tests.replay.watch import Watch
from tests.replay.worlds import World

NONE = Protection(4, 0)
DENSE = Arm(make("dense"), None, NONE)


def test_a_window_longer_than_usual_keeps_its_queries_and_pays_for_them(llama: World, watch: Watch) -> None:
    short, long = (Arm(make("kara", interval=n), Budget("per_window", 0.5), NONE) for n in (4, 20))
    kept: dict[str, int] = {}

    def each(lane: Lane) -> None:
        if lane.queries:
            kept[lane.arm.label] = lane.keep_queries

    watch.each, watch.proving = each, False
    rows = {row.arm: row for row in watch.run(llama, [DENSE, short, long]) if row.branch == 0}
    assert set(kept.values()) == {LEAST_QUERIES}
    layout = llama.trace.layout
    query = sum(layer.q_heads * layer.kv.k_dim for layer in layout.layers) * layout.element_bytes
    token = sum(layer.kv.kv_heads * 2 * layer.kv.k_dim for layer in layout.layers) * layout.element_bytes
    # 25 tokens are fed after the context: 6 windows of 4 (2 stay of each), or one of 20 (10 stay), and the rest.
    held = {4: 404 + 6 * 2 + 1, 20: 404 + 10 + 5}
    for interval, arm in ((4, short), (20, long)):
        assert rows[arm.label].retained_bytes == held[interval] * token + interval * query


def test_a_window_of_more_than_the_least_is_kept_whole() -> None:
    arm = Arm(make("kara", interval=256), Budget("per_window", 0.5), NONE)
    lane = Lane(arm, 0, None, None, None, frozenset())  # type: ignore[arg-type]
    assert lane.keep_queries == 256 and lane.deciding
    once = Lane(Arm(make("snapkv"), Budget("keep_tokens", 0.5), NONE), 0, None, None, None, frozenset())  # type: ignore[arg-type]
    assert once.keep_queries == LEAST_QUERIES and not once.deciding


def test_a_policy_reports_of_its_decision_in_every_row(llama: World, watch: Watch) -> None:
    arms = [DENSE, Arm(make("selkv", window=16), Budget("keep_tokens", 0.25), NONE)]
    watch.proving = False
    rows = watch.run(llama, arms)
    for row in rows:
        facts = json.loads(row.facts)
        if row.arm == "dense":
            assert facts == {}
        else:
            assert set(facts) == {"routed_share", "gate_mean", "floored_targets", "position_0_kept"}
            assert 0 < facts["routed_share"] < 1 and facts["position_0_kept"] == 1
