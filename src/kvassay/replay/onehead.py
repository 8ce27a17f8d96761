"""One KV head of a layer under many arms: its context in a paged cache, and dense attention beside every arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol as Interface

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.data import Stored
from kvassay.cache.edits import Decision, Evict
from kvassay.cache.ops import Bools, GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.cache.reclaim import count
from kvassay.errors import PolicyError
from kvassay.kernels.reference import attend, attention_weights, visible
from kvassay.layout.model import KV, Component, Layer, Layout
from kvassay.measure.fidelity import Deviation, retained_share
from kvassay.policy.base import Memory
from kvassay.policy.budget import Allowance
from kvassay.policy.queries import Queries
from kvassay.policy.views import CacheView, Meter
from kvassay.replay import asking
from kvassay.replay.arms import Arm
from kvassay.replay.asking import Evidences
from kvassay.replay.bytes import held_layer, read_bytes
from kvassay.replay.lane import Lane
from kvassay.replay.protocol import Protocol

Clock = Callable[[], float]
CHUNK = 1 << 14
"""Tokens written together."""
ELEMENTS = 1 << 24
"""Attention weights [q_heads, queries, tokens] of an arm looked at together."""


Known = dict[tuple[str, object], tuple[Tensor, float, float]]
"""By policy and protection: scores, bytes touched and seconds they took."""


class LayerSource(Interface):
    """The rows of one layer over a context and a question after it, drawn or read when they are asked for."""

    layer: Layer
    context: int
    """Tokens of the context."""
    question: int
    """Tokens after it, whose queries are replayed."""
    natural: int
    """The first so many of them, whose attention says how good an arm is; the others look for planted tokens and say
    what they find."""

    def keys(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, k_dim] of a KV head from position `first` on, rotated."""

    def values(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, v_dim] of a KV head."""

    def queries(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, k_dim] of a query head, rotated."""

    def aimed(self, head: int, first: int, count: int) -> Mapping[int, int]:
        """By position, the token that a query head looks for there, where it looks for one in particular."""


@dataclass
class Outcome:
    """What one arm made of one layer, summed over its KV heads."""

    arm: Arm
    deviation: Deviation = field(default_factory=Deviation)
    targets: int = 0
    found: int = 0
    held: float = 0.0
    dense: float = 0.0
    encoded: float = 0.0
    keep: list[Bools] = field(default_factory=list)
    """Per head, bool [context]: what still lies in slots."""
    touched: float = 0.0
    decide_seconds: float = 0.0
    summarize_seconds: float = 0.0
    select_seconds: float = 0.0
    """Of all queries of the question."""

    def freed(self, layer: Layer, block_size: int, element_bytes: float) -> dict[str, float]:
        """Blocks of this layer that its own table, or tables per head, would free; net of encoded segments."""
        kv = kv_of(layer)
        slot = (kv.k_dim + kv.v_dim) * element_bytes
        group = GroupSpec(0, (layer.index,), (kv.kv_heads,), block_size)
        found = count({layer.index: np.stack(self.keep)}, [group], slot_bytes=slot)
        spent = self.encoded / (block_size * kv.kv_heads * slot)
        return {mode: found[mode].blocks - spent for mode in ("per_layer_tables", "per_head_tables")}


@dataclass
class ArmRun:
    """One arm at work on a layer."""

    arm: Arm
    allowance: Allowance
    memory: Memory
    outcome: Outcome
    decision: Decision | None = None
    """For all heads, where one head alone does not decide."""


def kv_of(layer: Layer) -> KV:
    """Geometry of a layer with keys and values per head; `PolicyError` for another."""
    kv = layer.kv
    if not isinstance(kv, KV):
        raise PolicyError(f"layer {layer.index} ({layer.kind}) holds no keys and values per head")
    return kv


def of_head(decision: Decision, head: int) -> Decision:
    """The part of a whole layer's decision that concerns one KV head; `PolicyError` for edits other than `Evict`."""
    edits = {}
    for layer, wanted in decision.edits.items():
        foreign = [type(edit).__name__ for edit in wanted if not isinstance(edit, Evict)]
        if foreign:
            raise PolicyError(f"{foreign[0]} for all KV heads together cannot be dealt out to them")
        edits[layer] = [
            Evict(edit.keep[head : head + 1] if edit.keep.dim() == 2 else edit.keep)
            for edit in wanted
            if isinstance(edit, Evict)
        ]
    return replace(decision, edits=edits)


