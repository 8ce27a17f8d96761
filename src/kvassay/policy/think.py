"""ThinK (Xu et al. 2024, arXiv 2407.21018, section 3): drop the key channels that queries hardly use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, Quantize
from kvassay.errors import PolicyError
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, Evidence
from kvassay.policy.checks import at_least, enough_queries
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class ThinK(Policy):
    """Drop, per KV head, the share of key channels with the least |q_i| |k_i| over the window's queries.

    prune: share of key channels dropped (paper: 0.4)
    window: last prompt queries that judge (paper: 32)
    residual: newest tokens whose keys stay whole (paper: 32)
    """

    prune: float = 0.4
    window: int = 32
    residual: int = 32

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="think",
        effects=frozenset({Effect.QUANTIZE}),
        source="ThinK, arXiv 2407.21018 section 3; channel scores as ThinKPress of kvpress 0.5.5",
        summary="drops key channels of least query-driven norm; values stay whole",
        unit="key channel",
        evidence=frozenset({Evidence.QUERIES, Evidence.KEYS}),
        approximates=frozenset({Approximates.KEYS}),
        budgets=frozenset(),
        deviations=(
            "prunes the context once; tokens generated later keep all channels",
            "post-RoPE channels, one set per KV head for all its query heads (mean of their squared norms)",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, window=1, residual=0)
        if not 0 < self.prune < 1:
            raise PolicyError(f"policy 'think': prune={self.prune}, must be a share of channels in (0, 1)")

    @property
    def queries_needed(self) -> int:
        """The window's."""
        return self.window

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Re-store old tokens without the dropped key channels; those cost nothing any more."""
        edits = {}
        for index, layer in cache.layers.items():
            tokens = layer.alive & ~layer.encoded & (layer.positions < layer.length - self.residual)
            if bool(tokens.any()):
                bits = torch.where(self.kept_channels(layer), 16, 0)
                edits[index] = [Quantize(16, bits, key_axis="channel", tokens=tokens)]
        return Decision(edits)

    def kept_channels(self, layer: LayerView) -> Tensor:
        """bool [kv_heads, k_dim]."""
        q = layer.queries(self.window).q
        enough_queries(self, layer, q.shape[1], self.window)
        keys = layer.keys.masked_fill(~layer.alive[..., None], 0.0)
        asked = layer.group_sum(q.square().mean(1))
        held = keys.square().sum(1) / layer.alive.sum(1, keepdim=True).clamp(min=1)
        dim = keys.shape[-1]
        dropped = torch.topk(asked * held, int(dim * self.prune), dim=-1, largest=False).indices
        return torch.ones(layer.kv_heads, dim, dtype=torch.bool).scatter_(1, dropped, False)
