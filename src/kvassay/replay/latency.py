"""Decode time of every arm on its own cache: one token over all layers, the same kernel, interleaved rounds.

Arms are timed in turn, every round over all of them, with the caches emptied before each, so that whatever else
the machine does hits them alike. What the policy itself does per token is timed apart and charged to it. A kernel's
plan is made once per arm and not timed: an engine keeps its block tables as tokens come, and does not rebuild them.
On a GPU a round includes the launches of all layers, which an engine that captures graphs does not pay each time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvassay.errors import ExperimentError
from kvassay.kernels.device import CodeRead, DecodeKernel, LaneRead, PagedLayer, Plan, Read, kernel
from kvassay.kernels.reads import lane_reads, paged_layer
from kvassay.layout.model import Layer
from kvassay.policy.readset import ReadSet
from kvassay.record.load import LoadedModel
from kvassay.replay import asking
from kvassay.replay.arms import Arm
from kvassay.replay.calibration import fit_offline
from kvassay.replay.closed import Replay, check_replay
from kvassay.replay.compressors import keeps_entries
from kvassay.replay.indexing import Asked
from kvassay.replay.lane import Lane
from kvassay.replay.protocol import Protocol
from kvassay.replay.stepping import Recorded, policy_seconds
from kvassay.trace.reader import Trace

WARM_UP = 1
"""Rounds that are not counted."""
COLD_BYTES = 64 << 20
"""What is read before each timing, so that the arm's own cache lies in memory: twice a common last-level cache."""


@dataclass(frozen=True)
class ArmTimes:
    """One arm on one context: seconds per decoded token."""

    arm: str
    context_tokens: int
    attention: tuple[float, ...]
    """Of one token over all layers, by round."""
    policy: float
    """What the policy does per token beside it: median over rounds of choosing what to read, and its steps. Where the
    model's own index chooses, its choice is in it, dense's too."""
    read_bytes: float
    """Bytes the attention reads, as held here."""
    flops: float
    """Operations of its QK and PV products."""


@dataclass(frozen=True)
class _Call:
    """The attention of one layer."""

    index: int
    """The layer that attends, to its own cache or to the one it shares."""
    layer: PagedLayer
    q: Tensor
    """[1, q_heads, 1, k_dim], where the kernel reads it."""
    shown: Tensor
    """The same [q_heads, 1, k_dim] in main memory, as policies are shown it."""
    asked: Asked | None
    """What the model's own index is asked with, where one selects."""
    reads: LaneRead
    plan: Plan


@dataclass
class _Timed:
    """One arm under the clock."""

    lane: Lane
    kernel: DecodeKernel
    calls: list[_Call]
    steps: float
    """Seconds per token of the policy's steps."""
    attention: list[float]
    choosing: list[float]

    @property
    def selects(self) -> bool:
        """Whether something chooses what a token reads."""
        return self.lane.policy.writes_read or any(call.asked is not None for call in self.calls)


