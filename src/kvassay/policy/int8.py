"""INT8 KV cache with a scale per token and KV head (`--kv-cache-dtype int8_per_token_head` of vLLM)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import Decision, Quantize
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Card
from kvassay.policy.fp8 import Fp8, fresh_tokens
from kvassay.policy.views import CacheView


@dataclass(frozen=True)
class Int8(Policy):
    """Every key and value in 8-bit integers from the moment it is written, one scale per token and head."""

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = dataclasses.replace(
        Fp8.card,
        name="int8",
        source="vLLM's int8_per_token_head KV cache",
        summary="stores all keys and values in int8 with a scale per token and head, new tokens included",
        deviations=(
            "float16 scale and zero point from minimum and maximum; vLLM keeps one float32 scale from the largest "
            "magnitude: as many bytes",
            "forked from a dense prefill, only what comes after it reads int8; an engine's prefill does too, as does "
            "a prefill of its own, which an experiment may ask for (`own_prefill`)",
            "drafted tokens are read as the model wrote them until they are accepted; an engine writes int8, too",
        ),
    )

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Encode every token that is not yet encoded."""
        return Decision({index: [Quantize(8, 8, tokens=tokens)] for index, tokens in fresh_tokens(cache).items()})