def one_head(layer: Layer, layout: Layout) -> Layout:
    """A layout in which `layer` has one KV head with its query heads; earlier layers stand for nothing."""
    kv = kv_of(layer)
    part = Component(KV(1, kv.k_dim, kv.v_dim), layer.components[0].visibility)
    single = replace(layer, q_heads=layer.q_heads // kv.kv_heads, components=(part,), sinks=False)
    layers = tuple(replace(single, index=index) for index in range(layer.index + 1))
    return replace(layout, layers=layers)


class OneHead:
    """One KV head's context in a paged cache, and dense attention of the question over it."""

    def __init__(
        self, source: LayerSource, layout: Layout, protocol: Protocol, head: int, window: int, clock: Clock
    ) -> None:
        self.source, self.head, self.index, self.clock = source, head, source.layer.index, clock
        self.layout = one_head(source.layer, layout)
        self.layer = self.layout.layers[self.index]
        context, question = source.context, source.question
        per_copy = -(-(context + question) // protocol.block_size) + 2
        spec = GroupSpec(0, (self.index,), (1,), protocol.block_size, self.layer.window)
        # The dense context, a copy that an arm writes into, and what compaction or the question takes.
        self.cache = PagedCache(self.layout, [spec], 1 + 4 * per_copy, sides_apart=True)
        self.dense, _ = self.cache.create([])
        for first in range(0, context, CHUNK):
            count = min(CHUNK, context - first)
            self._append(self.dense, source.keys(head, first, count), source.values(head, first, count))
        self.own = source.keys(head, context, question), source.values(head, context, question)
        q_first = max(0, context - window)
        self.recent = self._queries(q_first, context - q_first)
        self.asked = self._queries(context, question)
        self.aimed = [source.aimed(q, context, question) for q in self._members]
        self._answer()

    @property
    def _members(self) -> range:
        group = self.layer.q_heads
        return range(self.head * group, (self.head + 1) * group)

    def _queries(self, first: int, count: int) -> Queries:
        q = torch.stack([self.source.queries(member, first, count) for member in self._members])
        return Queries(q, torch.arange(first, first + count))

    def _append(self, seq: int, k: Tensor, v: Tensor, reuse: int | None = None) -> None:
        """Give a sequence the next tokens, with their keys and values [tokens, dim]."""
        self.cache.extend(seq, [0] * len(k), reuse=reuse)
        self.cache.write(self.index, [seq], k[None, None], v[None, None])

    def _answer(self) -> None:
        """Dense attention of the question: weights [q_heads, queries, tokens] and outputs [q_heads, queries, v_dim]."""
        seq = self.cache.fork(self.dense)
        self._append(seq, *self.own)
        data = self.cache.stored(seq, self.index, self.source.question)
        seen = visible(data, self.asked.positions, self.layer.q_heads, window=self.layer.window)
        scale, softcap = self.layer.scale, self.layer.softcap
        size = self._chunk(int(data.positions.shape[1]))
        parts = []
        for at in range(0, self.source.question, size):
            q, some = self.asked.q[:, at : at + size], seen[:, at : at + size]
            parts.append(attention_weights(q, data, some, scale=scale, softcap=softcap))
        self.weights = torch.cat(parts, 1)
        self.output = torch.cat([_weighed(part, data) for part in parts], 1)
        # Where columns begin is all that later comparisons ask of it; its rows are not kept.
        self.columns = Stored((), data.positions[:, :1], data.slots[:, :1])
        self.dense_read = read_bytes(self.cache, seq, self.index, data, seen)[0]
        self.cache.free(seq)

    def _chunk(self, tokens: int) -> int:
        return max(1, ELEMENTS // (tokens * self.layer.q_heads))

    # -- arms -----------------------------------------------------------------------------------------

    def replay(self, runs: Sequence[ArmRun]) -> None:
        """Every arm over this head, added to its outcome."""
        known: Known = {}
        for run in runs:
            lane = self._lane(run)
            dense = held_layer(lane, self.index)
            self._compress(lane, run, known)
            start = self.clock()
            asking.summarize(lane)
            run.outcome.summarize_seconds += self.clock() - start
            self._inspect(lane, run.outcome, dense)
            self._ask(lane, run.outcome)
            lane.free()

    def _lane(self, run: ArmRun) -> Lane:
        return Lane(
            run.arm,
            self.cache.fork(self.dense),
            self.cache,
            run.allowance,
            run.memory,
            frozenset({self.index}),
        )

    def _compress(self, lane: Lane, run: ArmRun, known: Known) -> None:
        start, policy = self.clock(), run.arm.policy
        meter = Meter(self.layout.element_bytes)
        decision = Decision()
        if run.decision is not None:
            decision = of_head(run.decision, self.head)
        elif policy.writes_decide and not policy.spares(lane.allowance, lane.length):
            evidence = Evidences(recent=lambda layer: self.recent, future=lambda layer: self.asked)
            shown = CacheView(
                {self.index: asking.view(lane, self.index, meter, evidence)}, lane.length, lane.allowance.context
            )
            scores = self._scores(run, shown, meter, known)
            decision = asking.decided(policy, shown, scores, lane.memory, lane.allowance)
        before = self.cache.moved_elements
        asking.apply(lane, decision)
        moved = (self.cache.moved_elements - before) * self.layout.element_bytes
        run.outcome.decide_seconds += self.clock() - start
        run.outcome.touched += meter.total + moved

    def _scores(
        self,
        run: ArmRun,
        shown: CacheView,
        meter: Meter,
        known: Known,
    ) -> dict[int, Tensor]:
        """Scores of this head; arms that differ in budget alone share them, and are each charged what they cost."""
        policy, rng = run.arm.policy, run.memory.generator()
        key = policy.label, run.arm.protection
        if not policy.writes_score:
            return {}
        if key in known:
            score, touched, seconds = known[key]
            meter.add("score", touched, 1.0)
            run.outcome.decide_seconds += seconds
            return {self.index: score}
        start, state = self.clock(), rng.get_state()
        scores = asking.scored(policy, shown, run.memory)
        if torch.equal(state, rng.get_state()):  # what was drawn at random is each arm's own
            known[key] = scores[self.index], meter.total, self.clock() - start
        return scores

    def _inspect(self, lane: Lane, outcome: Outcome, dense: float) -> None:
        outcome.dense += dense
        outcome.held += held_layer(lane, self.index)
        outcome.encoded += sum(segment.nbytes for segment in self.cache.ledger.segments(lane.seq, self.index))
        view = self.cache.ledger.slots(lane.seq, self.index)
        mask = np.zeros(lane.length, dtype=np.bool_)
        mask[view.positions[0, : view.counts[0]]] = True
        outcome.keep.append(mask)

    def _ask(self, lane: Lane, outcome: Outcome) -> None:
        """The question's queries under the arm, beside what dense gave."""
        source, deviation = self.source, Deviation()
        size, at = self._chunk(source.context + source.question), 0
        scanned_in_all = read_in_all = 0.0
        while at < source.question:
            number = min(size, lane.takes(source.question - at))
            k, v = (rows[at : at + number] for rows in self.own)
            self._append(lane.seq, k, v, lane.reuse)
            lane.reuse = None
            asking.written(lane, [self.index])
            q = self.asked.q[:, at : at + number]
            start = self.clock()
            selected = asking.select(lane, self.index, q)
            outcome.select_seconds += self.clock() - start
            chosen, scanned, data = selected  # not before: what these names held goes here, and takes its time
            data = data or self.cache.stored(lane.seq, self.index, number)
            positions = self.asked.positions[at : at + number]
            seen = asking.seen(lane, self.index, data, positions, chosen)
            mine = attend(q, data, seen, scale=self.layer.scale, softcap=self.layer.softcap)
            weights = self.weights[:, at : at + number, : source.context + at + number]
            share = retained_share(weights, self.columns, data, seen)
            counted = min(number, max(0, source.natural - at))
            if counted:
                deviation.add(mine[:, :counted], self.output[:, at : at + counted], share[:, :counted])
            union = seen.view(1, -1, *seen.shape[1:]).any(1)
            read_in_all += read_bytes(self.cache, lane.seq, self.index, data, union)[0]
            scanned_in_all += scanned * number
            self._look_up(data, seen, positions, outcome)
            start = self.clock()
            asking.summarize(lane)
            outcome.summarize_seconds += self.clock() - start
            at += number
        deviation.charge(read_in_all, scanned_in_all, self.dense_read, source.question)
        outcome.deviation.join(deviation)

    def _look_up(self, data: Stored, seen: Tensor, positions: Tensor, outcome: Outcome) -> None:
        """Count the targets of these queries, and those that they may read."""
        for member, aimed in enumerate(self.aimed):
            row = seen[member if len(seen) > 1 else 0]
            for number, position in enumerate(positions.tolist()):
                if position in aimed:
                    there = data.positions[0] == aimed[position]
                    outcome.targets += 1
                    outcome.found += bool((row[number] & there).any())


def _weighed(weights: Tensor, data: Stored) -> Tensor:
    """Outputs [q_heads, queries, v_dim] of weights [q_heads, queries, tokens] over one KV head's values."""
    widths = [run.tokens for run in data.runs]
    parts = weights.flatten(0, 1).split(widths, dim=-1)
    rows = sum((part @ run.v[0] for part, run in zip(parts, data.runs, strict=True)), torch.zeros(()))
    return rows.view(*weights.shape[:2], -1)
