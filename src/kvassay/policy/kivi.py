"""KIVI (Liu et al. 2024, arXiv 2402.02750, section 3): 2-bit keys per channel, values per token, a raw residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.cache.edits import KEEP_ALL, Decision, Quantize
from kvassay.errors import PolicyError
from kvassay.policy.base import ALL_APART, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class Kivi(Policy):
    """Keep the last `residual` to `residual + group - 1` tokens raw; encode older ones in groups of `group`.

    Groups are anchored at position 0, so one long prefill and the same tokens one by one come to the same codes.
    key_bits, value_bits: 2, 4 or 8
    group: tokens that share a key channel's scale, and channels that share a value's (paper: 32)
    residual: the most recent tokens that stay raw (paper: 32 to 128)
    """

    key_bits: int = 2
    value_bits: int = 2
    group: int = 32
    residual: int = 128

    per_head: ClassVar[frozenset[str]] = ALL_APART
    card: ClassVar[Card] = Card(
        name="kivi",
        effects=frozenset({Effect.QUANTIZE}),
        unit="value token, key channel",
        source="KIVI, arXiv 2402.02750 section 3 and models/llama_kivi.py of jy-yuan/KIVI",
        summary="quantises keys per channel and values per token in groups, with a raw residual window",
        when=frozenset({When.AFTER_PREFILL, When.EVERY_STEP}),
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        budgets=frozenset(),
        deviations=(
            "keys and values leave the residual together, one group at a time; the published code flushes `residual` "
            "keys at once and one value per step, so its raw keys number 0 to `residual`",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, group=1, residual=0)
        one_of(self, "key_bits", 2, 4, 8)
        one_of(self, "value_bits", 2, 4, 8)

    def encoded_up_to(self, length: int) -> int:
        """How many tokens, from position 0, are encoded at that length: by total age, not by call."""
        return max(0, (length - self.residual) // self.group * self.group)

    def quiet(self, length: int, generated: int) -> int:
        """Until the last token of a group leaves the residual window."""
        full = self.encoded_up_to(length) + self.group + self.residual
        return full - length - 1

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Encode whole groups that have left the residual window."""
        due = self.encoded_up_to(cache.length)
        if due == 0:
            return KEEP_ALL
        edits = {}
        for index, layer in cache.layers.items():
            self._check(layer)
            tokens = ((layer.positions < due) & layer.alive & ~layer.encoded).all(0)
            if bool(tokens.any()):
                edits[index] = [
                    Quantize(self.value_bits, self.key_bits, key_axis="channel", group=self.group, tokens=tokens)
                ]
        return Decision(edits)

    def _check(self, layer: LayerView) -> None:
        dim = layer.layer.kv.v_dim
        if dim % self.group:
            raise PolicyError(
                f"policy 'kivi': group={self.group} does not divide the value dimension {dim} of layer {layer.index}"
            )

    def expected_bytes(self, layer: LayerView, length: int, element_bytes: float) -> float:
        """Bytes one layer should hold at that length, by formula: codes, float16 scales and zeros, raw residual.

        A measured total far from this holds other memory.
        """
        kv, coded = layer.layer.kv, self.encoded_up_to(length)
        codes = coded * (kv.k_dim * self.key_bits + kv.v_dim * self.value_bits) / 8
        scales = 4 * (coded // self.group * kv.k_dim + coded * kv.v_dim // self.group)
        raw = (length - coded) * (kv.k_dim + kv.v_dim) * element_bytes
        return kv.kv_heads * (codes + scales + raw)
