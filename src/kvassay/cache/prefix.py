"""Prefix hashes, the longest cached prefix that all groups agree on, and which blocks are worth a hash.

A block's hash chains its tokens to the hash of the block before it, whole sha256 digests, never cut.
Groups of one block size share the chain; the group index is appended to make the key, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from math import lcm
from typing import NamedTuple

import numpy as np

from kvassay.cache.ops import GroupSpec
from kvassay.cache.pool import NULL_BLOCK


def extend_chain(chain: list[bytes], tokens: Sequence[int], upto: int, block_size: int, salt: bytes) -> None:
    """Append the hashes of the full blocks among `tokens[:upto]` that `chain` does not have yet.

    `salt` sets apart caches whose content differs for the same tokens (another prefill mode, say).
    """
    first, full = len(chain), upto // block_size
    if first >= full:
        return
    parent = chain[-1] if chain else sha256(b"kvassay prefix" + salt).digest()
    data = np.asarray(tokens[first * block_size : full * block_size], dtype="<i8").tobytes()
    width = 8 * block_size
    for at in range(0, len(data), width):
        parent = sha256(parent + data[at : at + width]).digest()
        chain.append(parent)


def block_key(chain_hash: bytes, group: int) -> bytes:
    """The key under which the pool knows a block of this group."""
    return chain_hash + group.to_bytes(4, "big")


Find = Callable[[int, int], int | None]
"""`(group index, block ordinal) -> cached block id or None`."""


class Hit(NamedTuple):
    """A prefix found in the cache: its tokens, the block ids per group (0 where a window needs none), and
    `boundary`: where a longer prefix ends that only some groups still hold, 0 if none does.
    """

    tokens: int
    blocks: list[list[int]]
    boundary: int


def alignment(groups: Sequence[GroupSpec]) -> int:
    """Tokens between two places where a hit may end: whole blocks of every group."""
    return lcm(*(group.block_size for group in groups))


def longest_hit(groups: Sequence[GroupSpec], limit: int, find: Find) -> Hit:
    """Longest common prefix of at most `limit` tokens that every group can serve.

    A windowed group needs only the blocks its next query sees; the others are null in its table. Each
    group may shorten the prefix, which may break another's: repeat until none does. Groups that see
    everything are asked first, so what they hold beyond the common prefix is the boundary.
    """
    step = alignment(groups)
    length = limit // step * step
    order = sorted(groups, key=lambda group: group.window is not None)
    tables: dict[int, list[int]] = {}
    longest = 0
    while True:
        before = length
        for group in order:
            table = (_full_hit if group.window is None else _window_hit)(group, length, find)
            length = min(length, len(table) * group.block_size // step * step)
            longest = max(longest, length)
            tables[group.index] = table
        if length == before:
            break
    blocks = [tables[group.index][: length // group.block_size] for group in groups]
    return Hit(length, blocks, longest if longest > length else 0)


def worth_hashing(
    group: GroupSpec, ordinals: range, step: int, interval: int | None, boundaries: Iterable[int]
) -> Iterable[int]:
    """Of a group's full blocks those that a later request may find, as vLLM keeps them.

    A hit ends at a multiple of `step` tokens and a windowed group then needs only the blocks its window
    reaches back into, so other blocks are never asked for. `interval` None keeps those before every
    multiple of `step`, n > 0 before every multiple of n; any interval, 0 too, keeps those before each of
    the `boundaries` (tokens, floored to `step`). Source: `SlidingWindowManager.reachable_block_mask`,
    vLLM 0.32.
    """
    if group.window is None:
        return ordinals
    needed = blocks_in_reach(group)
    segment = step if interval is None else interval
    per_segment = segment // group.block_size
    if segment and needed >= per_segment:
        return ordinals
    ends = [] if interval is None else [at // step * step // group.block_size for at in boundaries]
    return [
        i
        for i in ordinals
        if (segment and i % per_segment >= per_segment - needed) or any(end - needed <= i < end for end in ends)
    ]


def blocks_in_reach(group: GroupSpec) -> int:
    """Blocks before a block boundary into which the window of the next query reaches."""
    assert group.window is not None
    return -(-(group.window - 1) // group.block_size)


def _full_hit(group: GroupSpec, limit: int, find: Find) -> list[int]:
    table: list[int] = []
    for ordinal in range(limit // group.block_size):
        block_id = find(group.index, ordinal)
        if block_id is None:
            break
        table.append(block_id)
    return table


def _window_hit(group: GroupSpec, limit: int, find: Find) -> list[int]:
    """The longest table whose last `blocks_in_reach` blocks are cached (or all, if fewer)."""
    needed = blocks_in_reach(group)
    table = [NULL_BLOCK] * (limit // group.block_size)
    run = 0
    for ordinal in reversed(range(len(table))):
        if run >= needed:
            break
        block_id = find(group.index, ordinal)
        if block_id is None:
            run = 0
            del table[ordinal:]
        else:
            table[ordinal] = block_id
            run += 1
    return table
