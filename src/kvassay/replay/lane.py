"""A lane: one arm's sequence on its way through a replay, with what the policy carries along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvassay.cache.paged import PagedCache
from kvassay.errors import IllegalEdit, PolicyError
from kvassay.layout.model import Layer, Layout
from kvassay.policy.acting import may_act, refusal
from kvassay.policy.answers import of_arm
from kvassay.policy.base import Memory, Policy, State
from kvassay.policy.budget import Allowance
from kvassay.policy.card import STEPS, When
from kvassay.policy.queries import Queries
from kvassay.policy.readset import ReadSet
from kvassay.replay.arms import Arm
from kvassay.replay.compressors import Compressors


@dataclass
class Traffic:
    """KV read traffic of decode steps, summed over tokens processed."""

    tokens: int = 0
    bytes: float = 0.0
    """K, V, encoded data, metadata, side data and scoring scans, at the layout's `kv_dtype`."""
    growing: float = 0.0
    """Those of `bytes` that are read in layers which no window bounds."""
    index: float = 0.0
    """Those of `bytes` that are keys of the model's own selection index."""
    selected: float = 0.0
    """Tokens read per KV head, mean over the layers that read a cache in scope, summed over tokens processed."""

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes one decoded token reads."""
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def growing_per_token(self) -> float:
        """Those of them that are read in layers which no window bounds."""
        return self.growing / self.tokens if self.tokens else 0.0

    @property
    def index_per_token(self) -> float:
        """Those of them that are keys of the model's own selection index."""
        return self.index / self.tokens if self.tokens else 0.0

    def charge(self, layer: Layer, read: float) -> None:
        """Take bytes read in a layer."""
        self.bytes += read
        if layer.window is None:
            self.growing += read

    @property
    def selected_per_token(self) -> float:
        """Mean tokens per KV head that one decoded token reads of a cache in scope."""
        return self.selected / self.tokens if self.tokens else 0.0


LEAST_QUERIES = 64
ANY_NUMBER = 1 << 40


class Mark(NamedTuple):
    """What a lane's reads leave behind, after `tokens` uncommitted ones."""

    tokens: int
    previous: Mapping[int, ReadSet]
    rng: Tensor | None


@dataclass
class Draft:
    """A lane's uncommitted tokens, with what goes back when they do. The policy's state is not among it: no policy
    is asked before tokens are committed."""

    marks: list[Mark]
    tokens: list[int] = field(default_factory=list)
    hidden: list[Mapping[int, Tensor]] = field(default_factory=list)
    """Tapped layers' output [tokens, hidden] of each chunk."""

    def settled(self, count: int) -> tuple[list[int], dict[int, Tensor]]:
        """The first `count` tokens and their hidden states, [count, hidden] per tapped layer."""
        layers = self.hidden[0] if self.hidden else {}
        return self.tokens[:count], {layer: torch.cat([one[layer] for one in self.hidden])[:count] for layer in layers}


