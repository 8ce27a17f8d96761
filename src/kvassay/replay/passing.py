"""What the model takes for its cache while the paged one stands behind its attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvassay.layout.model import Layout
from kvassay.record.latent import latent_of


class PassThrough:
    """New keys and values go straight on to the attention function; the vectors of latent layers are kept for it."""

    is_compileable = False

    def __init__(self, layout: Layout, layers: Mapping[int, Any] | None = None) -> None:
        """`layers`: what stands where the model looks for a layer's own cache, for the state that it keeps itself."""
        self.layers = layers or {}
        self._latent = {layer.index for layer in layout.layers if latent_of(layer) is not None}
        self._vectors: dict[int, Tensor] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int = -1, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hand back what came in: of a latent layer the latent and the rotary part, which the model then expands."""
        if layer in self._latent:
            self._vectors[layer] = torch.cat([keys, values], -1).float()
        return keys, values

    def vectors(self, layer: int) -> Tensor:
        """What a latent layer has put in: float32 [lanes, 1, tokens, dim + rope]. Given once."""
        return self._vectors.pop(layer)

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always given explicitly, so nobody may ask."""
        return 0
