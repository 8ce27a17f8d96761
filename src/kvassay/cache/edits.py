"""The edits a policy may ask for: few, declarative, validated and applied by the cache.

Token axes follow the order of the view the policy was shown (ascending position, ragged heads padded at
the end). `H` is the number of KV heads of the layer, `n` the tokens in the view, `D` the head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Evict:
    """Stop reading what is not kept: a mask of one sequence, nothing written, nothing copied.

    keep: bool [H, n] or [n]
    """

    keep: Tensor


@dataclass(frozen=True)
class Merge:
    """Fold tokens into others: the target becomes the mean weighted by `weight`, its own included.

    into: int64 [H, n], view index of the target token, -1 where a token is not merged
    weight: float [H, n], positive; of sources and targets alike
    values_only: leave the target's key as it is
    """

    into: Tensor
    weight: Tensor
    values_only: bool = True


@dataclass(frozen=True)
class Quantize:
    """Encode tokens in packed codes with their own scales; 0 bits drops the token (or key channel).

    value_bits: one width, or int [H, n]
    key_bits: one width, or int [H, n] (per token), or int [H, D] with `key_axis="channel"`
    key_axis: "channel" (a scale per channel over groups of `group` tokens; None = all tokens at once)
        or "token" (a scale per token over the head dimension)
    number: "int" (asymmetric min/max, float16 scale and zero) or "fp8_e4m3" (no scale)
    tokens: bool [n] or [H, n], the scope; None = every token of the view
    clamp_zero: keep integer zero points within the codes (`codec.Packed.encode`)
    Widths: 0, 2, 4, 8, 16; 16 keeps the element as it is.
    """

    value_bits: int | Tensor
    key_bits: int | Tensor
    key_axis: Literal["channel", "token"] = "token"
    group: int | None = None
    number: Literal["int", "fp8_e4m3"] = "int"
    tokens: Tensor | None = None
    clamp_zero: bool = False


@dataclass(frozen=True)
class KeyNorm:
    """The RMS norm per head that a model applies between its key projection and the rotation.

    weight: float [D], what a normalised key is multiplied with
    eps: added to the mean square
    rows: float [H, n, D], the keys before the norm, which cannot be had back from what is cached
    """

    weight: Tensor
    eps: float
    rows: Tensor


@dataclass(frozen=True)
class LowRank:
    """Store coefficients in place of keys and values; they are rebuilt when read.

    head_groups: KV heads that share one basis, e.g. ((0, 1, 2),)
    value_groups: the same for values, where it differs
    key_encode / value_encode: per head group a tensor [heads * D, rank]; None leaves that side as it is
    key_decode / value_decode: per head group a tensor [rank, heads * D]
    domain: "post_rope" (keys as cached) or "pre_rope" (un-rotated first, rotated again when read)
    tokens: bool [n], the scope; None = every token of the view
    key_bias / value_bias: float [H, D], taken off before the coefficients are and added when they are rebuilt
    key_norm: the coefficients are of the keys before this norm, which is applied when they are rebuilt; "pre_rope" only
    """

    head_groups: tuple[tuple[int, ...], ...]
    key_encode: tuple[Tensor, ...] | None
    key_decode: tuple[Tensor, ...] | None
    value_encode: tuple[Tensor, ...] | None
    value_decode: tuple[Tensor, ...] | None
    domain: Literal["post_rope", "pre_rope"] = "post_rope"
    tokens: Tensor | None = None
    value_groups: tuple[tuple[int, ...], ...] | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    key_norm: KeyNorm | None = None


@dataclass(frozen=True)
class Bias:
    """Add a log weight to a slot's attention logit from now on (a token that stands for several).

    log_weight: float [H, n]
    before_softcap: add before the layer's soft-cap, else after it (no difference without one)
    """

    log_weight: Tensor
    before_softcap: bool = True


Edit = Evict | Merge | Quantize | LowRank | Bias


@dataclass(frozen=True)
class Decision:
    """What one policy wants of one sequence, for all layers at once.

    edits: layer index -> edits, applied in the order merge, bias, encode, evict
    compact: afterwards move live slots to the front and free the blocks behind (copies are charged)
    reuse: position of an evicted token whose slot the next token takes, at every layer and head
    facts: what the policy wants reported of this decision, by name (shares, counts); changes nothing
    """

    edits: Mapping[int, Sequence[Edit]] = field(default_factory=dict)
    compact: bool = False
    reuse: int | None = None
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """True if nothing is asked for."""
        return not any(self.edits.values()) and not self.compact and self.reuse is None


KEEP_ALL = Decision()
