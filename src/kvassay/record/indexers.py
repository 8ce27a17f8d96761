"""What a model's trained index works from: the queries it computes and drops, its keys, and what it chose of them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvassay.errors import RecordError
from kvassay.layout.model import TopK
from kvassay.record.calling import decoder_layers


class IndexRows(NamedTuple):
    """What an index computes of n tokens of every sequence in a batch."""

    queries: Tensor
    """[batch, index_heads, n, dim], after norm and RoPE."""
    weights: Tensor | None
    """[batch, n, index_heads], as projected; None where heads have none."""
    keys: Tensor
    """[batch, n, dim], after norm and RoPE, as cached."""


def _deepseek(rotation: str) -> Callable[[Any, Mapping[str, Any]], IndexRows]:
    """DeepSeek's indexer (DSA): the first elements of queries and keys rotate, as its file's `rotation` does it."""

    def rows(module: Any, given: Mapping[str, Any]) -> IndexRows:
        hidden, (cos, sin) = given["hidden_states"], given["position_embeddings"]
        q = module.wq_b(given["q_resid"]).view(*hidden.shape[:2], module.n_heads, module.head_dim)
        k = module.k_norm(module.wk(hidden)).unsqueeze(2)
        cut = [module.qk_rope_head_dim, module.head_dim - module.qk_rope_head_dim]
        (q_turned, q_still), (k_turned, k_still) = q.split(cut, -1), k.split(cut, -1)
        rotate = getattr(sys.modules[type(module).__module__], rotation)
        q_turned, k_turned = rotate(q_turned, k_turned, cos, sin, unsqueeze_dim=2)
        weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))
        queries = torch.cat([q_turned, q_still], -1).transpose(1, 2)
        return IndexRows(queries, weights, torch.cat([k_turned, k_still], -1).squeeze(2))

    return rows


def _minimax(module: Any, given: Mapping[str, Any]) -> IndexRows:
    """MiniMax-M3's indexer: heads and key are normalised, then their first elements rotate."""
    hidden = given["hidden_states"]
    cos, sin = (part[..., : module.head_dim] for part in given["position_embeddings"])
    shape = (*hidden.shape[:2], -1, module.head_dim)
    q = module.q_norm(module.q_proj(hidden).view(shape)).transpose(1, 2)
    k = module.k_norm(module.k_proj(hidden).view(shape)).transpose(1, 2)
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, cos, sin)
    return IndexRows(q, None, k[:, 0])


_ROWS: Mapping[str, Callable[[Any, Mapping[str, Any]], IndexRows]] = {
    "DeepseekV32Indexer": _deepseek("apply_rotary_pos_emb"),
    "GlmMoeDsaIndexer": _deepseek("apply_rotary_pos_emb_interleave"),
    "MiniMaxM3VLIndexer": _minimax,
}
"""By class of the index module."""


def index_rows(module: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> IndexRows:
    """What an index module called like that computes, by its own parts."""
    given = inspect.signature(type(module).forward).bind_partial(module, *arguments, **named).arguments
    return _ROWS[type(module).__name__](module, given)


def indexers_of(model: Any) -> dict[int, nn.Module]:
    """The index module of every layer that has one; `RecordError` if its class is not known here."""
    found = {}
    for index, layer in enumerate(decoder_layers(model)):
        module = getattr(getattr(layer, "self_attn", None), "indexer", None)
        if module is None:
            continue
        if type(module).__name__ not in _ROWS:
            raise RecordError(
                f"layer {index}: its index is a {type(module).__name__}, which is none of {', '.join(_ROWS)}"
            )
        found[index] = module
    return found


@contextmanager
def index_taps(model: Any, take: Callable[[int, IndexRows], None]) -> Iterator[None]:
    """While inside, give `take` what each layer's index computes, and let it choose as ever."""

    def hook(index: int) -> Any:
        def call(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            take(index, index_rows(module, arguments, named))

        return call

    handles = [
        module.register_forward_pre_hook(hook(index), with_kwargs=True) for index, module in indexers_of(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def chosen_units(given: Mapping[str, Any]) -> Tensor | None:
    """What attention was told to read, as the index said it: [n, sets, chosen] units by number; None for everything.

    given: the attention function's arguments beyond queries, keys and values, of one sequence
    """
    tokens: Tensor | None = given.get("indices")  # [1, n, chosen], one list for all heads
    blocks: Tensor | None = given.get("block_indices")  # [1, sets, n, chosen]
    if tokens is not None:
        return tokens[0][:, None]
    return None if blocks is None else blocks[0].transpose(0, 1)


def visible_units(units: Tensor, start: int, top: TopK) -> Tensor:
    """A selection [n, sets, chosen] of the queries from position `start` on as int32 [n, sets, k]: what begins in a
    query's future (a top-k of fewer than k visible tokens holds some) is no choice, -1."""
    positions = torch.arange(start, start + len(units), device=units.device)[:, None, None]
    kept = units.masked_fill(units * top.unit > positions, -1).to(torch.int32)
    return nn.functional.pad(kept, (0, top.k - kept.shape[2]), value=-1)
