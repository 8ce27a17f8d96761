"""The open loop: policies screened on a trace's own queries, without a model.

    1. per arm, one layer of the context after another is shown to the policy; then it decides once for all layers
    2. layer by layer, every arm's edits are carried out in a paged cache of that layer, and the recorded queries
       of each branch attend to what is retained and to the branch's own recorded keys and values

Each output is compared with dense attention of the same queries, so errors do not propagate from layer to layer
or from token to token. Cache, edits and policies' questions are those of the closed loop. Memory holds one layer
of the context, and what an arm's decision says of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvassay.cache.data import LayerData, Stored
from kvassay.cache.edits import Decision
from kvassay.cache.ops import group_specs
from kvassay.errors import ExperimentError, PolicyError
from kvassay.kernels.reference import attend, attention_weights
from kvassay.measure.fidelity import Deviation, retained_share
from kvassay.measure.result import LayerFidelity
from kvassay.policy import readset
from kvassay.policy.base import Artefact, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import STEPS, Evidence, Prefill, When
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import CacheView, LayerView, Meter
from kvassay.record.entries import keeps_raw
from kvassay.replay import asking
from kvassay.replay.applies import refusal
from kvassay.replay.arms import Arm
from kvassay.replay.bytes import read_bytes
from kvassay.replay.calibration import fit_offline
from kvassay.replay.evidence import after_prefill, recorded_choice, sinks_of
from kvassay.replay.indexing import scanned_bytes
from kvassay.replay.lane import Lane, scope_of
from kvassay.replay.protocol import Protocol
from kvassay.replay.stage import BranchQueries, Stage
from kvassay.trace.reader import Branch, Segment, Trace

Progress = Callable[[str], None]
DEFAULT_PROTOCOL = Protocol()
ELEMENTS = 1 << 24
"""Attention weights [q_heads, queries, tokens] looked at together: more queries than that go in several chunks."""


def covers(policy: Policy, prefill: Prefill = Prefill.SHARED_DENSE, *, calibrated: bool = False) -> str | None:
    """Why the open loop cannot replay this policy, or None if it can.

    calibrated: there is a calibration trace
    """
    late = {moment for moment in STEPS if policy.decides_at(moment)}
    if late:
        return f"decides over all layers again while decoding ({', '.join(sorted(late))}); one layer is held at a time"
    if policy.writes_observe:
        return "carries state from step to step over all layers; one layer is held at a time"
    if When.OFFLINE in policy.card.when and not calibrated:
        return "learns offline, so a calibration trace of other text is needed"
    if Evidence.WEIGHTS in policy.card.evidence:
        return "learns from the model's weights, which takes the model"
    if prefill is Prefill.OWN:
        return "prefills with the policy in the loop, which takes the model"
    return None


def left_out(trace: Trace, arms: Sequence[Arm], protocol: Protocol, *, calibrated: bool) -> dict[str, str]:
    """Label of every arm that the open loop cannot replay on this trace, and why: the model and its length included."""
    found = {}
    for arm in arms:
        reason = refusal(arm.policy, trace.layout, trace.prefix.tokens, protocol.block_size)
        reason = f"has no place here; {reason}" if reason else covers(arm.policy, arm.prefill, calibrated=calibrated)
        if reason is not None:
            found[arm.label] = reason
    return found


def open_loop(
    trace: Trace,
    arms: Sequence[Arm],
    protocol: Protocol = DEFAULT_PROTOCOL,
    progress: Progress = lambda message: None,
    *,
    calibration: Trace | None = None,
) -> list[LayerFidelity]:
    """Screen arms on one trace; one row per (branch, arm, layer), in that order.

    calibration: a trace of other text, which policies that learn offline are fitted on
    Raises `PolicyError` for an arm of `left_out`, `ExperimentError` if the trace has no branches,
    and whatever the policies' evidence and budgets raise in the closed loop.
    """
    for label, reason in left_out(trace, arms, protocol, calibrated=calibration is not None).items():
        raise PolicyError(f"arm '{label}' cannot run in the open loop: its policy {reason}")
    if not trace.branches:
        raise ExperimentError(f"{trace.path}: has no branches, so there are no queries to replay")
    artefacts = fit_offline([arm.policy for arm in arms], trace, calibration)
    return _OpenLoop(trace, protocol, artefacts).run(arms, progress)


class OutputError(NamedTuple):
    """How well dense attention from the trace reproduces what the model's own attention gave."""

    segment: str
    """`prefix` or `branch_000`, ..."""
    layer: int
    error: float
    """Largest deviation / largest magnitude of the recorded output of that layer and segment."""


