"""The closed loop: every arm forks one dense context, is compressed once, and is asked every question.

    1. the context's K/V come from the trace, written once; arms share its blocks by reference count
    2. each arm's policy compresses its fork, seeing nothing later than the context's end
    3. per question, all arms decode as one batch: the question, then the recorded answer (teacher-forced)
       and, from the same point, their own greedy answer (free-running)

Lanes that only compress once, or encode what is written, take a chunk at a time; lanes that only select take what is
known up to the end of a block; lanes that edit while decoding take it up to their next edit. The questions of a
context share its compressed cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvassay.cache.ops import GroupSpec, group_specs
from kvassay.cache.paged import PagedCache
from kvassay.errors import ExperimentError
from kvassay.measure.result import BranchResult
from kvassay.policy.base import Artefact, Memory
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Effect, Prefill, When
from kvassay.policy.queries import Queries
from kvassay.record.load import LoadedModel
from kvassay.replay import asking
from kvassay.replay.applies import not_applicable
from kvassay.replay.arms import Arm
from kvassay.replay.bytes import held
from kvassay.replay.calibration import fit_offline
from kvassay.replay.compressors import Compressors, keeps_entries
from kvassay.replay.engine import QUERY_EVIDENCE, Engine
from kvassay.replay.evidence import after_prefill, index_keys, recorded_queries, sinks_of
from kvassay.replay.feeding import feed
from kvassay.replay.lane import Lane, scope_of
from kvassay.replay.levels import blocks_held, freed_blocks, kept_by_position
from kvassay.replay.protocol import Protocol
from kvassay.replay.rows import Answer, branch_result
from kvassay.trace.reader import Branch, Trace

Progress = Callable[[str], None]
DEFAULT_PROTOCOL = Protocol()
ENCODING = {Effect.QUANTIZE, Effect.LOW_RANK}
"""Effects that change what a method's own prefill reads, chunk after chunk."""


def replay_trace(
    loaded: LoadedModel,
    trace: Trace,
    arms: Sequence[Arm],
    protocol: Protocol = DEFAULT_PROTOCOL,
    progress: Progress = lambda message: None,
    *,
    calibration: Trace | None = None,
) -> list[BranchResult]:
    """Replay one context under all arms that apply to it; one row per (branch, arm), in that order.

    calibration: a trace of other text, which policies that learn offline are fitted on
    Raises `ExperimentError` if the trace is of another model or tokenizer, is too long, or no arm is `dense`;
    `PolicyError` if a policy needs a calibration and there is none, or it is not disjoint from the trace.
    """
    check_replay(loaded, trace, arms, protocol)
    idle = not_applicable(trace, arms, protocol.block_size)
    arms = [arm for arm in arms if arm.label not in idle]
    artefacts = fit_offline([arm.policy for arm in arms], trace, calibration, loaded.model)
    replay = Replay(loaded, trace, arms, protocol, artefacts)
    progress(f"compress {len(arms)} arms")
    lanes = [replay.compressed(arm) for arm in arms]
    rows: list[BranchResult] = []
    for index, branch in enumerate(trace.branches):
        progress(f"question {index + 1}/{len(trace.branches)}")
        rows += replay.ask(index, branch, lanes)
    return rows


@dataclass
class Compressed:
    """A compressed context of one arm, kept for all its questions."""

    lane: Lane
    blocks: int
    """Blocks the context held before, in groups that no window bounds."""
    freed: dict[str, float]
    kept: tuple[float, ...]
    """`BranchResult.kept` of the context."""


