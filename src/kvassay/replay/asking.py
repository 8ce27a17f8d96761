"""Asking a policy: build its views, run it, check its answer, let the cache carry it out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.cache.data import LayerData, Stored
from kvassay.cache.edits import Decision
from kvassay.cache.ops import Reclaimed
from kvassay.errors import PolicyError
from kvassay.policy import readset
from kvassay.policy.answers import answering, checked_edits, checked_scores, checked_side, checked_state, of_arm
from kvassay.policy.base import Memory, Policy, interval_of
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Evidence, When
from kvassay.policy.queries import Queries
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import BlockView, CacheView, HiddenStates, LayerView, Meter, Rows, StepView
from kvassay.replay.indexing import Asked, chosen_by_index
from kvassay.replay.lane import Lane
from kvassay.replay.laws import check_moment, check_order, check_protection, check_scope

Source = Callable[[int], Queries]
"""Queries of a layer."""


@dataclass(frozen=True)
class Evidences:
    """What the replay can offer beside the cache itself, per layer."""

    recent: Source | None = None
    future: Source | None = None
    rows: Callable[[int], Mapping[Evidence, Callable[[], Rows]]] | None = None
    """Recorded taps of a layer, by the evidence they are."""


def view(
    lane: Lane,
    layer: int,
    meter: Meter,
    evidence: Evidences,
    load: Callable[[], LayerData] | None = None,
    *,
    bare: bool = False,
) -> LayerView:
    """One layer of a lane as its policy may see it; `load` if it has been read already.

    bare: the lane gives its geometry alone, and is not kept: what `load` reads is in no code
    """
    offered: dict[Evidence, Callable[[], Queries]] = {}
    for kind, source in ((Evidence.QUERIES, evidence.recent), (Evidence.FUTURE_QUERIES, evidence.future)):
        if source is not None:
            offered[kind] = _bind(source, layer)
    group = next(g for g in lane.cache.ledger.groups if layer in g.layers)
    return LayerView(
        lane.cache.layout.layers[layer],
        lane.policy.card,
        load or (lambda: lane.cache.layer(lane.seq, layer)),
        length=lane.length,
        protection=lane.allowance.protection,
        meter=meter,
        queries=offered,
        rows=evidence.rows(layer) if evidence.rows is not None else None,
        sinks=lane.sinks.get(layer),
        side=lane.side.get(layer),
        block_size=group.block_size,
        code_bytes=None if bare else lambda: lane.cache.code_bytes(lane.seq, layer),
    )


def cache_view(
    lane: Lane,
    meter: Meter,
    evidence: Evidences,
    moment: When = When.AFTER_PREFILL,
    layers: Collection[int] | None = None,
) -> CacheView:
    """All layers in the policy's scope, or those of them that are named."""
    wanted = lane.scope if layers is None else lane.scope.intersection(layers)
    shown = {index: view(lane, index, meter, evidence) for index in sorted(wanted)}
    return CacheView(shown, lane.length, lane.allowance.context, moment)


@dataclass(frozen=True)
class Scored:
    """Scores of one policy on one cache, what they cost, and where they left the random generator."""

    scores: Mapping[int, Tensor]
    touched: float
    seconds: float
    rng: Tensor

    def copied(self) -> dict[int, Tensor]:
        """The scores, so that a policy that writes into its own does not write into another arm's."""
        return {index: score.clone() for index, score in self.scores.items()}


Known = dict[Hashable, Scored]
"""Scores by policy and protection: arms that differ in budget alone score the same cache alike."""


def decide(
    lane: Lane,
    evidence: Evidences,
    known: Known | None = None,
    moment: When = When.AFTER_PREFILL,
    layers: Collection[int] | None = None,
) -> Reclaimed:
    """Score, decide and apply once; the time and the bytes touched are charged to the lane.

    known: scores that other arms got from the very same cache and evidence, to be used and added to. Whoever
        uses them is charged what they cost.
    layers: those that are shown, if not all in the policy's scope
    Raises `IllegalEdit` while the lane has uncommitted tokens.
    """
    lane.refuse_uncommitted("edited")
    start = time.perf_counter()
    meter = Meter(lane.cache.layout.element_bytes)
    cache = cache_view(lane, meter, evidence, moment, layers)
    decision = Decision()
    if not lane.policy.spares(lane.allowance, cache.length):
        scores = _scores(lane, cache, meter, known)
        decision = decided(lane.policy, cache, scores, lane.memory, lane.allowance)
    before = lane.cache.moved_elements
    reclaimed = apply(lane, decision)
    lane.touched += meter.total + (lane.cache.moved_elements - before) * lane.cache.layout.element_bytes
    lane.seconds += time.perf_counter() - start
    return reclaimed


