"""Keep tokens at random under the common protection: what any scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.card import Card, Effect
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class Random(Policy):
    """Uniform scores, independent for every layer, KV head and token; seeded by the replay."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="random",
        effects=frozenset({Effect.EVICT}),
        source="control arm; as RandomPress of kvpress 0.5.5",
        summary="keeps tokens at random, each layer and KV head on its own",
    )

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """Uniform in [0, 1): [kv_heads, tokens]."""
        return torch.rand(layer.alive.shape, generator=memory.generator())
