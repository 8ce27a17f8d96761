"""The data that pass between the ledger and a store: groups, what to copy, and where to read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvassay.errors import CacheError
from kvassay.layout.groups import paged_part, plan_groups
from kvassay.layout.model import Layout

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
Index = NDArray[np.signedinteger[Any]]
"""Integers of any width: what numpy's own index functions return."""


@dataclass(frozen=True)
class GroupSpec:
    """A KV cache group: layers that share one block table.

    `kv_heads[i]` belongs to `layers[i]`; `window` is the number of visible tokens, the query's own
    included, or None for a group that sees everything.
    """

    index: int
    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    block_size: int
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.kv_heads):
            raise CacheError(
                f"group {self.index}: {len(self.layers)} layers but {len(self.kv_heads)} kv_heads, need one each"
            )
        if min(self.kv_heads) < 1 or self.block_size < 1 or (self.window is not None and self.window < 1):
            raise CacheError(
                f"group {self.index}: kv_heads {self.kv_heads}, block_size {self.block_size} and "
                f"window {self.window} must be at least 1"
            )

    def heads(self, layer: int) -> int:
        """KV heads of one of the group's layers."""
        return self.kv_heads[self.layers.index(layer)]


def group_specs(layout: Layout, block_size: int) -> list[GroupSpec]:
    """The ledger's groups of a layout, as vLLM plans them; of layers with compressed entries, the windows alone."""
    return [
        GroupSpec(
            group.index,
            group.layers,
            tuple(layout.layers[layer].kv.kv_heads for layer in group.layers),
            group.block_size,
            group.window,
        )
        for group in plan_groups(paged_part(layout), block_size)
    ]


@dataclass(frozen=True)
class CopyBlock:
    """Copy every slot of block `src` to block `dst`, for all layers of `group` (copy on write)."""

    group: int
    src: int
    dst: int


@dataclass(frozen=True, eq=False)
class MoveSlots:
    """Gather all of `src` first, then scatter to `dst`: physical slots of one (layer, head), `[n]` each."""

    layer: int
    head: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Slots moved, the unit in which the copy is charged."""
        return len(self.src)


Op = CopyBlock | MoveSlots
"""What a store must do, in order and before anything else is asked of the ledger."""


class Created(NamedTuple):
    """A new sequence and how many of its tokens the prefix cache already held."""

    seq: int
    cached_tokens: int


class Reclaimed(NamedTuple):
    """Blocks a sequence let go of, and how many of them had no other owner and are free now."""

    dereferenced: int
    freed: int


@dataclass(frozen=True, eq=False)
class SlotView:
    """Where one layer's live tokens are, ordered by position; short heads are padded with -1 at the end.

    `logical`, `block_ids`, `offsets` and `positions` are int32 `[kv_heads, n]`, `counts` is `[kv_heads]`;
    `logical // block_size` is the block's ordinal in the sequence's table. All arrays are read-only.
    `uniform`: every head reads the same slots, though after a compaction not the same positions there;
    `is_identity`: also, those slots are consecutive.
    """

    logical: Ints
    block_ids: Ints
    offsets: Ints
    positions: Ints
    counts: Ints
    block_size: int
    uniform: bool
    is_identity: bool

    @property
    def slots(self) -> NDArray[np.int64]:
        """Physical slots `block_id * block_size + offset`, `[kv_heads, n]`, -1 where padded."""
        flat = self.block_ids.astype(np.int64) * self.block_size + self.offsets
        return np.where(self.positions >= 0, flat, -1)


@dataclass(frozen=True, eq=False)
class SegmentView:
    """One encoded segment as one sequence sees it.

    `positions` and `slots` (the logical slots the tokens left) are int32 `[kv_heads, n]`, -1 where padded;
    `alive` (bool, same shape) is what this sequence still reads of it.
    """

    id: int
    kind: str
    nbytes: int
    positions: Ints
    slots: Ints
    alive: Bools
