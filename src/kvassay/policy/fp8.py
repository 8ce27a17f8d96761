"""FP8 KV cache: what a user can switch on today (`--kv-cache-dtype fp8` of vLLM, scale 1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import Decision, Quantize
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, Prefill, When
from kvassay.policy.views import CacheView


@dataclass(frozen=True)
class Fp8(Policy):
    """Every key and value in e4m3 without a scale, from the moment it is written; saturates at 448."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="fp8",
        effects=frozenset({Effect.QUANTIZE}),
        source="vLLM's fp8_e4m3 KV cache with its default scale 1.0",
        summary="stores all keys and values in fp8 e4m3, new tokens included",
        when=frozenset({When.AFTER_PREFILL, When.ON_WRITE}),
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        prefill=Prefill.OWN,
        budgets=frozenset(),
        deviations=(
            "forked from a dense prefill, only what comes after it reads fp8; an engine's prefill does too, as does "
            "a prefill of its own, which an experiment may ask for (`own_prefill`)",
            "drafted tokens are read as the model wrote them until they are accepted; an engine writes fp8, too",
        ),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Encode every token that is not yet encoded."""
        return Decision(
            {index: [Quantize(8, 8, number="fp8_e4m3", tokens=tokens)] for index, tokens in fresh_tokens(cache).items()}
        )


def fresh_tokens(cache: CacheView) -> dict[int, Tensor]:
    """bool [kv_heads, tokens] per layer that holds tokens in no code yet: which."""
    fresh = {index: layer.alive & ~layer.encoded for index, layer in cache.layers.items()}
    return {index: tokens for index, tokens in fresh.items() if bool(tokens.any())}