class Replay:
    """One trace under way."""

    def __init__(
        self,
        loaded: LoadedModel,
        trace: Trace,
        arms: Sequence[Arm],
        protocol: Protocol,
        artefacts: Mapping[str, Artefact] | None = None,
        forks: int = 2,
    ) -> None:
        """`artefacts`: what offline policies have learnt, by the policy's label; `forks`: copies of an arm's lane
        that live at the same time, its compressed context included."""
        self.loaded, self.trace, self.protocol = loaded, trace, protocol
        self.artefacts = artefacts or {}
        self.known: asking.Known = {}
        self.groups = group_specs(trace.layout, protocol.block_size)
        self.cache = PagedCache(trace.layout, self.groups, self._blocks(forks * len(arms) + 2), device=loaded.device)
        self.engine = Engine(loaded.model, self.cache)
        self.context = trace.prefix.tokens
        self.sinks = sinks_of(trace)
        self.index = index_keys(trace.prefix)
        self.compressors: Compressors | None = None
        self.dense = self._read_context(arms) if keeps_entries(trace.layout) else self._dense_context()

    def _blocks(self, lanes: int) -> int:
        longest = max((b.tokens for b in self.trace.branches), default=0) + self.protocol.free_tokens
        return pool_blocks(self.groups, self.trace.prefix.tokens, longest, lanes)

    def _dense_context(self) -> int:
        ids = self.trace.prefix.token_ids.tolist()
        seq, _ = self.cache.create(ids)
        self.cache.extend(seq, ids)
        for layer in self.trace.layout.layers:
            if layer.cache_of is None:
                k, v = (side(layer.index).transpose(0, 1)[None] for side in (self.trace.prefix.k, self.trace.prefix.v))
                self.cache.write(layer.index, [seq], k, v)
        return seq

    def _read_context(self, arms: Sequence[Arm]) -> int:
        """Let the model read the context, densely: a trace holds entries, not what compressors still have open."""
        lane = self._lane(replace(arms[dense_row(arms)], prefill=Prefill.OWN))
        self.compressors = lane.compressors
        return lane.seq

    # -- compress ---------------------------------------------------------------------------------------

    def compressed(self, arm: Arm) -> Compressed:
        """Fork the dense context (or prefill anew) and let the arm's policy compress it."""
        lane = self._lane(arm)
        blocks = blocks_held(lane)
        if asking.due(lane, When.AFTER_PREFILL):
            known = self.known if arm.prefill is Prefill.SHARED_DENSE else None
            asking.decide(lane, after_prefill(self.trace), known)
        asking.summarize(lane)
        lane.peak_bytes = held(lane).total
        return Compressed(lane, blocks, freed_blocks(lane), kept_by_position(lane))

    def _lane(self, arm: Arm) -> Lane:
        rng = torch.Generator().manual_seed(self.protocol.seed)
        shared = arm.prefill is Prefill.SHARED_DENSE
        lane = Lane(
            arm,
            self.cache.fork(self.dense) if shared else self.cache.create([])[0],
            self.cache,
            Allowance.resolve(arm.budget, self.context, arm.protection),
            Memory(artefact=self.artefacts.get(arm.policy.label), rng=rng),
            scope_of(self.trace.layout, arm.policy),
            self.sinks,
            index=dict(self.index) if shared else {},
            compressors=self.compressors.fork() if shared and self.compressors else None,
        )
        if arm.prefill is Prefill.OWN:
            self._own_prefill(lane)
        return lane

    def _own_prefill(self, lane: Lane) -> None:
        """Prefill with the policy in the loop, chunk by chunk: what it encodes is what later chunks read.

        A method that evicts chooses among all of the context, so it decides once, when that has been read.
        """
        ids = self.trace.prefix.token_ids.tolist()
        size = min(self.trace.header.prefill_chunk, lane.written_together)
        effects = lane.policy.card.effects
        encodes = effects & ENCODING and Effect.EVICT not in effects and asking.due(lane, When.AFTER_PREFILL)
        for first in range(0, len(ids), size):
            with self.engine.inputs_kept(lane) as rows:
                self.engine.forward([lane], [ids[first : first + size]], last=0)
            if encodes:
                asking.decide(lane, asking.Evidences(recent=lambda layer: lane.queries[layer], rows=rows))
        lane.generated = 0

    # -- ask --------------------------------------------------------------------------------------------

    def ask(self, index: int, branch: Branch, arms: Sequence[Compressed]) -> list[BranchResult]:
        """One question to every arm: rows in the arms' order."""
        lanes = self.forks(arms)
        ids = branch.token_ids.tolist()
        question, answer = ids[: branch.question_tokens], ids[branch.question_tokens :]
        first = feed(self.engine, lanes, [question] * len(lanes), last=1)
        free = [lane.fork() for lane in lanes]
        shown = answer[:-1]
        rest = feed(self.engine, lanes, [shown] * len(lanes), last=len(shown)) if shown else None
        generated = self._generate(free, [f[-1] for f in first], len(answer))

        def said(row: int) -> Answer:
            # One arm's logits at a time: with a large vocabulary all of them once more would be the most memory taken.
            logits = first[row] if rest is None else torch.cat([first[row], rest[row]])
            lane, arm = lanes[row], arms[row]
            freed, blocks = arm.freed, arms[dense].blocks
            if lane.deciding:  # goes on as tokens come: counted when they have
                freed, blocks = freed_blocks(lane), blocks_held(lanes[dense])
            return Answer(logits, generated[row], held(lane), lane, freed, blocks, arm.kept if index == 0 else ())

        dense = dense_row([arm.lane.arm for arm in arms])
        base = said(dense)
        answers = (base if row == dense else said(row) for row in range(len(arms)))
        rows = [branch_result(self.loaded.tokenizer, self.trace, index, branch, answer, one, base) for one in answers]
        for lane in (*lanes, *free):
            lane.free()
        return rows

    def forks(self, arms: Sequence[Compressed]) -> list[Lane]:
        """A lane of each compressed context, ready to be asked a question."""
        lanes = [arm.lane.fork() for arm in arms]
        for lane in lanes:
            lane.queries = lane.queries or self._tail(lane)
        return lanes

    def _tail(self, lane: Lane) -> dict[int, Queries]:
        """Recent queries to start decoding with, for policies that declare them."""
        if not (lane.stepwise and lane.policy.card.evidence & QUERY_EVIDENCE):
            return {}
        prefix, last = self.trace.prefix, lane.keep_queries
        return {layer: recorded_queries(prefix, layer).last(last) for layer in lane.scope}

    def _generate(self, lanes: Sequence[Lane], logits: Sequence[Tensor], answer: int) -> list[list[int]]:
        """Greedy decoding, bounded by the answer's own length and two more tokens."""
        steps = min(self.protocol.free_tokens, answer + 2)
        if steps == 0:
            return [[] for _ in lanes]
        ids = [[int(x.argmax())] for x in logits]
        for _ in range(steps - 1):
            out = feed(self.engine, lanes, [[mine[-1]] for mine in ids], last=1)
            for mine, logits_of in zip(ids, out, strict=True):
                mine.append(int(logits_of[-1].argmax()))
        return ids


