"""DeepSeek-V4's compressors in the loop: state that goes with a lane, and attention over window and entries together.

The paged cache holds the window. What the model's own compressors fold (entries, their index keys, the tokens of a
window still open) stays in the objects transformers keeps it in, one set per lane; no edit reaches it, because an entry
stands for several tokens and no policy here decides about one. The model's own index says which entries are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvassay.cache.data import Run, Stored
from kvassay.layout.model import Layer, Layout
from kvassay.record.calling import new_cache
from kvassay.record.entries import entry_indexers, keeps_raw


def keeps_entries(layout: Layout) -> bool:
    """Whether the model keeps raw vectors in windows and compressed entries beside them."""
    return any(keeps_raw(layer) for layer in layout.layers)


@dataclass(frozen=True)
class Compressors:
    """What the compressors of one sequence hold: transformers' own cache layer, by layer that has entries."""

    layers: Mapping[int, Any]

    @classmethod
    def empty(cls, model: Any, layout: Layout) -> Compressors:
        """Before the first token."""
        made = new_cache(model).layers
        return cls({layer.index: made[layer.index] for layer in layout.layers if layer.pooled})

    def fork(self) -> Compressors:
        """The same once more; tensors are shared, for the model replaces and never overwrites them."""
        return Compressors({index: _twin(layer) for index, layer in self.layers.items()})

    def entries(self, index: int) -> Tensor:
        """Entries of a layer, [entries, dim]."""
        return self._folded(index, "compressor")

    def index_keys(self, index: int) -> Tensor:
        """Keys of a layer's entries in its index, [entries, dim]; none for a layer without an index."""
        return self._folded(index, "indexer")

    def _folded(self, index: int, name: str) -> Tensor:
        found: Tensor | None = self.layers[index].compressed_kv.get(name) if index in self.layers else None
        return torch.empty(0, 0) if found is None else found[0]


def _twin(layer: Any) -> Any:
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    return twin


@contextmanager
def entry_choices(model: Any, layout: Layout) -> Iterator[dict[int, Tensor]]:
    """While inside, what each layer's index chooses of its entries, for one sequence: int64 [n, k], -1 unused."""
    found: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(module: Any, arguments: Any, chosen: Tensor) -> None:
            found[index] = chosen[0].cpu()

        return hook

    handles = [module.register_forward_hook(keep(index)) for index, module in entry_indexers(model, layout).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class Beside(NamedTuple):
    """A window and the entries beside it as one cache, and what of it is read."""

    data: Stored
    seen: Tensor
    """bool [heads, queries, window tokens + entries]."""
    elements: float = 0.0
    """Elements of entries that all queries read."""


def beside(
    layer: Layer, window: Stored, seen: Tensor, entries: Tensor, positions: Tensor, chosen: Tensor | None
) -> Beside:
    """What queries at true `positions` [n] of a layer read: of its window, and of `entries` [entries, dim].

    An entry, key and value in one, is there once its last token has come.
    seen: bool [heads, n, window tokens]; chosen: int64 [n, k] entries by number, -1 for none; None without an index
    """
    storage, count, width = layer.pooled, len(entries), window.positions.shape[1]
    if storage is None or count == 0:
        return Beside(window, seen)
    read = torch.arange(count) < (positions[:, None] + 1) // storage.ratio
    if chosen is not None:
        read = read & _listed(chosen, count)
    whole = Stored(
        (*window.runs, Run.of(entries[None], entries[None])),
        torch.cat([window.positions, torch.arange(count)[None]], 1),
        torch.cat([window.slots, torch.arange(width, width + count)[None]], 1),
        complete=window.complete,
    )
    both = torch.cat([seen, read[None].expand(len(seen), -1, -1)], -1)
    return Beside(whole, both, float(read.sum()) * storage.dim)


def _listed(chosen: Tensor, entries: int) -> Tensor:
    mask = torch.zeros(len(chosen), entries + 1, dtype=torch.bool)
    return mask.scatter_(1, chosen.long().masked_fill(chosen < 0, entries), True)[:, :entries]
