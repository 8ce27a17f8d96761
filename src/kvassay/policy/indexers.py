"""How trained indexers turn scores into a selection: MiniMax-M3, DeepSeek-V3.2 and DeepSeek-V4, as pure functions.

Index queries and keys come from the model's own trained projections; without those weights nothing here says which
tokens matter. Queries are taken some at a time, so no score map of all queries and keys is ever held.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ELEMENTS = 1 << 24
"""Scores held together."""


def m3_blocks(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *,
    block: int,
    topk: int,
    init_blocks: int = 0,
    local_blocks: int = 1,
    alive: Tensor | None = None,
) -> Tensor:
    """Blocks that each query reads: int64 [queries, heads, min(topk, blocks)], -1 unused at the end.

    MiniMax-M3 (arXiv 2606.13392; `MiniMaxM3VLIndexer` of transformers): a block's score is the largest raw
    query-key product of its visible tokens; the first `init_blocks` and the last `local_blocks` up to the query's own
    come first, inside `topk`.

    query: [heads, queries, dim], one list per head
    key: [tokens, dim], shared by the heads, of positions 0, 1, ...
    positions: int64 [queries]
    alive: bool [heads, tokens], what a head still holds: a block's other tokens do not score for it, and a block
        without any is not listed; None for all
    """
    ends = init_blocks, local_blocks

    def choose(rows: slice) -> Tensor:
        rank = block_scores(query[:, rows], key, positions[rows], block=block, ends=ends, alive=alive)
        best, index = rank.topk(min(topk, rank.shape[-1]), dim=-1)
        return index.masked_fill(best == -torch.inf, -1).transpose(0, 1)

    return _in_chunks(choose, query.shape[1], query.shape[0] * key.shape[0])


def block_scores(
    query: Tensor, key: Tensor, positions: Tensor, *, block: int, ends: tuple[int, int], alive: Tensor | None = None
) -> Tensor:
    """MiniMax-M3's score of every block, [heads, queries, blocks]: inf where forced, -inf where nothing is visible.

    ends: how many blocks are forced at the start, and at the end up to the query's own; the rest as for `m3_blocks`
    """
    tokens = key.shape[0]
    blocks = -(-tokens // block)
    score = query.float() @ key.float().T
    hidden = torch.arange(tokens) > positions[:, None]
    score = score.masked_fill(hidden if alive is None else hidden | ~alive[:, None], -torch.inf)
    score = torch.nn.functional.pad(score, (0, blocks * block - tokens), value=-torch.inf)
    rank = score.unflatten(-1, (blocks, block)).amax(-1)
    ordinal, own = torch.arange(blocks), positions[:, None] // block
    forced = (ordinal < ends[0]) | ((ordinal > own - ends[1]) & (ordinal <= own))
    return rank.masked_fill(forced & (rank > -torch.inf), torch.inf)


def dsa_tokens(
    query: Tensor, key: Tensor, weight: Tensor, positions: Tensor, *, topk: int, alive: Tensor | None = None
) -> Tensor:
    """Tokens that each query reads, one list for all attention heads: int64 [queries, min(topk, tokens)], -1 unused.

    DeepSeek-V3.2 (`DeepseekV32Indexer` of transformers): the top scores of visible tokens; nothing is forced.

    query: [heads, queries, dim]; key: [tokens, dim], of positions 0, 1, ...; weight: [queries, heads] as projected
    alive: bool [tokens], what is still held; None for all
    """
    tokens = torch.arange(key.shape[0])

    def choose(rows: slice) -> Tensor:
        score = lightning_score(query[:, rows], key, weight[rows])
        hidden = tokens > positions[rows, None]
        return _top(score, hidden if alive is None else hidden | ~alive, topk)

    return _in_chunks(choose, query.shape[1], query.shape[0] * key.shape[0])


def v4_entries(query: Tensor, key: Tensor, weight: Tensor, positions: Tensor, *, topk: int, ratio: int = 4) -> Tensor:
    """Compressed entries that each query reads beside its window: int64 [queries, min(topk, entries)], -1 unused.

    DeepSeek-V4's compressed sparse attention (`DeepseekV4Indexer` of transformers): entry e, which stands for tokens
    up to (e + 1) * ratio - 1, is visible from there on; the score is V3.2's over the entries' index keys.

    query: [heads, queries, dim]; key: [entries, dim]; weight: [queries, heads] as projected
    """
    entry = torch.arange(key.shape[0])

    def choose(rows: slice) -> Tensor:
        score = lightning_score(query[:, rows], key, weight[rows])
        return _top(score, entry >= (positions[rows, None] + 1) // ratio, topk)

    return _in_chunks(choose, query.shape[1], query.shape[0] * key.shape[0])


def lightning_score(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """DeepSeek's index score [queries, keys]: heads' rectified products, weighted by the query's own head weights.

    query: [heads, queries, dim]; key: [keys, dim]; weight: [queries, heads]
    """
    heads, _, dim = query.shape
    product = (query.float() @ key.float().T * dim**-0.5).relu()
    return torch.einsum("qh,hqk->qk", weight.float() * heads**-0.5, product)


def _top(score: Tensor, hidden: Tensor, topk: int) -> Tensor:
    """The best of what is not hidden: [queries, min(topk, keys)], -1 where there is no more."""
    best, index = score.masked_fill(hidden, -torch.inf).topk(min(topk, score.shape[-1]), dim=-1)
    return index.masked_fill(best == -torch.inf, -1)


def _in_chunks(choose: Callable[[slice], Tensor], queries: int, row: int) -> Tensor:
    """`choose` over all queries, as many at a time as hold `ELEMENTS` scores of `row` each."""
    step = max(1, ELEMENTS // max(1, row))
    return torch.cat([choose(slice(at, at + step)) for at in range(0, queries, step)])
