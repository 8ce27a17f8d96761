"""Expected attention (Devoto et al. 2025, arXiv 2510.00636): attention that future queries will pay, on average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvassay.cache.rope import rotate, unrotate
from kvassay.policy.base import ALL_APART, EVERY_QUERY, Memory, Policy
from kvassay.policy.card import Card, Effect, Evidence
from kvassay.policy.checks import at_least, every_query
from kvassay.policy.views import LayerView


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Score = E[attention] x ||V||, for a normal distribution of queries fitted on the prompt's.

    future: positions after the context over which the rotation is averaged
    skip: first positions left out of the statistics and always kept (their hidden states are outliers)
    """

    future: int = 512
    skip: int = 4

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="expected-attention",
        effects=frozenset({Effect.EVICT}),
        source="Expected Attention, arXiv 2510.00636; scores as ExpectedAttentionPress of kvpress 0.5.5",
        summary="keeps what queries distributed as the prompt's would attend to, times the value's norm",
        evidence=frozenset({Evidence.QUERIES, Evidence.KEYS, Evidence.VALUES}),
        limits=("its statistics run over every prompt query; refused above 65,536 tokens",),
    )

    def __post_init__(self) -> None:
        at_least(self, future=1, skip=0)

    @property
    def unrotates(self) -> bool:
        """Its statistics are of queries before rotation."""
        return True

    @property
    def queries_needed(self) -> int:
        """All of them: mean and covariance are over the whole prompt."""
        return EVERY_QUERY

    def score(self, layer: LayerView, memory: Memory) -> Tensor:
        """[kv_heads, tokens]; the first `skip` tokens above all."""
        mean, covariance = self.statistics(layer)
        first = layer.alive & (layer.positions < self.skip)
        keys = layer.keys.masked_fill(~layer.alive[..., None], 0.0)
        group, scale = layer.layer.q_heads // layer.kv_heads, layer.layer.scale
        total = torch.zeros_like(keys[..., 0])
        for head in range(layer.layer.q_heads):
            of = head // group
            spread = ((keys[of] @ covariance[head]) * keys[of]).sum(-1) * (scale**2 / 2)
            logit = (keys[of] @ mean[head]) * scale + spread
            logit = logit.masked_fill(first[of] | ~layer.alive[of], -torch.inf)
            total[of] += torch.softmax(logit, dim=-1)
        score = total / group * layer.values.norm(dim=-1)
        score = score.masked_fill(~layer.alive, 0.0)
        return score.masked_fill(first, float(score.max()) + 1)

    def statistics(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """Mean [q_heads, dim] and covariance [q_heads, dim, dim] of future queries, post-RoPE."""
        every_query(self, layer, first=self.skip)
        seen = layer.queries(layer.length - self.skip)
        q = unrotate(seen.q, seen.positions, layer.layer.rope)
        mean = q.mean(1, keepdim=True)
        centred = q - mean
        covariance = centred.transpose(1, 2) @ centred / q.shape[1]
        turn = self._turn(layer, q)
        return mean[:, 0] @ turn, turn.T @ covariance @ turn

    def _turn(self, layer: LayerView, like: Tensor) -> Tensor:
        """Mean rotation over the next `future` positions, [dim, dim]: a row vector times it is turned."""
        axes = torch.eye(like.shape[-1], dtype=like.dtype)
        positions = torch.arange(layer.length, layer.length + self.future)
        turned = rotate(axes[:, None].expand(-1, self.future, -1), positions, layer.layer.rope)
        return turned.mean(1)
