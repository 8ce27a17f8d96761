"""One decision out of two that follow each other: the second is of the tokens that the first has left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvassay.cache.data import to_front
from kvassay.cache.edits import Decision, Edit, Evict, LowRank, Quantize
from kvassay.errors import PolicyError
from kvassay.policy.views import CacheView, LayerView


def survivors(layer: LayerView, edits: Sequence[Edit]) -> Tensor | None:
    """What evictions leave of a layer, bool [kv_heads, tokens]; None if nothing is evicted."""
    keeps = [edit.keep.bool() for edit in edits if isinstance(edit, Evict)]
    if not keeps:
        return None
    kept = layer.alive
    for keep in keeps:
        kept = kept & keep
    return kept


def joined(first: Decision, second: Decision, cache: CacheView) -> Decision:
    """Both, every axis that of `cache`: the second's tokens are those that the first leaves, in their order."""
    edits = {index: list(given) for index, given in first.edits.items()}
    for index, given in second.edits.items():
        kept = survivors(cache.layers[index], edits.get(index, ()))
        edits.setdefault(index, []).extend(given if kept is None else [_back(edit, kept) for edit in given])
    return Decision(
        edits,
        compact=first.compact or second.compact,
        reuse=second.reuse if first.reuse is None else first.reuse,
        facts={**first.facts, **second.facts},
    )


def _back(edit: Edit, kept: Tensor) -> Edit:
    """An encoding of the survivors as one of the whole layer; `PolicyError` for another kind of edit."""
    columns = to_front(kept)
    there = torch.gather(kept, 1, columns)

    def spread(x: Tensor, fill: float) -> Tensor:
        whole = torch.full((*kept.shape, *x.shape[2:]), fill, dtype=x.dtype)
        heads, rows = there.nonzero(as_tuple=True)
        whole[heads, columns[heads, rows]] = x.expand(*there.shape, *x.shape[2:])[heads, rows]
        return whole

    if isinstance(edit, Quantize):
        scope = there if edit.tokens is None else edit.tokens.bool() & there
        sides = {"value_bits": edit.value_bits}
        if edit.key_axis == "token":
            sides["key_bits"] = edit.key_bits
        widths = {name: spread(bits, 16) if isinstance(bits, Tensor) else bits for name, bits in sides.items()}
        return replace(edit, tokens=spread(scope, False), **widths)  # type: ignore[arg-type]
    if isinstance(edit, LowRank):
        scope = spread(there if edit.tokens is None else edit.tokens.bool() & there, False)
        if not bool((scope == scope[:1]).all()):
            raise PolicyError("a low-rank code takes the same tokens of every head, and each head has kept others")
        norm = edit.key_norm and replace(edit.key_norm, rows=spread(edit.key_norm.rows, 0.0))
        return replace(edit, tokens=scope[0], key_norm=norm)
    raise PolicyError(f"a {type(edit).__name__} edit cannot follow an eviction in one decision")