def output_errors(trace: Trace, protocol: Protocol = DEFAULT_PROTOCOL) -> list[OutputError]:
    """Replay dense against the recorded `output` taps: every layer and segment that has one."""
    taps = {tap.layer: tap for tap in trace.header.taps if tap.kind == "output"}
    loop, found = _OpenLoop(trace, protocol), []
    for owner in trace.layout.storing:
        stage = loop.stage(owner.index)
        for reader in (layer for layer in stage.readers if layer in taps):
            for segment in trace.segments:
                first = max(segment.q_start, taps[reader].first, segment.start)
                if first < segment.start + segment.tokens:
                    recorded = segment.tap(taps[reader].name).transpose(0, 1).float()
                    worst = max(loop.recorded_deviations(stage, reader, segment, first, recorded))
                    found.append(OutputError(segment.name, reader, worst / float(recorded.abs().max())))
    return sorted(found)


@dataclass
class _Run:
    """One arm's policy at work, and what it decided for all layers."""

    arm: Arm
    allowance: Allowance
    memory: Memory
    scope: frozenset[int]
    decision: Decision = field(default_factory=Decision)


class _OpenLoop:
    """One trace under way, of which one layer is in memory."""

    def __init__(self, trace: Trace, protocol: Protocol, artefacts: Mapping[str, Artefact] | None = None) -> None:
        self.trace, self.protocol, self.artefacts = trace, protocol, artefacts or {}
        groups = group_specs(trace.layout, protocol.block_size)
        self.group_of = {layer: group for group in groups for layer in group.layers}
        self.sinks = sinks_of(trace)
        self._stage: Stage | None = None

    def run(self, arms: Sequence[Arm], progress: Progress) -> list[LayerFidelity]:
        """All arms over all layers."""
        runs = []
        for arm in arms:
            progress(f"decide {arm.label}")
            runs.append(self._decided(arm))
        rows: list[tuple[int, LayerFidelity]] = []
        storing = self.trace.layout.storing
        for number, owner in enumerate(storing):
            progress(f"layer {number + 1}/{len(storing)}")
            stage = self.stage(owner.index)
            for order, run in enumerate(runs):
                rows += [(order, row) for row in self._compared(stage, run)]
        return [row for _, row in sorted(rows, key=lambda x: (x[1].branch, x[0], x[1].layer))]

    def stage(self, layer: int) -> Stage:
        """The layer in memory, in place of the one that was."""
        if self._stage is None or self._stage.layer != layer:
            self._stage = None
            self._stage = Stage(self.trace, self.group_of[layer], layer)
        return self._stage

    # -- first pass: decide ---------------------------------------------------------------------------

    def _decided(self, arm: Arm) -> _Run:
        policy, layout = arm.policy, self.trace.layout
        run = _Run(
            arm,
            Allowance.resolve(arm.budget, self.trace.prefix.tokens, arm.protection),
            Memory(artefact=self.artefacts.get(policy.label), rng=torch.Generator().manual_seed(self.protocol.seed)),
            scope_of(layout, policy),
        )
        if policy.writes_decide and When.AFTER_PREFILL in policy.card.when:
            shown = self._shown(run)
            run.decision = asking.propose(policy, shown, run.memory, run.allowance)
            for view in shown.layers.values():
                view.forget()
        return run

    def _shown(self, run: _Run) -> CacheView:
        """All layers the policy may act on, as after prefill; touching one puts it in the place of another."""
        context, evidence = self.trace.prefix.tokens, after_prefill(self.trace)
        meter, views = Meter(self.trace.layout.element_bytes), dict[int, LayerView]()
        for layer in sorted(run.scope):
            bare = Stage(self.trace, self.group_of[layer], layer, fill=False)
            load = partial(self._load, views, layer)
            views[layer] = asking.view(self._lane(bare, run), layer, meter, evidence, load, bare=True)
        return CacheView(views, context, context)

    def _load(self, views: dict[int, LayerView], layer: int) -> LayerData:
        for other, view in views.items():
            if other != layer:
                view.forget()
        stage = self.stage(layer)
        return stage.cache.layer(stage.dense, layer)

    def _lane(self, stage: Stage, run: _Run) -> Lane:
        seq = stage.cache.fork(stage.dense)
        return Lane(run.arm, seq, stage.cache, run.allowance, run.memory, run.scope, self.sinks)

    # -- second pass: attend --------------------------------------------------------------------------

    def _compared(self, stage: Stage, run: _Run) -> Iterator[LayerFidelity]:
        """Rows of one arm in one layer and in those that read its cache."""
        lane = self._lane(stage, run)
        mine = {index: edits for index, edits in run.decision.edits.items() if index == stage.layer}
        asking.apply(lane, replace(run.decision, edits=mine))
        asking.summarize(lane)
        for number, branch in enumerate(self.trace.branches):
            for reader, deviation in self._asked(stage, lane.fork(), branch).items():
                yield LayerFidelity(
                    trace=self.trace.path.name,
                    workload=self.trace.header.recipe.name,
                    branch=number,
                    arm=run.arm.label,
                    layer=reader,
                    in_scope=stage.layer in run.scope,
                    output_error=deviation.output_error,
                    retained_mass=deviation.retained_mass,
                    read_bytes=(deviation.read + deviation.scanned) / deviation.queries,
                    scan_bytes=deviation.scanned / deviation.queries,
                    dense_bytes=deviation.dense / deviation.queries,
                    head_errors=deviation.head_errors,
                )
        lane.free()

    def _asked(self, stage: Stage, lane: Lane, branch: Branch) -> dict[int, Deviation]:
        """The branch's recorded queries under the arm and under dense, side by side; frees the lane."""
        found = {reader: Deviation() for reader in stage.readers}
        dense = stage.cache.fork(stage.dense)
        size, first = self._chunk(stage), 0
        while first < branch.tokens:
            count = min(size, lane.takes(branch.tokens - first))
            stage.append(dense, branch, first, count)
            stage.append(lane.seq, branch, first, count, lane.reuse)
            lane.reuse = None
            asking.written(lane, [stage.layer])
            for reader, deviation in found.items():
                self._compare(stage, lane, dense, BranchQueries.of(branch, reader, first, count), deviation)
            asking.summarize(lane)
            first += count
        stage.cache.free(dense)
        lane.free()
        return found

    def _compare(self, stage: Stage, lane: Lane, dense: int, asks: BranchQueries, deviation: Deviation) -> None:
        """Queries of the newest positions of both sequences."""
        q, reader, positions = asks.q, asks.reader, asks.positions
        chosen, scanned, data = self._chosen(stage, lane, asks)
        data = data or stage.cache.stored(lane.seq, stage.layer, q.shape[1])
        seen = asking.seen(lane, reader, data, positions, chosen)
        base = stage.cache.stored(dense, stage.layer, q.shape[1])
        everything = self._everything(reader, base, positions, asks.by_model)
        layer, sinks = self.trace.layout.layers[reader], self.sinks.get(reader)
        mine, whole = (
            stage.beside(held, rows, asks.branch, positions, asks.by_model)
            for held, rows in ((data, seen), (base, everything))
        )
        weights = attention_weights(q, whole.data, whole.seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks)[
            ..., : base.positions.shape[1]
        ]
        deviation.add(
            attend(q, mine.data, mine.seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks),
            attend(q, whole.data, whole.seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks),
            retained_share(weights, base, data, seen),
        )
        read, full = (
            self._read_bytes(stage, seq, at, rows)
            for seq, at, rows in ((lane.seq, data, seen), (dense, base, everything))
        )
        full += scanned_bytes(self.trace.layout, reader, positions, None) * q.shape[1]
        entries = whole.elements * self.trace.layout.element_bytes
        deviation.charge(read + entries, scanned * q.shape[1], full + entries, q.shape[1])

    def _chosen(self, stage: Stage, lane: Lane, asks: BranchQueries) -> tuple[ReadSet | None, float, Stored | None]:
        """What the arm's policy, or the model's own index, lets queries read: see `asking.select`.

        An index of another layer chose what is recorded: what the arm has left of that layer is not in memory.
        """
        selector = self.trace.layout.selector(asks.reader)
        if keeps_raw(self.trace.layout.source(asks.reader)):  # what an index chooses there are entries, not tokens
            chosen, scanned, data = asking.select(lane, asks.reader, asks.q)
            return chosen, scanned + scanned_bytes(self.trace.layout, asks.reader, asks.positions, None), data
        if selector is not None and selector.index != stage.layer:
            return asks.by_model, 0.0, None
        return asking.select(lane, asks.reader, asks.q, stage.asked(asks))

    def _read_bytes(self, stage: Stage, seq: int, data: Stored, seen: Tensor) -> float:
        """Bytes of what all queries read: of `seen` [heads, queries, tokens] the union over a KV head's query heads."""
        union = seen.view(data.positions.shape[0], -1, *seen.shape[1:]).any(1)
        return read_bytes(stage.cache, seq, stage.layer, data, union)[0]

    def _everything(self, reader: int, data: Stored, positions: Tensor, by_model: ReadSet | None) -> Tensor:
        layout = self.trace.layout
        window, q_heads = layout.source(reader).window, layout.layers[reader].q_heads
        by_model = None if keeps_raw(layout.source(reader)) else by_model
        return readset.seen(data, positions, q_heads, window=window, chosen=by_model)

    def _chunk(self, stage: Stage) -> int:
        """Queries whose attention weights fit into `ELEMENTS`."""
        layers = self.trace.layout.layers
        longest = self.trace.prefix.tokens + max((branch.tokens for branch in self.trace.branches), default=0)
        return max(1, ELEMENTS // (longest * max(layers[reader].q_heads for reader in stage.readers)))

    # -- dense against the model's own attention --------------------------------------------------------

    def recorded_deviations(
        self, stage: Stage, reader: int, segment: Segment, first: int, recorded: Tensor
    ) -> Iterator[float]:
        """Largest deviation of dense from `recorded` [q_heads, rows, v_dim], which ends with the segment, by chunk."""
        layer, end = self.trace.layout.layers[reader], segment.start + segment.tokens
        seq = stage.cache.fork(stage.dense)
        if isinstance(segment, Branch):
            stage.append(seq, segment, 0, segment.tokens)
        for at in range(first, end, size := self._chunk(stage)):
            count = min(size, end - at)
            q = segment.q(reader, at)[:count].transpose(0, 1).float()
            positions = torch.arange(at, at + count)
            data = stage.cache.stored(seq, stage.layer, end - at)
            by_model = recorded_choice(segment, reader, at)
            by_model = by_model and by_model.part(slice(count))
            seen = self._everything(reader, data, positions, by_model)
            data, seen = stage.beside(data, seen, segment, positions, by_model)[:2]
            sinks = self.sinks.get(reader)
            out = attend(q, data, seen, scale=layer.scale, softcap=layer.softcap, sinks=sinks)
            row = at - (end - recorded.shape[1])
            yield float((out - recorded[:, row : row + count]).abs().max())
        stage.cache.free(seq)
