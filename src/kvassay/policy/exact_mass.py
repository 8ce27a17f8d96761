"""Reference for selection: read the tokens that this very query attends to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import one_of
from kvassay.policy.readset import ReadSet
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class ExactMass(Policy):
    """Top tokens by exact attention of the current query, the protected ones first.

    heads: "kv" takes one set per KV head, by the sum over its query heads; "q" one set per query head,
        whose union may read up to q_heads / kv_heads times the budget
    """

    heads: Literal["kv", "q"] = "kv"

    per_head: ClassVar[frozenset[str]] = ALL_APART
    reads_together: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="exact_mass",
        effects=frozenset({Effect.SELECT}),
        source="reference arm",
        summary="reads the tokens of highest exact attention mass; scans all keys to find them",
        when=frozenset({When.EVERY_STEP}),
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY}),
        budgets=frozenset({"read_tokens"}),
        reference=True,
        deviations=("blind to values: a reference for selectors of attention mass, not a bound on quality",),
    )

    def __post_init__(self) -> None:
        one_of(self, "heads", "kv", "q")

    def read(
        self, layer: LayerView, query: Tensor, memory: Memory, budget: Allowance, previous: ReadSet | None
    ) -> ReadSet | None:
        """The slots of the top `budget.tokens`: unit 1, [queries, kv_heads | q_heads, k]."""
        if budget.covers_all or layer.tokens <= budget.tokens:
            return None
        mass = layer.mass(query)
        slots, alive, forced = layer.slots, layer.alive, layer.protected_from(query.shape[1])
        if self.heads == "kv":
            mass = layer.group_sum(mass)
        else:
            group = layer.layer.q_heads // layer.kv_heads
            slots, alive, forced = (x.repeat_interleave(group, dim=0) for x in (slots, alive, forced))
        mass = mass.masked_fill(forced, torch.inf).masked_fill(~alive[:, None], -1.0)
        best, index = mass.topk(budget.tokens, dim=-1)
        chosen = slots[:, None].expand_as(mass).gather(-1, index)
        return ReadSet(chosen.masked_fill(best < 0, -1).transpose(0, 1))
