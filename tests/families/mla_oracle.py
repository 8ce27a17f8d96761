"""The float64 oracle of MLA: keys and values of every head are made anew of all latents, nothing is absorbed.

The model's own indexer chooses, in float64, from index keys that a plain list holds; what a method has dropped is
masked from it. What a sharing layer reads comes through the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.replay.oracle import Oracle
from tests.replay.worlds import World


class MlaOracle(Oracle):
    """`k` and `v` are one thing, [1, tokens, dim + rope]: a method that rewrites a row rewrites both."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.v = self.k
        prefix = world.trace.prefix
        indexed = [layer.index for layer in self.layout.layers if layer.index_keys is not None]
        self.index_keys = {i: prefix.cache(i, "index_keys").double() for i in indexed}
        self.read: dict[int, list[int]] = {layer.index: [] for layer in self.layout.layers}
        """Tokens read in each step, by layer."""
        self._vectors: dict[int, Tensor] = {}
        self.choose: Callable[[MlaOracle, Tensor], Tensor] | None = None
        """A method's own selection: from a query's scaled logits over what is alive, -inf elsewhere, [q_heads, tokens],
        to bool [tokens]."""

    # What the model takes for its cache.

    is_compileable = False

    def update(self, latent: Tensor, rotary: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._vectors[layer] = torch.cat([latent, rotary], -1)[0]
        return latent, rotary

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.index_keys[layer] = torch.cat([self.index_keys[layer], keys[0]])
        return self.index_keys[layer][None]

    def get_seq_length(self, *_: Any) -> int:
        return self.length - 1

    def _step(self, token: int) -> Tensor:
        self.length += 1
        out = self.model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.tensor([[self.length - 1]]),
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.float64),
            use_cache=True,
            cache=self,
        )
        self.after(self)
        logits: Tensor = out.logits[0, -1]
        return logits

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> Tensor:
        vectors = self._vectors.pop(index)
        self.k[index] = torch.cat([self.k[index], vectors], 1)
        self.alive[index] = torch.cat([self.alive[index], torch.ones(1, 1, dtype=torch.bool)], 1)
        self.written(self, index)
        module = self.model.get_decoder().layers[index].self_attn
        rank = module.kv_lora_rank
        keys, values = module.expand_kv(self.k[index][None, ..., :rank], self.k[index][None, ..., rank:])
        mask = self.alive[index][0].clone()
        if given.get("indices") is not None:
            chosen = torch.zeros_like(mask)
            chosen[given["indices"][0, -1].long()] = True
            mask &= chosen
        self.read[index].append(int(mask.sum()))
        if not mask.any():
            return torch.zeros(len(q), values.shape[-1], dtype=q.dtype)
        logits = (torch.einsum("hd,htd->ht", q, keys[0]) * given["scaling"]).masked_fill(~mask, -math.inf)
        if self.choose is not None:
            logits[:, ~self.choose(self, logits)] = -math.inf
        weights = torch.softmax(logits, -1)
        return torch.einsum("ht,htd->hd", weights, values[0])

    @contextmanager
    def _installed(self) -> Iterator[None]:
        hooks = []
        for index in self.index_keys:
            indexer = self.model.get_decoder().layers[index].self_attn.indexer
            hooks.append(indexer.register_forward_pre_hook(self._masking(index)))
        try:
            with super()._installed():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _masking(self, index: int) -> Any:
        """Hide from a layer's indexer what the method has dropped there."""

        def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            mask = torch.zeros(1, 1, self.length, dtype=torch.float64)
            mask[0, 0, : self.length - 1][~self.alive[index][0]] = -math.inf
            hidden, resid, embeddings, _, *rest = args
            return (hidden, resid, embeddings, mask, *rest)

        return hook
