"""MiniMax-M3's block selection with index projections distilled from attention on a calibration text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.policy.base import Artefact, Calibration, Memory
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least
from kvassay.policy.distill import fit_index
from kvassay.policy.m3 import OWN_SCORER, PROTECTED, SOURCE, M3Selector
from kvassay.policy.views import BlockView, LayerView


@dataclass(frozen=True)
class M3Distilled(M3Selector):
    """A token scores the product of an index query per KV head and one index key, as M3's; both are linear in the
    layer's cached keys and queries, fitted to its attention scores on a calibration text.

    index_dim: of index queries and keys (M3: 128, beside 4 KV heads of 128)
    """

    index_dim: int = 32

    card: ClassVar[Card] = Card(
        name="m3-distilled",
        effects=frozenset({Effect.SELECT}),
        source=SOURCE,
        summary="M3's block selection by small index projections, distilled from attention on a calibration text",
        when=frozenset({When.OFFLINE, When.BLOCK_FULL, When.EVERY_STEP}),
        unit="block",
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY, Evidence.QUERIES}),
        budgets=frozenset({"read_tokens"}),
        deviations=(
            OWN_SCORER,
            PROTECTED,
            "index queries and keys are projections of the layer's rotated queries and keys, not of its hidden state, "
            "and have no norm or rotation of their own",
            "the fit is the least-squares one of the heads' mean attention scores; DeepSeek trains its indexer on the "
            "divergence from attention itself, which fitted a short calibration text better and other text worse",
            "the model is not trained to live with the selection",
        ),
        limits=(
            "says what M3's block shape does with a modest scorer, not what M3 does",
            "fitted on one short text; longer contexts and other prompts are outside it",
            "one block list per KV head: an attention kernel that takes one block table per request cannot run it",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, index_dim=1)

    def fit(self, source: Calibration) -> Artefact:
        """Per layer, `layer3.query` [kv_heads, index_dim, group * k_dim], `layer3.key` [index_dim, kv_heads * k_dim].

        From the recorded queries of the calibration text and all its keys, a dense layer left out.
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in source.layers():
            if index >= self.dense_layers:
                queries = layer.queries(layer.length).q.float()
                found = fit_index(queries, layer.keys, layer.layer.scale, self.index_dim)
                tensors |= {f"layer{index}.query": found.query, f"layer{index}.key": found.key}
        return Artefact(tensors, source.sha256)

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        """`index_key` bfloat16 [blocks, block_size, index_dim]: one key per token, shared by the KV heads."""
        if block.layer.index < self.dense_layers:
            return {"index_key": torch.empty(len(block.keys), block.keys.shape[2], 0, dtype=torch.bfloat16)}
        project = _learnt(block.artefact, f"layer{block.layer.index}.key")
        key = block.keys.transpose(1, 2).flatten(2).float() @ project.T
        return {"index_key": key.to(torch.bfloat16)}

    def ranks(self, layer: LayerView, query: Tensor, memory: Memory) -> Tensor:
        """Largest product of each full block's tokens, or their log-sum-exp: [kv_heads, queries, blocks]."""
        project = _learnt({} if memory.artefact is None else memory.artefact.tensors, f"layer{layer.index}.query")
        rows = query.unflatten(0, (layer.kv_heads, -1)).transpose(1, 2).flatten(2).float()
        key = self.grouped(layer.side_data("index_key"), layer).flatten(1, 2).float()  # [blocks, block, index_dim]
        score = (rows @ project.mT) @ key.flatten(0, 1).T
        score = score.unflatten(-1, (-1, self.block)) if len(key) else score.unsqueeze(-1)
        return score.amax(-1) if self.pool == "max" else score.logsumexp(-1)


def _learnt(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise PolicyError(
            f"policy 'm3-distilled': there is no '{name}': it was fitted on another model, or not at all; "
            "fit it on a calibration trace first"
        )
    return tensors[name]
