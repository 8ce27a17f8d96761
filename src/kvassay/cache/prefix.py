"""Prefix hashes and the longest cached prefix that all groups agree on.

A block's hash chains its tokens to the hash of the block before it, whole sha256 digests, never cut.
Groups of one block size share the chain; the group index is appended to make the key, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np

from kvassay.cache.ops import GroupSpec
from kvassay.cache.pool import NULL_BLOCK


def extend_chain(chain: list[bytes], tokens: Sequence[int], upto: int, block_size: int, salt: bytes) -> None:
    """Append the hashes of the full blocks among `tokens[:upto]` that `chain` does not have yet.

    `salt` sets apart caches whose content differs for the same tokens (another prefill mode, say).
    """
    for i in range(len(chain), upto // block_size):
        parent = chain[i - 1] if i else sha256(b"kvassay prefix" + salt).digest()
        block = np.asarray(tokens[i * block_size : (i + 1) * block_size], dtype="<i8")
        chain.append(sha256(parent + block.tobytes()).digest())


def block_key(chain_hash: bytes, group: int) -> bytes:
    """The key under which the pool knows a block of this group."""
    return chain_hash + group.to_bytes(4, "little")


Find = Callable[[int, int], int | None]
"""`(group index, block ordinal) -> cached block id or None`."""


def longest_hit(groups: Sequence[GroupSpec], limit: int, find: Find) -> tuple[int, list[list[int]]]:
    """Longest common prefix of at most `limit` tokens that every group can serve, and its block ids.

    A windowed group needs only the blocks its next query sees; the others are null in its table. Each
    group may shorten the prefix, which may break another's: repeat until none does.
    """
    length = limit
    while True:
        tables = []
        for group in groups:
            table = (_full_hit if group.window is None else _window_hit)(group, length, find)
            tables.append(table)
            length = min(length, len(table) * group.block_size)
        if all(len(table) * group.block_size == length for group, table in zip(groups, tables, strict=True)):
            return length, tables


def _full_hit(group: GroupSpec, limit: int, find: Find) -> list[int]:
    table: list[int] = []
    for ordinal in range(limit // group.block_size):
        block_id = find(group.index, ordinal)
        if block_id is None:
            break
        table.append(block_id)
    return table


def _window_hit(group: GroupSpec, limit: int, find: Find) -> list[int]:
    """The longest table whose last `ceil((window - 1) / block_size)` blocks are cached (or all, if fewer)."""
    assert group.window is not None
    needed = -(-(group.window - 1) // group.block_size)
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