def time_arms(
    loaded: LoadedModel,
    trace: Trace,
    arms: Sequence[Arm],
    protocol: Protocol,
    rounds: int,
    calibration: Trace | None = None,
    device: str | None = None,
) -> list[ArmTimes]:
    """Time all arms on one context, in their order. No model runs, except where an arm prefills by itself.

    rounds: counted rounds; calibration: as for `replay_trace`; device: whose decode kernel is timed,
        by default that of the device where the model is, on which the caches then lie too
    Raises as `replay_trace` does, and `KernelError` if the device has no kernel.
    """
    check_replay(loaded, trace, arms, protocol)
    if keeps_entries(trace.layout):
        raise ExperimentError(f"{trace.path}: compressed entries lie outside the paged cache, so decoding is not timed")
    artefacts = fit_offline([arm.policy for arm in arms], trace, calibration, loaded.model)
    replay, recorded = Replay(loaded, trace, arms, protocol, artefacts, forks=3), Recorded(trace)
    decode = kernel(device or str(replay.cache.store.device))
    timed = [
        _prepared(replay, lane, recorded, decode) for lane in replay.forks([replay.compressed(arm) for arm in arms])
    ]
    cold = torch.ones(COLD_BYTES // 4, device=decode.place)
    with torch.inference_mode():
        for number in range(WARM_UP + rounds):
            for one in timed:
                cold.sum().item()
                _round(one, counted=number >= WARM_UP)
    return [_times(one, trace.prefix.tokens) for one in timed]


def _prepared(replay: Replay, lane: Lane, recorded: Recorded, decode: DecodeKernel) -> _Timed:
    """The lane with one more token, and what each layer's query reads."""
    steps = policy_seconds(replay.engine, lane, recorded)
    recorded.append(lane, 0)
    asking.written(lane, lane.scope)
    calls = []
    for layer in lane.cache.layout.layers:
        q = recorded.query(layer.index, 0)
        asked = recorded.asked(lane, layer.index, 0)
        chosen, _, _ = asking.select(lane, layer.index, q, asked)
        pool = paged_layer(lane.cache, layer, replay.sinks.get(layer.index))
        reads = _reads(lane, layer, chosen)
        there = q[None].to(decode.place)
        calls.append(_Call(layer.index, pool, there, q, asked, reads, decode.plan(pool, [reads], 1)))
    return _Timed(lane, decode, calls, steps, [], [])


def _reads(lane: Lane, layer: Layer, chosen: ReadSet | None) -> LaneRead:
    """What the newest token reads of a layer's cache: all of it, or the union that its query heads chose."""
    cache, seq, owner = lane.cache, lane.seq, lane.cache.layout.source(layer.index).index
    if chosen is None:
        return lane_reads(cache, seq, owner)
    data, newest = cache.stored(seq, owner), torch.tensor([cache.ledger.length(seq) - 1])
    heads, tokens = data.positions.shape
    seen = asking.seen(lane, layer.index, data, newest, chosen)
    return lane_reads(cache, seq, owner, selected=seen.view(heads, -1, tokens).any(1))


def _round(one: _Timed, *, counted: bool) -> None:
    start = time.perf_counter()
    for call in one.calls:
        call.plan.run(call.q)
    one.kernel.finish()
    attention = time.perf_counter() - start
    choosing = _choose(one) if one.selects else 0.0
    if counted:
        one.attention.append(attention)
        one.choosing.append(choosing)


def _choose(one: _Timed) -> float:
    """Seconds that the policy, or the model's own index, takes to choose what one token reads, all layers: its scan, as
    implemented here."""
    start = time.perf_counter()
    for call in one.calls:
        asking.select(one.lane, call.index, call.shown, call.asked)
    return time.perf_counter() - start


def _times(one: _Timed, context: int) -> ArmTimes:
    work = [_work(call, read) for call in one.calls for read in call.reads]
    return ArmTimes(
        arm=one.lane.arm.label,
        context_tokens=context,
        attention=tuple(one.attention),
        policy=one.steps + median(one.choosing),
        read_bytes=sum(count for count, _ in work),
        flops=sum(flops for _, flops in work),
    )


def _work(call: _Call, read: Read) -> tuple[float, float]:
    """Bytes that one query reads of this, and the operations of its products."""
    kv_heads, k_dim = call.layer.keys.shape[1], call.layer.keys.shape[-1]
    elements = k_dim + call.layer.values.shape[-1]
    if isinstance(read, CodeRead):
        held = kv_heads * read.positions.shape[-1]
        tokens = float(held if read.seen is None else read.seen.expand(-1, kv_heads, -1).sum())
        payload = (read.keys.nbytes + read.values.nbytes) * (tokens / held if held else 0.0)
    else:
        tokens = float((read.last if read.first is None else read.last - read.first).sum())
        payload = tokens * elements * 4
    biases = sum(bias is not None for bias in (read.bias, read.inner_bias))
    group = call.q.shape[1] // kv_heads
    return payload + biases * 4 * tokens, tokens * group * 2.0 * elements