@dataclass
class Lane:
    """One sequence of a `PagedCache` under one arm. `fork` shares everything by reference."""

    arm: Arm
    seq: int
    cache: PagedCache
    allowance: Allowance
    memory: Memory
    scope: frozenset[int]
    """Layers the policy may act on."""
    sinks: Mapping[int, Tensor] = field(default_factory=dict)
    """Logit of each query head's attention sink, [q_heads], per layer that has sinks."""
    side: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    """Side data per layer, as `summarize` returned it, over the full blocks so far."""
    queries: dict[int, Queries] = field(default_factory=dict)
    """The last queries per layer, for policies that declare them."""
    previous: dict[int, ReadSet] = field(default_factory=dict)
    index: dict[int, Tensor] = field(default_factory=dict)
    """Keys of the model's own selection index, float32 [tokens, dim] by position, per layer that has one."""
    compressors: Compressors | None = None
    """What the model's own compressors hold, if it has any and tokens have come."""
    reuse: int | None = None
    """Position whose slot the next token takes."""
    traffic: Traffic = field(default_factory=Traffic)
    peak_bytes: float = 0.0
    seconds: float = 0.0
    """Wall seconds spent in the policy and in its edits."""
    touched: float = 0.0
    """Bytes the policy touched to score and edit (not to read)."""
    generated: int = 0
    """Tokens since the context was compressed."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the policy reported of its last decision that edited something."""
    draft: Draft | None = None
    """Uncommitted tokens, while there are any."""

    @property
    def policy(self) -> Policy:
        """The arm's policy."""
        return self.arm.policy

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that hold K/V of their own."""
        return tuple(layer.index for layer in self.cache.layout.storing)

    @cached_property
    def readers(self) -> int:
        """How many layers read the caches in scope: those that hold one, and those that share it."""
        layout = self.cache.layout
        return sum(layout.source(layer.index).index in self.scope for layer in layout.layers)

    @property
    def length(self) -> int:
        """Tokens so far; the next one's position."""
        return self.cache.ledger.length(self.seq)

    @property
    def uncommitted(self) -> int:
        """Speculative tokens at the end."""
        return self.cache.ledger.uncommitted(self.seq)

    @property
    def stepwise(self) -> bool:
        """Whether this lane must be fed step by step: `takes` says how many tokens each."""
        return self.policy.card.per_step or self.policy.writes_observe or self.arm.again

    def takes(self, tokens: int) -> int:
        """How many of so many known tokens it may be fed at once, as if they came one by one.

        A policy that selects, each query for itself, is asked for all of them up to the end of a block: what it reads
        of full blocks is the same until then. One that edits the cache while decoding takes what comes until it does,
        and then the token after which it acts: what it held before is its peak.
        """
        if not self.stepwise:
            return min(tokens, self.written_together)
        policy = self.policy
        alone = policy.writes_observe or self.reuse is not None or (policy.writes_read and not policy.reads_together)
        limits = [1 if alone else tokens, self.written_together]
        if self.deciding:
            limits.append(max(1, policy.quiet(self.length, self.generated)))
        if self.arm.again:
            limits.append(max(1, tokens // 2))
        if policy.writes_read or policy.writes_summarize or self.arm.again:
            limits += [group.block_size - self.length % group.block_size for group in self.cache.ledger.groups]
        return min(tokens, *limits)

    @property
    def written_together(self) -> int:
        """How many tokens may be written at once: a policy that acts on what is written is shown what the newest token
        can see, which must be all of them."""
        windows = [self.cache.layout.layers[index].window for index in self.scope]
        if not self.policy.decides_at(When.ON_WRITE):
            return ANY_NUMBER
        return min((window for window in windows if window is not None), default=ANY_NUMBER)

    @property
    def deciding(self) -> bool:
        """Whether its policy edits the cache while decoding."""
        return self.policy.decides_at(*STEPS)

    @property
    def keep_queries(self) -> int:
        """How many of the newest queries it keeps while decoding, if its policy declares queries."""
        return max(LEAST_QUERIES, self.policy.queries_needed) if self.stepwise else LEAST_QUERIES

    def note_queries(self, layer: int, newest: Queries) -> None:
        """Keep a layer's newest queries."""
        old = self.queries.get(layer)
        new = newest if old is None else old.then(newest)
        # What is uncommitted may go again, and then the oldest would be missing.
        self.queries[layer] = new if self.draft is not None else new.last(self.keep_queries)

    def fork(self) -> Lane:
        """The same lane once more, with counters of its own; K/V shared by reference count.

        `IllegalEdit` while it has uncommitted tokens.
        """
        self.refuse_uncommitted("forked")
        rng = self.memory.rng
        return replace(
            self,
            seq=self.cache.fork(self.seq),
            memory=self.memory if rng is None else replace(self.memory, rng=rng.clone_state()),
            side=dict(self.side),
            queries=dict(self.queries),
            previous=dict(self.previous),
            index=dict(self.index),
            compressors=self.compressors and self.compressors.fork(),
            traffic=Traffic(),
            peak_bytes=0.0,
        )

    def free(self) -> None:
        """Give the sequence back."""
        self.cache.free(self.seq)

    def refuse_uncommitted(self, what: str) -> None:
        """`IllegalEdit` if the lane has uncommitted tokens: nobody may act on what may be taken back."""
        if self.uncommitted:
            raise IllegalEdit(
                f"arm '{self.arm.label}' cannot be {what}: {self.uncommitted} of its {self.length} tokens are "
                "uncommitted"
            )

    def extend(self, tokens: Sequence[int], *, committed: bool) -> None:
        """Give the next tokens a slot. Uncommitted ones take fresh slots, also where a committed one reuses another."""
        if committed:
            with of_arm(self.arm.label):
                self.cache.extend(self.seq, tokens, reuse=self.reuse)
            self.reuse = None
            return
        if self.compressors is not None:
            raise IllegalEdit(f"arm '{self.arm.label}': compressed entries cannot be taken back, so nothing is drafted")
        if self.draft is None:
            self.draft = Draft([self._mark(0)])
        with of_arm(self.arm.label):
            self.cache.extend(self.seq, tokens, committed=False)

    def hold(self, tokens: Sequence[int], hidden: Mapping[int, Tensor]) -> None:
        """Note uncommitted tokens that have been fed, until `settle`."""
        if self.draft is None:
            raise IllegalEdit(f"arm '{self.arm.label}' has no uncommitted tokens")
        self.draft.tokens += tokens
        self.draft.hidden.append(hidden)
        self.draft.marks.append(self._mark(len(self.draft.tokens)))

    def settle(self, accepted: int) -> tuple[list[int], dict[int, Tensor]]:
        """Commit the first `accepted` uncommitted tokens and forget the others, as if they had never been fed.

        Returns the accepted tokens and their hidden states. `IllegalEdit` if there are fewer.
        """
        ledger, draft = self.cache.ledger, self.draft or Draft([self._mark(0)])
        with of_arm(self.arm.label):
            ledger.rollback(self.seq, self.uncommitted - accepted)
            ledger.commit(self.seq, accepted)
        self.index = {layer: keys[: self.length] for layer, keys in self.index.items()}
        back = next(mark for mark in reversed(draft.marks) if mark.tokens <= accepted)
        self.previous = dict(back.previous)
        if back.rng is not None:
            self.memory.generator().set_state(back.rng)
        if accepted:
            self.reuse = None
        self.draft = None
        return draft.settled(accepted)

    def _mark(self, tokens: int) -> Mark:
        rng = self.memory.rng
        return Mark(tokens, dict(self.previous), None if rng is None else rng.get_state())

    def with_state(self, state: State) -> None:
        """Replace what the policy carries."""
        self.memory = replace(self.memory, state=state)


def scope_of(layout: Layout, policy: Policy) -> frozenset[int]:
    """Layers with a cache of their own on which the policy acts, by its card and by what their state allows; all of
    them for dense where its card names none.

    `PolicyError` if the model has none or is not for the method, or lacks a layer that it taps.
    """
    card = policy.card
    if reason := refusal(policy, layout):
        raise PolicyError(f"policy '{card.name}' cannot act on {layout.model_type}: {reason}")
    storing = frozenset(layer.index for layer in layout.storing)
    scope = frozenset(index for index in storing if may_act(card, layout.layers[index])) or storing
    missing = sorted(policy.taps_in(len(layout.layers)) - set(range(len(layout.layers))))
    if missing:
        raise PolicyError(f"policy '{card.name}' taps layer {missing[0]}, the model has {len(layout.layers)} layers")
    return scope
