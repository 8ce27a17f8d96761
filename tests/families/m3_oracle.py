"""The float64 oracle of MiniMax-M3: index queries and keys by the model's own layers, blocks chosen by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.replay.oracle import Oracle
from tests.replay.worlds import World


def blocks_of(score: Tensor, alive: Tensor, block: int, topk: int) -> list[int]:
    """The blocks of one head: score and alive [tokens] up to the query's own, which is the last."""
    best: dict[int, float] = {}
    for position, (value, held) in enumerate(zip(score.tolist(), alive.tolist(), strict=True)):
        if held:
            best[position // block] = max(value, best.get(position // block, -math.inf))
    best[(len(score) - 1) // block] = math.inf
    return sorted(sorted(best, key=lambda b: -best[b])[:topk])


class M3Oracle(Oracle):
    """Selects as the model does, among what a method has left: `alive`, per KV head."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        config, prefix = self.model.config, world.trace.prefix
        self.block, self.topk = config.index_block_size, config.index_topk_blocks
        self.sparse = [layer.index for layer in self.layout.layers if layer.topk is not None]
        self.index_keys = {i: prefix.cache(i, "index_keys").double() for i in self.sparse}
        self.read: dict[int, list[float]] = {layer.index: [] for layer in self.layout.layers}
        """Tokens per KV head that each step reads, by layer."""
        self.chosen: dict[int, list[list[list[int]]]] = {i: [] for i in self.sparse}
        """Blocks of each head and step, by layer."""
        self._queries: dict[int, Tensor] = {}
        self.select = self._selected

    def _selected(self, oracle: Oracle, index: int, q: Tensor) -> Tensor | None:
        alive = self.alive[index]
        if index not in self.sparse:
            self.read[index].append(float(alive.sum(1).double().mean()))
            return None
        score = self._queries.pop(index) @ self.index_keys[index].T
        chosen = [blocks_of(row, held, self.block, self.topk) for row, held in zip(score, alive, strict=True)]
        self.chosen[index].append(chosen)
        allowed = torch.zeros(alive.shape, dtype=torch.bool)
        for head, blocks in enumerate(chosen):
            for b in blocks:
                allowed[head, b * self.block : (b + 1) * self.block] = True
        self.read[index].append(float((allowed & alive).sum(1).double().mean()))
        return allowed.repeat_interleave(q.shape[0] // len(alive), 0)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        modules = {i: self.model.get_decoder().layers[i].self_attn.indexer for i in self.sparse}
        for index, module in modules.items():
            module.forward = self._scoring(index, module)
        try:
            with super()._installed():
                yield
        finally:
            for module in modules.values():
                del module.forward

    def _scoring(self, index: int, module: Any) -> Any:
        def forward(hidden: Tensor, rotary: tuple[Tensor, Tensor], *_: Any) -> None:
            cos, sin = (part[0, 0] for part in rotary)
            q = module.q_norm(module.q_proj(hidden[0, 0]).view(-1, module.head_dim))
            k = module.k_norm(module.k_proj(hidden[0, 0])[None])
            self._queries[index] = rotated(q, cos, sin)
            self.index_keys[index] = torch.cat([self.index_keys[index], rotated(k, cos, sin)])

        return forward


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first elements of [heads, dim], as many as there are angles, in half-split pairs."""
    half = cos.shape[-1] // 2
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    c, s = cos[:half], sin[:half]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)
