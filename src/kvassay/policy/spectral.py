"""Rank-r descriptions of blocks of keys, packed, and the attention mass they predict (LOCKS, arXiv 2607.24555).

A block's keys are `mean + coefficients @ basis`: the leading principal directions of its centred keys. What is
not kept of them is the only error before the codes round the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvassay.cache.codec import pack, unpack

CHUNK = 1 << 22
"""Elements of keys, or of bases, worked on together: a long context is taken some blocks at a time."""
RAW = 32
"""Bits that stand for float32, not coded."""


@dataclass(frozen=True)
class Widths:
    """Kept directions per block, and the bits of their elements and of everything else (4, 8, or 32 = not coded)."""

    rank: int
    basis: int
    other: int


def decompose(keys: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [..., dim], orthonormal basis [..., rank, dim], coefficients [..., tokens, rank] of keys [..., tokens, dim].

    From the Gram matrix of the centred keys. Directions without energy are zero, basis and coefficients; a rank
    beyond the tokens is filled up with such.
    """
    mean = keys.mean(-2)
    centred = (keys - mean[..., None, :]).double()
    left = torch.linalg.eigh(centred @ centred.mT).eigenvectors.flip(-1)[..., :rank]
    rows = left.mT @ centred
    size = rows.norm(dim=-1)
    there = size > 1e-6 * centred.square().sum((-2, -1), keepdim=True).sqrt()[..., 0]
    basis = torch.where(there[..., None], rows / size.clamp(min=1e-300)[..., None], 0)
    coefficients = left * torch.where(there, size, 0)[..., None, :]
    missing = rank - left.shape[-1]
    if missing > 0:
        basis = torch.nn.functional.pad(basis, (0, 0, 0, missing))
        coefficients = torch.nn.functional.pad(coefficients, (0, missing))
    return mean.float(), basis.float(), coefficients.float()


def summarize(keys: Tensor, widths: Widths) -> dict[str, Tensor]:
    """Side data of blocks of keys [blocks, kv_heads, tokens, dim]; every tensor begins with [blocks, kv_heads].

    Codes are symmetric, with a float16 scale per basis direction, per token's coefficients and per mean. With
    rank 0 the mean is all there is.
    """
    step = max(1, CHUNK // keys[0].numel()) if len(keys) else 1
    parts = [_summary(keys[at : at + step], widths) for at in range(0, max(1, len(keys)), step)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _summary(keys: Tensor, widths: Widths) -> dict[str, Tensor]:
    """The same of a few blocks."""
    mean, basis, coefficients = decompose(keys, widths.rank)
    side = _encoded("mean", mean, widths.other)
    if widths.rank:
        side |= _encoded("basis", basis, widths.basis) | _encoded("coefficients", coefficients, widths.other)
    return side


def names(widths: Widths) -> tuple[str, ...]:
    """The tensors that `summarize` makes."""
    found: tuple[str, ...] = ()
    for name, bits in (("mean", widths.other), ("basis", widths.basis), ("coefficients", widths.other)):
        if name == "mean" or widths.rank:
            found += (name,) if bits == RAW else (name, f"{name}_scale")
    return found


def log_mass(
    side: Mapping[str, Tensor], widths: Widths, query: Tensor, tokens: int, *, scale: float, softcap: float | None
) -> Tensor:
    """Predicted log of the unnormalised attention mass of each block: [kv_heads, group, queries, blocks].

    query: [kv_heads, group, queries, dim]
    tokens: per block
    The logits of all tokens of a block are put together again, then log-sum-exp; some blocks at a time.
    """
    kv_heads, group, queries, dim = query.shape
    rows = query.flatten(1, 2).float()
    blocks = side["mean"].shape[0]
    step = max(1, CHUNK // (kv_heads * max(1, widths.rank) * dim))
    parts = [
        _chunk({name: rest[at : at + step] for name, rest in side.items()}, widths, rows, tokens, scale, softcap)
        for at in range(0, blocks, step)
    ]
    mass = torch.cat(parts, dim=-1) if parts else rows.new_zeros(kv_heads, rows.shape[1], 0)
    return mass.view(kv_heads, group, queries, -1)


def _chunk(
    side: Mapping[str, Tensor], widths: Widths, rows: Tensor, tokens: int, scale: float, softcap: float | None
) -> Tensor:
    """The same for a few blocks: [kv_heads, rows, blocks]."""
    dim = rows.shape[-1]
    across = rows.mT  # [kv_heads, dim, rows]
    mean = _decoded("mean", side, widths.other, dim)[..., None, :] @ across
    if widths.rank:
        along = _decoded("basis", side, widths.basis, dim) @ across
        logits = mean + _decoded("coefficients", side, widths.other, widths.rank) @ along
    else:
        logits = mean.expand(-1, -1, tokens, -1)
    logits = logits * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    return logits.logsumexp(-2).permute(1, 2, 0)


def _encoded(name: str, x: Tensor, bits: int) -> dict[str, Tensor]:
    """x [..., length] in `bits`, with a float16 scale per row unless `bits` says not coded."""
    if bits == RAW:
        return {name: x}
    top = 2 ** (bits - 1) - 1
    scale = (x.abs().amax(-1) / top).to(torch.float16)
    step = scale.float()[..., None]
    level = torch.where(step > 0, x / step, 0).round().clamp(-top, top)
    codes = level.to(torch.int8) if bits == 8 else pack((level + 2 ** (bits - 1)).to(torch.uint8), bits)
    return {name: codes, f"{name}_scale": scale}


def _decoded(name: str, side: Mapping[str, Tensor], bits: int, length: int) -> Tensor:
    """float32 [..., length]."""
    codes = side[name]
    if bits == RAW:
        return codes
    level = codes.float() if bits == 8 else unpack(codes, bits, length).float() - 2 ** (bits - 1)
    return level * side[f"{name}_scale"].float()[..., None]
