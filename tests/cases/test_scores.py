"""Scores that starve the newest tokens."""

from __future__ import annotations

import torch

from kvassay.cache.data import LayerData
from kvassay.policy import registry
from kvassay.policy.budget import Protection
from tests.policy.build import DIM, KV_HEADS, Q_HEADS, kept, random_kv, view


def test_summed_attention_does_not_keep_the_first_tokens_alone() -> None:
    """rajveer43/VeloxQuant-MLX #137, PR #141: a new token's sum begins at 0 and the least sum goes: the kept positions
    were exactly 0 to budget - 1, and no generated token survived 300 to 400 steps."""
    prompt, total, budget = 64, 104, 16
    k, v = random_kv(total)
    k[:, :prompt] = 1.0  # every query looks at the prompt
    k[:, prompt:] = -1.0
    q = torch.ones(Q_HEADS, total, DIM, dtype=torch.float64)
    policy = registry.make("h2o")
    for row in kept(policy, view(policy, LayerData.dense(k, v), queries=q), budget):
        assert row != list(range(budget))
        assert sum(position >= prompt for position in row) == budget // 2


def test_protected_tokens_stay_whatever_they_score() -> None:
    """The same thread asks for a grace of 16 tokens; here it is the experiment's protection, equal for every arm."""
    k, v = random_kv(64)
    policy = registry.make("knorm")
    k[:, -16:] *= 100  # long keys go first
    protected = Protection(0, 16)
    shown = view(policy, LayerData.dense(k, v), recent=protected.recent)
    assert [row[-16:] for row in kept(policy, shown, 20)] == [list(range(48, 64))] * KV_HEADS
