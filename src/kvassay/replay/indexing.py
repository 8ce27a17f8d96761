"""The model's own selection in the loop: index keys go with a lane, and say what each of its queries reads.

The trained index keeps its part of every pass: its projections run as ever, but instead of choosing from a cache of
its own it hands keys and queries over, and the choice is made here by the model's rule, of what the lane still holds.
A token that a KV head has dropped no longer scores for it; its index key goes when no KV head holds the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvassay.cache.paged import PagedCache
from kvassay.errors import LayoutError
from kvassay.layout.model import IndexKeys, Layout, TopK
from kvassay.policy.indexers import dsa_tokens, m3_blocks
from kvassay.policy.readset import ReadSet
from kvassay.record.indexers import IndexRows, index_rows, indexers_of


class Asked(NamedTuple):
    """What the index is asked with: the index queries of n tokens of one sequence, and all its index keys so far."""

    queries: Tensor
    """float [index_heads, n, dim]."""
    weights: Tensor | None
    """float [n, index_heads]; None where heads have none."""
    keys: Tensor
    """float [tokens, dim], of positions 0, 1, ..."""


def chosen_by_index(cache: PagedCache, seq: int, index: int, asked: Asked) -> tuple[ReadSet, float]:
    """What the newest queries of a sequence read of layer `index` by the model's selection, and the bytes of index keys
    scanned for it, mean per query: none in a layer that reads another's selection, which that layer has made of what
    it holds itself.

    `LayoutError` for a layer of which nothing is selected.
    """
    layout, queries = cache.layout, asked.queries.shape[1]
    selector, top = layout.selector(index), layout.layers[index].topk
    if selector is None or selector.index_keys is None or top is None:
        raise LayoutError(f"layer {index} ({layout.layers[index].kind}) reads no selection")
    length = cache.ledger.length(seq)
    positions = torch.arange(length - queries, length)
    alive = alive_in(cache, seq, layout.source(selector.index).index)
    chosen = select(top, selector.index_keys, asked, positions, alive)
    return chosen, scanned_bytes(layout, index, positions, alive)


def select(top: TopK, index: IndexKeys, asked: Asked, positions: Tensor, alive: Tensor | None) -> ReadSet:
    """What queries at true `positions` [n] read by the model's index: [n, sets, k] units of `top.unit` tokens.

    alive: bool [kv_heads, tokens], what each KV head still holds; None for all
    """
    if index.weighted:
        held = None if alive is None else alive.any(0)
        weights = torch.ones(len(positions), index.q_heads) if asked.weights is None else asked.weights
        chosen = dsa_tokens(asked.queries, asked.keys, weights, positions, topk=top.k, alive=held)
        return ReadSet(chosen[:, None], own=False)
    chosen = m3_blocks(
        asked.queries,
        asked.keys,
        positions,
        block=top.unit,
        topk=top.k,
        init_blocks=top.first,
        local_blocks=top.last,
        alive=alive,
    )
    return ReadSet(chosen, top.unit, own=False)


def alive_in(cache: PagedCache, seq: int, layer: int) -> Tensor | None:
    """bool [kv_heads, tokens]: which positions each KV head of a layer still holds; None if that is all of them."""
    live, length = cache.ledger.live(seq, layer), cache.ledger.length(seq)
    if all(len(head) == length for head in live):
        return None
    mask = np.zeros((len(live), length), dtype=np.bool_)
    for row, head in zip(mask, live, strict=True):
        row[head] = True
    return torch.from_numpy(mask)


def index_elements(layout: Layout, index: int, tokens: int, alive: Tensor | None) -> float:
    """Elements of index keys that a layer holds for the first `tokens` positions: of tokens some KV head holds, or of
    entries that these tokens have completed."""
    return float(_elements(layout, index, torch.tensor([tokens]), alive))


def scanned_bytes(layout: Layout, index: int, positions: Tensor, alive: Tensor | None) -> float:
    """Bytes of index keys that a query at one of `positions` scores, mean over them."""
    return float(_elements(layout, index, positions + 1, alive).double().mean()) * layout.element_bytes


def _elements(layout: Layout, index: int, tokens: Tensor, alive: Tensor | None) -> Tensor:
    """Elements of index keys for the first so many tokens, by number of tokens [n]."""
    layer = layout.layers[index]
    keys, entries = layer.index_keys, layer.pooled
    if keys is None:
        return torch.zeros_like(tokens)
    held = tokens
    if entries is not None:
        held = tokens // entries.ratio
    elif alive is not None:
        held = torch.nn.functional.pad(alive.any(0).cumsum(0), (1, 0))[tokens]
    return held * keys.dim * keys.heads


@contextmanager
def handing_over(model: Any, layout: Layout, take: Callable[[int, IndexRows], None]) -> Iterator[None]:
    """While inside, the model's indexers choose nothing and give what they compute, float32 on the CPU, to `take`."""
    modules = indexers_of(model) if any(layer.topk for layer in layout.layers) else {}
    for index, module in modules.items():
        module.forward = _giving(index, module, take)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def _giving(index: int, module: Any, take: Callable[[int, IndexRows], None]) -> Callable[..., Tensor]:
    def forward(*arguments: Any, **named: Any) -> Tensor:
        rows = index_rows(module, arguments, named)
        take(index, IndexRows(*(None if part is None else part.float().cpu() for part in rows)))  # type: ignore[arg-type]
        # GLM hands it on to its sharing layers, and refuses to go on with none.
        return torch.empty(*rows.keys.shape[:2], 0, dtype=torch.int32, device=rows.keys.device)

    return forward