def pool_blocks(groups: Sequence[GroupSpec], context: int, longest: int, lanes: int) -> int:
    """Blocks for `lanes` lanes to own a full copy and questions of up to `longest` tokens each.

    Main memory is only touched when used; a GPU's is taken at once.
    """
    return 1 + lanes * sum(-(-(context + 2 * longest) // group.block_size) + 4 for group in groups)


def dense_row(arms: Sequence[Arm]) -> int:
    """Index of the arm that the others are measured against."""
    return next(row for row, arm in enumerate(arms) if arm.policy.card.name == "dense" and not arm.again)


def check_replay(loaded: LoadedModel, trace: Trace, arms: Sequence[Arm], protocol: Protocol) -> None:
    """Raise `ExperimentError` unless this model can replay the trace under these arms, dense among them."""
    mine, theirs = loaded.identity.weights_sha256, trace.header.model.weights_sha256
    if mine != theirs:
        raise ExperimentError(
            f"{trace.path}: recorded from {trace.header.model.name} (weights {str(theirs)[:12]}), "
            f"not from {loaded.identity.name} ({str(mine)[:12]})"
        )
    words, recorded = loaded.identity.tokenizer_sha256, trace.header.model.tokenizer_sha256
    if recorded is not None and words != recorded:
        raise ExperimentError(
            f"{trace.path}: its token ids are of tokenizer {recorded[:12]}, {loaded.identity.name} comes with "
            f"{words[:12]}; record the trace anew"
        )
    if trace.header.subset is not None:
        raise ExperimentError(f"{trace.path}: holds a part of the model; the closed loop needs the whole")
    longest = trace.prefix.tokens + max((b.tokens for b in trace.branches), default=0) + protocol.free_tokens
    if longest > trace.layout.native_context and not protocol.allow_beyond_native:
        raise ExperimentError(
            f"{trace.path}: {longest} tokens exceed the model's native context of {trace.layout.native_context}"
        )
    if not any(arm.policy.card.name == "dense" and not arm.again for arm in arms):
        raise ExperimentError("every replay needs the arm 'dense': the others are measured against it")