def _scores(lane: Lane, cache: CacheView, meter: Meter, known: Known | None) -> Mapping[int, Tensor]:
    rng = lane.memory.generator()
    if known is None or lane.memory.state:
        return scored(lane.policy, cache, lane.memory)
    key = type(lane.policy), lane.policy.label, lane.allowance.protection
    found = known.get(key)
    if found is None:
        start, touched = time.perf_counter(), meter.total
        scores = scored(lane.policy, cache, lane.memory)
        found = Scored(scores, meter.total - touched, time.perf_counter() - start, rng.get_state())
        known[key] = found
        return found.copied()
    rng.set_state(found.rng)
    lane.touched += found.touched
    lane.seconds += found.seconds
    return found.copied()


def propose(policy: Policy, cache: CacheView, memory: Memory, allowance: Allowance) -> Decision:
    """What the policy wants of all layers: scores layer by layer, then one decision; nothing is changed yet."""
    if policy.spares(allowance, cache.length):
        return Decision()
    return decided(policy, cache, scored(policy, cache, memory), memory, allowance)


def scored(policy: Policy, cache: CacheView, memory: Memory) -> dict[int, Tensor]:
    """Scores of all layers shown, none for a policy without a scorer; `PolicyError` for another shape or NaN."""
    if not policy.writes_score:
        return {}
    return {index: _score(policy, shown, memory) for index, shown in cache.layers.items()}


def _score(policy: Policy, shown: LayerView, memory: Memory) -> Tensor:
    with answering(policy, "score", shown.index):
        score = policy.score(shown, memory)
    return checked_scores(score, shown)


def decided(
    policy: Policy, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, allowance: Allowance
) -> Decision:
    """One decision from the scores; `PolicyError` if it leaves its scope or drops a protected token, `BudgetError`
    with the arm's name if the budget leaves the policy nothing to decide."""
    budget = [] if allowance.budget is None else [allowance.budget.label]
    with of_arm(" ".join([policy.label, *budget])), answering(policy, "decide"):
        decision = checked_edits(policy, policy.decide(cache, scores, memory, allowance))
    check_scope(policy, cache, decision)
    check_order(policy, cache, decision)
    check_moment(policy, cache, decision)
    check_protection(policy, cache, decision)
    return decision


def apply(lane: Lane, decision: Decision) -> Reclaimed:
    """Let the cache carry a decision out; `IllegalEdit`, with the arm's name, if a law forbids it."""
    with of_arm(lane.arm.label):
        reclaimed = lane.cache.apply(lane.seq, decision, allow_window="sliding" in lane.policy.card.acts_on)
    lane.reuse = decision.reuse
    lane.facts = decision.facts or lane.facts
    return reclaimed


def due(lane: Lane, moment: When, tokens: int = 1) -> bool:
    """Whether the lane's policy edits the cache at this moment, its last `tokens` tokens having come in together."""
    if not lane.policy.decides_at(moment):
        return False
    return moment is not When.EVERY_N or lane.generated % interval_of(lane.policy) < tokens


def written(lane: Lane, layers: Collection[int]) -> None:
    """Let the policy act on what has just been written into some layers, if it is one that does."""
    if not lane.uncommitted and due(lane, When.ON_WRITE) and not lane.scope.isdisjoint(layers):
        decide(lane, Evidences(), moment=When.ON_WRITE, layers=layers)


def summarize(lane: Lane) -> None:
    """Let the policy summarise blocks that have filled since the last call; what it reads of them is charged."""
    if not lane.policy.writes_summarize:
        return
    lane.refuse_uncommitted("summarised")
    start = time.perf_counter()
    for group in lane.cache.ledger.groups:
        full = lane.length // group.block_size
        for index in lane.scope & set(group.layers):
            old = lane.side.get(index, {})
            done = next(iter(old.values())).shape[0] if old else 0
            if full > done:
                new = _summary(lane, index, done, full, group.block_size)
                lane.side[index] = _extended(old, checked_side(lane.policy, new, full - done, old))
    lane.seconds += time.perf_counter() - start


