"""Timing decode attention: what is timed, what it reads, and what a policy is charged; never how long it took."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from kvassay.errors import ExperimentError
from kvassay.kernels.device import DecodeKernel, LaneRead, PagedLayer, Plan, kernel
from kvassay.measure.cost import decode_work
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import parse
from kvassay.replay import latency
from kvassay.replay.arms import Arm
from kvassay.replay.closed import Replay
from kvassay.replay.latency import ArmTimes, time_arms
from kvassay.replay.protocol import Protocol
from kvassay.replay.stepping import Recorded, policy_seconds
from tests.replay.worlds import World

PROTECTION = Protection(2, 8)
ROUNDS = 3


def arm(name: str, budget: str | None = None, *, again: bool = False) -> Arm:
    return Arm(parse(name), Budget.parse(budget) if budget else None, PROTECTION, again=again)


DENSE = arm("dense")
KIVI = arm("kivi(group=8, residual=32)")
ARMS = (
    DENSE,
    arm("dense", again=True),
    arm("snapkv", "keep=0.25"),
    arm("quest(dense_layers=0)", "read=0.5"),
    arm("exact_mass", "read=0.5"),
    arm("paged-eviction", "keep=0.5"),
    arm("fp8"),
    KIVI,
    arm("quest(dense_layers=0, heads=q)", "read=0.5"),
    arm("quest(dense_layers=0)+fp8", "read=0.5"),
    arm("quest(dense_layers=0)+kivi(group=8, residual=32)", "read=0.5"),
)


def timed(world: World, arms: Sequence[Arm] = ARMS) -> dict[str, ArmTimes]:
    found = time_arms(world.loaded, world.trace, arms, Protocol(), ROUNDS)
    assert [one.arm for one in found] == [one.label for one in arms]
    return {one.arm: one for one in found}


@pytest.fixture(scope="module")
def llama_times(llama: World) -> dict[str, ArmTimes]:
    return timed(llama)


def test_every_arm_is_timed_in_every_counted_round(llama_times: dict[str, ArmTimes]) -> None:
    for one in llama_times.values():
        assert len(one.attention) == ROUNDS and min(one.attention) > 0
        assert one.context_tokens == 404


@pytest.mark.parametrize("world", ["llama", "gemma", "gemma_mqa"], indirect=True)
def test_dense_reads_what_the_cost_model_says_of_one_more_token(world: World) -> None:
    found = timed(world, [DENSE])["dense"]
    # The CPU holds slots in float32; the query's own token is among those it reads.
    work = decode_work(world.trace.layout, world.trace.prefix.tokens + 1, "float32")
    assert found.read_bytes == sum(one.bytes for one in work)
    assert found.flops == sum(one.flops for one in work)


def test_bytes_and_operations_follow_what_an_arm_reads(llama_times: dict[str, ArmTimes]) -> None:
    dense = llama_times["dense"]
    per_token = dense.read_bytes / 405
    assert llama_times["snapkv keep=0.25"].read_bytes == (101 + 1) * per_token
    assert llama_times["snapkv keep=0.25"].flops / dense.flops == pytest.approx(102 / 405)
    assert llama_times["exact_mass read=0.5"].read_bytes <= (202 + 1) * per_token
    # 12 pages of 16 are what half the tokens come to; the last one holds 5 so far, the query's own among them.
    assert llama_times["quest(dense_layers=0) read=0.5"].read_bytes == (11 * 16 + 5) * per_token
    for coded in ("fp8", KIVI.label):
        assert llama_times[coded].flops == dense.flops
        assert llama_times[coded].read_bytes < dense.read_bytes
    # One byte an element where dense has four, the query's own token too: it is encoded as it is written.
    assert llama_times["fp8"].read_bytes == 405 / 4 * per_token


def test_a_kv_head_reads_what_any_of_its_query_heads_chose(llama_times: dict[str, ArmTimes]) -> None:
    together, apart = (
        llama_times[f"quest({given}) read=0.5"] for given in ("dense_layers=0", "dense_layers=0, heads=q")
    )
    assert together.read_bytes < apart.read_bytes <= 2 * together.read_bytes  # two query heads to each


def test_a_selection_over_codes_reads_what_is_selected(llama_times: dict[str, ArmTimes]) -> None:
    plain, *_, codes, some = (one for name, one in llama_times.items() if name.startswith("quest"))
    assert codes.read_bytes == plain.read_bytes / 4  # every token lies in codes, the query's own too
    assert codes.flops == plain.flops == some.flops
    assert codes.read_bytes < some.read_bytes < plain.read_bytes  # kivi keeps the newest tokens as they were written


def test_only_what_a_policy_does_is_charged_to_it(llama_times: dict[str, ArmTimes]) -> None:
    idle = {"dense", "dense'", "snapkv keep=0.25"}
    assert {name for name, one in llama_times.items() if one.policy == 0} == idle


def test_a_scan_is_charged_at_every_round(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "policy_seconds", lambda *_: 0.25)
    monkeypatch.setattr(latency, "_choose", lambda one: 2.0)
    found = timed(llama, [DENSE, arm("exact_mass", "read=0.5")])
    assert found["exact_mass read=0.5"].policy == 2.25
    assert found["dense"].policy == 0.25  # no scan of its own


def test_rounds_are_interleaved_and_the_first_does_not_count(llama: World, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    class Counting(DecodeKernel):
        def __init__(self, inner: DecodeKernel) -> None:
            self.inner = inner

        def plan(self, layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> Plan:
            tokens = sum(int(read.last.sum()) for read in lanes[0])  # type: ignore[union-attr]
            return Counted(self.inner.plan(layer, lanes, queries), tokens)

    class Counted:
        def __init__(self, inner: Plan, tokens: int) -> None:
            self.inner, self.tokens = inner, tokens

        def run(self, q: Tensor) -> Tensor:
            order.append(self.tokens)
            return self.inner.run(q)

    monkeypatch.setattr(latency, "kernel", lambda device: Counting(kernel(device)))
    timed(llama, [DENSE, arm("snapkv", "keep=0.25")])
    layers, heads = 4, 2
    per_round = [405 * heads] * layers + [102 * heads] * layers
    assert order == per_round * (1 + ROUNDS)


def test_steps_leave_the_lane_as_it_was(llama: World) -> None:
    replay = Replay(llama.loaded, llama.trace, [DENSE, KIVI], Protocol(), forks=3)
    (lane,) = replay.forks([replay.compressed(KIVI)])
    length, seconds, blocks = lane.length, lane.seconds, replay.cache.ledger.table(lane.seq, 0)
    assert policy_seconds(replay.engine, lane, Recorded(llama.trace)) > 0
    assert (lane.length, lane.seconds, replay.cache.ledger.table(lane.seq, 0)) == (length, seconds, blocks)
    replay.cache.check()


def test_dense_must_be_among_the_arms(llama: World) -> None:
    with pytest.raises(ExperimentError, match="every replay needs the arm 'dense'"):
        time_arms(llama.loaded, llama.trace, [arm("knorm", "keep=0.5")], Protocol(), ROUNDS)
