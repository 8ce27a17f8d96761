"""Low-rank keys and values per head group, with bases from a calibration text.

The plainest of a family (Eigen Attention 2408.05646, Palu 2407.21118, ReCalKV): truncated SVD of the cached
rows themselves, no weights fused, no rank search, no query statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, LowRank
from kvassay.errors import PolicyError
from kvassay.policy.base import Artefact, Calibration, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.card import Approximates, Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class Svd(Policy):
    """Project each head group's rows on the leading right singular vectors of its calibration rows.

    rank: fraction in (0, 1] of a group's dimension (heads * head_dim) that is kept; 1 reproduces to rounding
    heads: KV heads per group; 0 puts all heads of a layer in one
    domain: keys "pre_rope" (un-rotated, rotated again when read) or "post_rope" (as cached)
    """

    rank: float = 0.5
    heads: int = 0
    domain: Literal["pre_rope", "post_rope"] = "pre_rope"

    card: ClassVar[Card] = Card(
        name="svd",
        effects=frozenset({Effect.LOW_RANK}),
        source="truncated SVD of calibration rows; nearest published: Eigen Attention, arXiv 2408.05646",
        summary="stores keys and values of the context as low-rank coefficients per head group",
        when=frozenset({When.OFFLINE, When.AFTER_PREFILL}),
        evidence=frozenset({Evidence.KEYS, Evidence.KEYS_UNROTATED, Evidence.VALUES}),
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        budgets=frozenset(),
        deviations=(
            "the published methods fuse the bases into the projection weights, so prefill sees them too; here the "
            "context is encoded after a dense prefill and generated tokens stay raw",
            "the same rank fraction for keys, values and all layers; Eigen Attention sets ranks by an error threshold",
        ),
    )

    def __post_init__(self) -> None:
        at_least(self, heads=0)
        one_of(self, "domain", "pre_rope", "post_rope")
        if not 0 < self.rank <= 1:
            raise PolicyError(f"policy 'svd': rank={self.rank}, must be a fraction in (0, 1]")

    @property
    def unrotates(self) -> bool:
        """In the domain before rotation."""
        return self.domain == "pre_rope"

    def fit(self, source: Calibration) -> Artefact:
        """One orthonormal basis [heads * dim, rank] per layer, side and head group.

        Tensors are named `layer3.key.0`, `layer3.value.0`: layer, side, head group.
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in source.layers():
            keys = layer.keys_unrotated if self.domain == "pre_rope" else layer.keys
            for number, group in enumerate(self.head_groups(layer)):
                tensors[f"layer{index}.key.{number}"] = self._basis(keys[list(group)])
                tensors[f"layer{index}.value.{number}"] = self._basis(layer.values[list(group)])
        return Artefact(tensors, source.sha256)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Encode every token that is not yet encoded."""
        if memory.artefact is None:
            raise PolicyError("policy 'svd' has no artefact: fit it on a calibration trace first")
        return Decision(
            {
                index: [self._edit(layer, memory.artefact)]
                for index, layer in cache.layers.items()
                if bool((layer.alive & ~layer.encoded).any())
            }
        )

    def head_groups(self, layer: LayerView) -> tuple[tuple[int, ...], ...]:
        """KV heads that share a basis."""
        size = self.heads or layer.kv_heads
        return tuple(tuple(range(i, min(i + size, layer.kv_heads))) for i in range(0, layer.kv_heads, size))

    def _basis(self, rows: Tensor) -> Tensor:
        """Leading right singular vectors of rows [heads, tokens, dim] laid out as [tokens, heads * dim].

        From the Gram matrix in float64: its size does not grow with the calibration text.
        """
        flat = rows.transpose(0, 1).flatten(1).double()
        rank = max(1, round(self.rank * flat.shape[1]))
        vectors = torch.linalg.eigh(flat.T @ flat).eigenvectors
        return vectors.flip(1)[:, :rank].float().contiguous()

    def _edit(self, layer: LayerView, artefact: Artefact) -> LowRank:
        groups = self.head_groups(layer)
        key, value = (
            tuple(_tensor(artefact, f"layer{layer.index}.{side}.{number}") for number in range(len(groups)))
            for side in ("key", "value")
        )
        back_key, back_value = (tuple(basis.T.contiguous() for basis in side) for side in (key, value))
        return LowRank(groups, key, back_key, value, back_value, domain=self.domain)


def _tensor(artefact: Artefact, name: str) -> Tensor:
    if name not in artefact.tensors:
        raise PolicyError(f"policy 'svd': the artefact has no '{name}'; it was fitted on another model or grouping")
    return artefact.tensors[name]
