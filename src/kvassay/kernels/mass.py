"""What each token receives of the attention of many queries, in memory that does not grow with their number.

Tokens are taken in pieces that fit a processor's cache. A weight is the share that its piece has of the row times the
share that the token has of its piece. Both are softmaxes; the first is known when all pieces have been seen. So the
second is held, for `ROWS` rows at a time, and then summed over the queries. A key is read once per `ROWS` rows,
whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.cache.data import Stored
from kvassay.kernels.reference import visible

ROWS = 128
"""Rows, queries times the query heads of a KV head, that are held together: so many numbers per token."""
PIECE = 1024
"""Tokens of a piece, at most."""


def received(
    q: Tensor,
    data: Stored,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    allowed: Callable[[slice], Tensor] | None = None,
    own: bool = True,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.attention_weights` of q [q_heads, queries, k_dim] at true `positions` [queries], summed over queries.

    window, own, softcap, sinks: as there, and of `reference.visible`
    allowed: of some of the queries what is selected for them, bool [queries, kv_heads | q_heads, tokens]
    Returns [q_heads, tokens] in q's dtype.
    """
    kv_heads, tokens = data.positions.shape
    rows = (q * scale).unflatten(0, (kv_heads, -1))
    group, queries = rows.shape[1:3]
    lowest = torch.finfo(q.dtype).min
    sink = (q.new_full([q.shape[0]], lowest) if sinks is None else sinks.to(q.dtype)).view(kv_heads, group, 1)
    some = min(max(1, ROWS // group), queries)
    total, held = q.new_zeros(kv_heads, group, tokens), q.new_empty(group * some * tokens)
    heads = [list(_pieces(data, head)) for head in range(kv_heads)]
    for first in range(0, queries, some):
        part = slice(first, first + some)
        chosen = None if allowed is None else allowed(part).unflatten(1, (kv_heads, -1))
        for head, pieces in enumerate(heads):
            mine = rows[head, :, part]
            per_token = mine[..., 0].numel()
            past = [piece for piece in pieces if piece.first <= int(positions[part].max())]
            shares, lse = [], [sink[head].expand(mine.shape[:2])]
            for piece in past:
                logits = _logits(mine, piece, softcap)
                seen = _seen(piece, positions[part], window, None if chosen is None else chosen[:, head], own)
                if seen is not None:
                    logits.masked_fill_(~seen, lowest)
                share = held[per_token * piece.columns.start : per_token * piece.columns.stop].view_as(logits)
                torch.softmax(logits, -1, out=share)
                lse.append(logits.amax(-1) - share.amax(-1).log())
                shares.append(share)
            of_row = torch.stack(lse)
            of_row = torch.softmax(of_row, 0).masked_fill_(of_row <= lowest / 2, 0)  # of what a row does not see: none
            for piece, share, weight in zip(past, shares, of_row[1:], strict=True):
                total[head, :, piece.columns] += (weight[:, None] @ share)[:, 0]
    return total.flatten(0, 1)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one KV head: their columns, keys [tokens, k_dim], positions and biases [1, tokens]."""

    columns: slice
    keys: Tensor
    rest: Stored
    first: int
    last: int
    """Least and greatest position, -1 on padding."""


def _pieces(data: Stored, head: int) -> Iterator[Piece]:
    start = 0
    for run in data.runs:
        for keys in (run.k[head, first : first + PIECE] for first in range(0, run.tokens, PIECE)):
            columns = slice(start, start + len(keys))
            positions, slots = (x[head : head + 1, columns] for x in (data.positions, data.slots))
            bias, inner = (None if x is None else x[head : head + 1, columns] for x in (data.bias, data.inner_bias))
            ends = (int(end) for end in positions.aminmax())
            yield Piece(columns, keys, Stored((), positions, slots, bias, inner_bias=inner), *ends)
            start = columns.stop


def _logits(rows: Tensor, piece: Piece, softcap: float | None) -> Tensor:
    """Of scaled queries [group, queries, k_dim]: [group, queries, tokens], nothing masked."""
    logits = torch.matmul(rows.flatten(0, 1), piece.keys.to(rows.dtype).T).view(*rows.shape[:2], -1)
    if piece.rest.inner_bias is not None:
        logits += piece.rest.inner_bias.to(rows.dtype)
    if softcap:
        logits = (logits / softcap).tanh_().mul_(softcap)
    if piece.rest.bias is not None:
        logits += piece.rest.bias.to(rows.dtype)
    return logits


def _seen(piece: Piece, positions: Tensor, window: int | None, chosen: Tensor | None, own: bool) -> Tensor | None:
    """What queries at `positions` see of a piece, bool [1 | group, queries, tokens]; None: all of it.

    chosen: bool [queries, 1 | group, all tokens]
    """
    if chosen is not None:
        chosen = chosen[..., piece.columns]
        return visible(piece.rest, positions, chosen.shape[1], window=window, allowed=chosen, own=own)
    early, late = (int(end) for end in positions.aminmax())
    if piece.first >= 0 and piece.last <= early and (window is None or late - piece.first < window):
        return None
    return visible(piece.rest, positions, 1, window=window)
