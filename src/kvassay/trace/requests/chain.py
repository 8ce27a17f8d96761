"""Block ids as files give them, interned to small numbers, and checked to name whole prefixes."""

from __future__ import annotations

from typing import NamedTuple

MAX_ID = 2**64 - 1
ROOT = -1


class _Known(NamedTuple):
    number: int
    parent: int


class Chains:
    """Numbers prefix ids 0, 1, ... by first appearance, all 64 bits of them told apart.

    An id must always follow the same id, as it names the prefix and not the block's content alone: only then
    do two equal ids mean that the blocks before them are equal, too. Ids mean something within a scope; a new
    scope (`start_scope`) forgets the old ones and keeps counting.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[int, _Known] = {}

    def start_scope(self) -> None:
        """Let ids mean something else from here on."""
        self._known = {}

    def numbers(self, ids: list[int]) -> tuple[int, ...]:
        """The numbers of one prompt's ids; `ValueError` if one is no id or breaks the chain."""
        if not all(type(block) is int for block in ids) or (ids and not (min(ids) >= 0 and max(ids) <= MAX_ID)):
            wrong = next(block for block in ids if type(block) is not int or not 0 <= block <= MAX_ID)
            raise ValueError(f"{wrong!r} is no block id: whole numbers 0..2^64-1 are allowed")
        parent, found = ROOT, []
        for ordinal, block in enumerate(ids):
            known = self._known.get(block)
            if known is None:
                known = self._known[block] = _Known(self.count, parent)
                self.count += 1
            elif known.parent != parent:
                raise ValueError(
                    f"id {block} at ordinal {ordinal} follows another id than it did before: ids must name the whole "
                    "prefix up to their block"
                )
            parent = known.number
            found.append(parent)
        return tuple(found)
