"""A policy driven over the real paged cache, token by token, as the replay does it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Decision
from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.layout.model import Layer, Layout
from kvassay.policy.base import Memory, Policy
from kvassay.policy.budget import Allowance, Protection
from kvassay.policy.card import Evidence, When
from kvassay.policy.queries import Queries
from kvassay.policy.views import CacheView, LayerView, Meter


@dataclass
class Run:
    """One sequence of one layer under one policy; `k`, `v` [kv_heads, tokens, dim] are what gets written."""

    policy: Policy
    layer: Layer
    k: Tensor
    v: Tensor
    queries: Tensor | None = None
    """Prompt queries [q_heads, tokens, dim] of the first positions, where the policy asks for them."""
    tokens: int | None = None
    """Budget in tokens; None for a policy without one."""
    protection: Protection = field(default_factory=lambda: Protection(0, 0))
    memory: Memory = field(default_factory=Memory)
    block_size: int = 16
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = Layout("tiny", (self.layer,), 8, 8, 4096)
        group = GroupSpec(0, (0,), (self.layer.kv.kv_heads,), self.block_size)
        self.cache = PagedCache(layout, [group], 64, poison=True)
        self.seq, _ = self.cache.create([])

    def prefill(self, tokens: int) -> None:
        self.append(tokens)
        self.context = tokens
        if When.AFTER_PREFILL in self.policy.card.when:
            self.decide()

    def step(self) -> None:
        self.append(1)
        if self.policy.card.when & {When.ON_WRITE, When.EVERY_STEP}:
            self.decide()

    def append(self, tokens: int) -> None:
        start = self.length
        self.cache.extend(self.seq, list(range(start, start + tokens)))
        rows = slice(start, start + tokens)
        self.cache.write(0, [self.seq], self.k[None, :, rows], self.v[None, :, rows])

    def decide(self) -> None:
        context = self.context
        budget = Allowance(None, context if self.tokens is None else self.tokens, context, self.protection)
        view = self.view()
        scores = {0: self.policy.score(view, self.memory)} if self.policy.writes_score else {}
        cache = CacheView({0: view}, self.length, context)
        decision = self.policy.decide(cache, scores, self.memory, budget)
        self.decisions.append(decision)
        self.cache.apply(self.seq, decision)
        if not decision.empty:
            self.cache.check()

    def view(self) -> LayerView:
        offered = {}
        if self.queries is not None:
            shown = Queries(self.queries, torch.arange(self.queries.shape[1]))
            offered[Evidence.QUERIES] = lambda: shown
        return LayerView(
            self.layer,
            self.policy.card,
            lambda: self.cache.layer(self.seq, 0),
            length=self.length,
            protection=self.protection,
            meter=Meter(2.0),
            queries=offered,
            block_size=self.block_size,
        )

    @property
    def length(self) -> int:
        return self.cache.ledger.length(self.seq)

    @property
    def data(self) -> LayerData:
        return self.cache.layer(self.seq, 0)

    @property
    def encoded(self) -> list[int]:
        """Positions held in a code, of the first head."""
        data = self.data
        return [] if data.encoded is None else data.positions[0][data.encoded[0]].tolist()

    def coded_bytes(self, element_bytes: float) -> float:
        """Bytes of all encoded segments, off their tensors."""
        segments = self.cache.ledger.segments(self.seq, 0)
        return sum(self.cache.encoded[s.id].size.total(element_bytes) for s in segments)
