"""Low-rank key and value projections, fitted on the model's weights: what DynaCalKV and ReCalKV share.

Ranks are split by Fisher scores over all key and value projections; how a layer's key heads are grouped, and what rank
each group gets, is the subclass's. Keys are factored before norm and rotation, per group; values whole.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.cache.edits import Decision, KeyNorm, LowRank
from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.layout.model import Layer
from kvassay.policy.base import Artefact, Calibration, Memory, Policy
from kvassay.policy.budget import Allowance
from kvassay.policy.checks import at_least
from kvassay.policy.lowrank_factors import LayerStats, basis, gather, kept, value_basis
from kvassay.policy.lowrank_heads import Groups
from kvassay.policy.lowrank_ranks import fisher_split
from kvassay.policy.views import CacheView, LayerView


@dataclass(frozen=True)
class LowRankProjections(Policy):
    """Store every token's keys and values as coefficients of low-rank projections.

    rank: share in (0, 1] of all key and value dimensions that is kept; 1 reproduces to rounding
    multiple: a matrix's rank is rounded to a multiple of this, and is at least it
    whitened: key factors weigh errors by the calibration inputs; False factors the plain weights
    passes: alternating passes over the value factors
    group: KV heads per group of the uniform baseline, which the parameter ceiling is made of as well
    samples, tokens: pieces of calibration text and their length, as many as the text has
    """

    rank: float = 0.5
    multiple: int = 8
    whitened: bool = True
    passes: int = 1
    group: int = 4
    samples: int = 16
    tokens: int = 512

    def __post_init__(self) -> None:
        at_least(self, multiple=1, passes=0, group=1, samples=1, tokens=2)
        if not 0 < self.rank <= 1:
            raise PolicyError(f"policy '{self.card.name}': rank={self.rank}, must be a fraction in (0, 1]")

    @property
    def unrotates(self) -> bool:
        """Keys are held as they are before the rotation."""
        return True

    @abstractmethod
    def key_groups(self, stats: LayerStats, heads: Tensor, rank: int) -> tuple[Groups, list[int]]:
        """KV heads of a layer by group, and each group's rank; heads are the key weights [kv_heads, dim, in]."""

    def fit(self, source: Calibration) -> Artefact:
        """Per layer `layer3.groups` int64 [kv_heads], `layer3.key.0` [group dims, rank] for each group, `layer3.value`
        [dims, rank], and where the model has them the biases, the key norm and the weight it takes keys from."""
        stats = gather(source, self.samples, self.tokens)
        shapes = {index: view.layer.kv.kv_heads for index, view in source.layers()}
        sides = [(one.weights.key, one.weights.value) for one in stats.values()]
        dims = [side.weight.shape[0] for pair in sides for side in pair]
        ranks = fisher_split([f for one in stats.values() for f in one.fisher], dims, self.rank, self.multiple)
        tensors: dict[str, Tensor] = {}
        for at, (index, one) in enumerate(stats.items()):
            fitted = self._layer(one, shapes[index], ranks[2 * at], ranks[2 * at + 1])
            tensors |= {f"layer{index}.{name}": tensor for name, tensor in fitted.items()}
        return Artefact(tensors, source.sha256)

    def _layer(self, stats: LayerStats, kv_heads: int, key_rank: int, value_rank: int) -> dict[str, Tensor]:
        weights = stats.weights
        heads = weights.key.weight.unflatten(0, (kv_heads, -1))
        groups, ranks = self.key_groups(stats, heads, key_rank)
        found = {"groups": torch.empty(kv_heads, dtype=torch.int64)}
        for number, (group, rank) in enumerate(zip(groups, ranks, strict=True)):
            found["groups"][list(group)] = number
            found[f"key.{number}"] = self.key_basis(stats, heads[list(group)].flatten(0, 1), rank).float()
        found["value"] = value_basis(weights.value.weight, stats.moment, value_rank, self.passes).float()
        for side, projection in (("key", weights.key), ("value", weights.value)):
            if projection.bias is not None:
                found[f"{side}_bias"] = projection.bias.unflatten(0, (kv_heads, -1))
        if weights.key_norm is not None:
            found |= {"key_weight": weights.key.weight, "key_norm": weights.key_norm.weight}
            found["key_eps"] = torch.tensor(weights.key_norm.eps, dtype=torch.float64)
        return found

    def key_basis(self, stats: LayerStats, weight: Tensor, rank: int) -> Tensor:
        """Basis of one group's keys, weight [group dims, in]."""
        return basis(weight, stats.moment if self.whitened else None, rank)

    def decide(self, cache: CacheView, scores: Mapping[int, Tensor], memory: Memory, budget: Allowance) -> Decision:
        """Encode every token that is not yet encoded."""
        fresh = {i: layer for i, layer in cache.layers.items() if bool((layer.alive & ~layer.encoded).any())}
        edits = {index: self._edit(layer.layer, memory, self._norm(layer, memory)) for index, layer in fresh.items()}
        return Decision({index: [edit] for index, edit in edits.items()}, facts=kept(edits.values()))

    def project(self, layer: Layer, memory: Memory) -> LowRank:
        """The thin projections themselves, for a prefill of the method's own."""
        return self._edit(layer, memory, None)

    def _edit(self, layer: Layer, memory: Memory, norm: KeyNorm | None) -> LowRank:
        found = _of_layer(self.card.name, memory, layer.index)
        labels = found["groups"].tolist()
        groups = tuple(tuple(h for h, mine in enumerate(labels) if mine == number) for number in range(max(labels) + 1))
        keys = tuple(found[f"key.{number}"] for number in range(len(groups)))
        return LowRank(
            groups,
            keys,
            tuple(key.T for key in keys),
            (found["value"],),
            (found["value"].T,),
            domain="pre_rope",
            value_groups=(tuple(range(len(labels))),),
            key_bias=found.get("key_bias"),
            value_bias=found.get("value_bias"),
            key_norm=norm,
        )

    def _norm(self, layer: LayerView, memory: Memory) -> KeyNorm | None:
        """The key norm with the keys before it, from the layer's inputs; None for a model without one."""
        found = _of_layer(self.card.name, memory, layer.index)
        if "key_norm" not in found:
            return None
        rows, bias = layer.layer_input(), found.get("key_bias", torch.zeros(1, 1))
        at = torch.searchsorted(rows.positions, layer.positions[0].contiguous()).clamp(max=len(rows.positions) - 1)
        if bool(((rows.positions[at] != layer.positions[0]) & ~layer.encoded[0]).any()):
            raise EvidenceMissing(f"policy '{self.card.name}' needs the input of every token of layer {layer.index}")
        keys = (rows.values[at] @ found["key_weight"].T).unflatten(1, (layer.kv_heads, -1)).transpose(0, 1)
        return KeyNorm(found["key_norm"], float(found["key_eps"]), keys + bias[:, None])


def _of_layer(name: str, memory: Memory, index: int) -> dict[str, Tensor]:
    """A layer's tensors of the artefact, by their name within the layer."""
    start = f"layer{index}."
    tensors = {} if memory.artefact is None else memory.artefact.tensors
    found = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
    if not found:
        raise PolicyError(f"policy '{name}': nothing was fitted for layer {index}; fit it on a calibration trace first")
    return found
