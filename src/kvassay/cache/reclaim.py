"""How many blocks an eviction really frees, under each way an engine could take them back.

A set of kept tokens is not memory. What it frees depends on who may own a block:
- `whole_block`: the group's shared table (vLLM today): every head of every layer must have dropped the block;
- `per_layer_tables`, `per_head_tables`: a table per layer, or per layer and KV head (KV-Compress);
- `slot_reuse`: no block is freed, later tokens go into dead slots; as all layers and heads take the next
  token at once, the (layer, head) with the fewest dead slots decides;
- `compaction`: live slots move to the front, padded to the widest (layer, head), and the tail is freed.

`Freed.blocks` is in blocks of the group's shared table: a finer mode frees fractions of one, and bytes
over `group_block_bytes` is the equivalent. Random keeping with evict ratio r frees about r**block_size
of one head's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvassay.cache.ops import Bools, GroupSpec
from kvassay.errors import IllegalEdit

Mode = Literal["whole_block", "per_layer_tables", "per_head_tables", "slot_reuse", "compaction"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Freed:
    """What one mode gives back, pool-wide; `blocks` may be a fraction, and negative if copies cost more.

    `moved_slots` counts one (layer, head) slot each and `moved_bytes` their content, read and written
    once; `new_blocks` must be free before the move can begin.
    """

    blocks: float = 0.0
    bytes: float = 0.0
    moved_slots: int = 0
    moved_bytes: float = 0.0
    new_blocks: int = 0

    def __add__(self, other: Freed) -> Freed:
        return Freed(
            self.blocks + other.blocks,
            self.bytes + other.bytes,
            self.moved_slots + other.moved_slots,
            self.moved_bytes + other.moved_bytes,
            self.new_blocks + other.new_blocks,
        )


@dataclass(frozen=True)
class Reclaim:
    """Blocks and bytes held before, pool-wide, and what each mode frees of them, by mode and by group."""

    blocks: int
    bytes: float
    groups: Mapping[int, Mapping[Mode, Freed]]

    def __getitem__(self, mode: Mode) -> Freed:
        """The mode's total over groups (their blocks have equal bytes in vLLM's hybrid pools)."""
        return sum((modes[mode] for modes in self.groups.values()), Freed())

    def fraction(self, mode: Mode) -> float:
        """Freed bytes over held bytes."""
        return self[mode].bytes / self.bytes if self.bytes else 0.0


def count(
    keep: Mapping[int, Bools],
    groups: Sequence[GroupSpec],
    *,
    slot_bytes: Mapping[int, float] | float = 1.0,
    shared_by: int = 1,
    prefix_tokens: int = 0,
    dropping: int = 1,
) -> Reclaim:
    """Count what keeping only `keep` frees when `dropping` of `shared_by` requests apply it.

    keep: per layer bool `[kv_heads, T]` by position, what still lies in slots; a layer not named keeps
        everything, and a head may be empty (its tokens are in encoded segments).
    slot_bytes: bytes of one head's K and V of one token, the same for all layers or per layer.
    prefix_tokens: the first so many tokens' full blocks are shared by `shared_by` requests; every
        request holds the rest alone. A shared block is free only when all of them let go of it.
    Numbers are pool-wide: over the shared blocks once, and the private ones of each dropping request.
    The block the next token goes into is never counted, nor what a window has already let go of.
    `IllegalEdit` on a wrong shape or more droppers than owners.
    """
    if not 1 <= dropping <= shared_by:
        raise IllegalEdit(f"dropping must be 1..{shared_by} (shared_by), not {dropping}")
    if not keep:
        raise IllegalEdit("keep names no layer")
    tokens = next(iter(keep.values())).shape[-1]
    if unknown := set(keep) - {layer for group in groups for layer in group.layers}:
        raise IllegalEdit(f"no group holds layers {sorted(unknown)}")
    if not 0 <= prefix_tokens <= tokens:
        raise IllegalEdit(f"prefix_tokens must be 0..{tokens}, not {prefix_tokens}")
    totals: dict[int, Mapping[Mode, Freed]] = {}
    blocks, held_bytes = 0, 0.0
    for group in groups:
        cost = [slot_bytes[layer] if isinstance(slot_bytes, Mapping) else slot_bytes for layer in group.layers]
        masks = [_mask(keep, group, layer, tokens) for layer in group.layers]
        shared = prefix_tokens // group.block_size if shared_by > 1 else 0
        case = _Case(group, masks, cost, shared, dropping, dropping == shared_by)
        totals[group.index] = case.freed()
        blocks += case.held
        held_bytes += case.held * case.block_bytes
    return Reclaim(blocks, held_bytes, totals)


def _mask(keep: Mapping[int, Bools], group: GroupSpec, layer: int, tokens: int) -> Bools:
    heads = group.heads(layer)
    if layer not in keep:
        return np.ones((heads, tokens), dtype=np.bool_)
    mask = np.asarray(keep[layer])
    if mask.dtype != np.bool_ or mask.shape != (heads, tokens):
        raise IllegalEdit(f"layer {layer}: keep is {mask.dtype}{list(mask.shape)}, bool[{heads}, {tokens}] needed")
    return mask


class _Case:
    """One group: the table's blocks in order are expired, shared, private; the last may be partial."""

    def __init__(
        self,
        group: GroupSpec,
        masks: list[Bools],
        cost: list[float],
        shared: int,
        dropping: int,
        all_drop: bool,
    ) -> None:
        self.masks, self.cost, self.size = masks, cost, group.block_size
        self.windowed = group.window is not None
        self.tokens = masks[0].shape[1]
        self.blocks = -(-self.tokens // self.size)
        expired = max(0, self.tokens - group.window + 1) // self.size if group.window is not None else 0
        self.shared, self.dropping, self.all_drop = shared, dropping, all_drop
        self.owners = np.full(self.blocks, dropping)
        """Per block, how many copies of it the pool gets back if a request's table lets go of it."""
        self.owners[:shared] = all_drop
        self.owners[:expired] = 0
        self.held = max(shared - expired, 0) + dropping * (self.blocks - max(shared, expired))
        self.slot_bytes = sum(len(mask) * price for mask, price in zip(masks, cost, strict=True))
        self.block_bytes = self.size * self.slot_bytes

    def freed(self) -> dict[Mode, Freed]:
        """Every mode's result."""
        full = self.tokens // self.size
        alive: list[Bools] = [
            np.logical_or.reduce(mask[:, : full * self.size].reshape(len(mask), full, self.size), axis=2)
            for mask in self.masks
        ]
        owners = self.owners[:full]
        whole = int(owners @ ~np.concatenate(alive).any(axis=0)) * self.block_bytes
        per_layer = per_head = 0.0
        for blocks, price in zip(alive, self.cost, strict=True):
            heads = blocks.shape[0]
            per_layer += int(owners @ ~blocks.any(axis=0)) * self.size * heads * price
            per_head += int((~blocks @ owners).sum()) * self.size * price
        return {
            "whole_block": self._bytes(whole),
            "per_layer_tables": self._bytes(per_layer),
            "per_head_tables": self._bytes(per_head),
            "slot_reuse": self._slot_reuse(),
            "compaction": self._compaction(),
        }

    def _bytes(self, freed: float) -> Freed:
        return Freed(float(freed) / self.block_bytes, float(freed))

    def _slot_reuse(self) -> Freed:
        """Only private slots: to write in a shared block it would have to be copied first."""
        if self.windowed:
            return Freed()
        private = slice(self.shared * self.size, None)
        slots = min(int((~mask[:, private]).sum(axis=1).min()) for mask in self.masks)
        return self._bytes(slots * self.dropping * self.slot_bytes)

    def _compaction(self) -> Freed:
        width = max(int(mask.sum(axis=1).max()) for mask in self.masks)
        if self.windowed or width == self.tokens:
            return Freed()
        stay = int(np.concatenate(self.masks).all(axis=0).argmin()) // self.size
        after = -(-width // self.size)
        goes_to, new = self._destinations(stay, after)
        moved, moved_bytes = 0, 0.0
        for mask, price in zip(self.masks, self.cost, strict=True):
            for row in mask:
                src = np.flatnonzero(row)
                dst = np.arange(len(src))
                n = int((goes_to[dst // self.size] * self.size + dst % self.size != src).sum())
                moved, moved_bytes = moved + n, moved_bytes + n * price
        shared_kept = min(stay, self.shared)
        net = self.dropping * (self.blocks - self.shared - after + shared_kept)
        net += (self.shared - shared_kept) * self.all_drop
        copies = self.dropping
        return Freed(net, net * self.block_bytes, moved * copies, moved_bytes * copies, new * copies)

    def _destinations(self, stay: int, after: int) -> tuple[NDArray[np.int64], int]:
        """Per block of the compacted table the old block it is written to (-1: a new one), and the new ones."""
        goes_to = np.arange(after)
        wanted = np.arange(stay, min(self.shared, after))
        spare = np.arange(max(after, self.shared), self.blocks)[: len(wanted)]
        goes_to[wanted] = -1
        goes_to[wanted[: len(spare)]] = spare
        return goes_to, len(wanted) - len(spare)