def observe(lane: Lane, tokens: Sequence[int], evidence: Evidences, hidden: Mapping[int, Tensor]) -> None:
    """Let the policy carry what it must from the step just made."""
    if not lane.policy.writes_observe:
        return
    lane.refuse_uncommitted("observed")
    start = time.perf_counter()
    meter = Meter(lane.cache.layout.element_bytes)
    last = lane.length
    step = StepView(
        tuple(tokens),
        tuple(range(last - len(tokens), last)),
        cache_view(lane, meter, evidence),
        HiddenStates(lane.policy.card, lane.policy.taps_in(len(lane.cache.layout.layers)), hidden),
    )
    with answering(lane.policy, "observe"):
        state = checked_state(lane.policy, lane.policy.observe(lane.memory.state, step))
    lane.with_state(state)
    lane.touched += meter.total
    lane.seconds += time.perf_counter() - start


def read(lane: Lane, index: int, query: Tensor, load: Callable[[], LayerData]) -> tuple[ReadSet | None, Meter]:
    """What the policy lets `query` [q_heads, queries, dim] of layer `index` read, and what choosing it scanned."""
    meter = Meter(lane.cache.layout.element_bytes)
    shown = view(lane, lane.cache.layout.source(index).index, meter, Evidences(), load)
    with answering(lane.policy, "read", index):
        # A copy: a policy that scales it in place would change what the model attends with.
        chosen = lane.policy.read(shown, query.clone(), lane.memory, lane.allowance, lane.previous.get(index))
    if chosen is not None:
        chosen.validate(
            queries=query.shape[1],
            q_heads=shown.layer.q_heads,
            kv_heads=shown.kv_heads,
            block_size=shown.block_size,
            name=lane.policy.card.name,
        )
        lane.previous[index] = chosen
    return chosen, meter


def select(
    lane: Lane, index: int, query: Tensor, asked: Asked | None = None
) -> tuple[ReadSet | None, float, Stored | None]:
    """What the policy selects for `query` [q_heads, queries, dim] of layer `index` from its cache, or from the one it
    shares, the bytes it scanned to find out (per query), and the cache as it lies if it had to be looked at; all None
    and 0 for a policy that selects nothing.

    asked: where the model itself selects, what its index is asked with; no policy selects there
    """
    if asked is not None:
        return *chosen_by_index(lane.cache, lane.seq, index, asked), None
    owner = lane.cache.layout.source(index).index
    if not (lane.policy.writes_read and owner in lane.scope):
        return None, 0.0, None
    data = lane.cache.stored(lane.seq, owner, query.shape[1])
    chosen, meter = read(lane, index, query, data.by_position)
    return chosen, meter.total, data


def seen(lane: Lane, index: int, data: Stored, positions: Tensor, chosen: ReadSet | None) -> Tensor:
    """What queries of layer `index` at true `positions` read of `data`, the cache of that layer or of its owner.

    bool [kv_heads, queries, tokens], or [q_heads, queries, tokens] under a selection of each query head.
    """
    layout = lane.cache.layout
    window = layout.source(index).window
    return readset.seen(data, positions, layout.layers[index].q_heads, window=window, chosen=chosen)


def _summary(lane: Lane, layer: int, done: int, full: int, size: int) -> Mapping[str, Tensor]:
    data = lane.cache.layer(lane.seq, layer)
    if data.slots.shape[1] != lane.length or int(data.slots.max()) + 1 != lane.length:
        raise PolicyError(
            f"policy '{lane.policy.card.name}' summarises blocks of layer {layer}, but edits have left "
            f"{data.slots.shape[1]} of {lane.length} tokens there: a block is no longer {size} tokens in a row"
        )
    rows = slice(done * size, full * size)
    blocks = [side[:, rows].unflatten(1, (full - done, size)).transpose(0, 1) for side in (data.k, data.v)]
    _charge_summary(lane, blocks)
    artefact = lane.memory.artefact
    learnt = {} if artefact is None else artefact.tensors
    with answering(lane.policy, "summarize", layer):
        return lane.policy.summarize(BlockView(lane.cache.layout.layers[layer], blocks[0], blocks[1], learnt))


def _charge_summary(lane: Lane, blocks: Sequence[Tensor]) -> None:
    """Charge the keys and values [blocks, kv_heads, block_size, dim] of new blocks that the card declares."""
    for evidence, side in zip((Evidence.KEYS, Evidence.VALUES), blocks, strict=True):
        if evidence in lane.policy.summarizer.card.evidence:
            lane.touched += side.numel() * lane.cache.layout.element_bytes


def _extended(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([old[name], more]) if name in old else more for name, more in new.items()}


def _bind(source: Source, layer: int) -> Callable[[], Queries]:
    return lambda: source(layer)
