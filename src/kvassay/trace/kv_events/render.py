"""What `kvassay trace kv-events` shows of an index."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvassay.trace.kv_events.index import Block, Key, KVIndex

MEANING = (
    "blocks: findable hashes; copies: physical copies of them; mapped: hashes whose tokens are known; broken: blocks "
    "whose parent is not in their group, which without a window no prompt can reach; reach: tokens of the longest "
    "prefix that can be found whole."
)


def index_data(index: KVIndex) -> dict[str, Any]:
    """Counts of the stream and of each (medium, group) at its end, as plain data."""
    groups: dict[tuple[str, int], list[tuple[Key, Block]]] = defaultdict(list)
    for key, block in index.blocks.items():
        groups[key.medium, key.group].append((key, block))
    broken = set(index.broken())
    return {
        "messages": index.messages,
        "gaps": [list(gap) for gap in index.gaps],
        "stored": index.stored,
        "removed": index.removed,
        "clears": index.clears,
        "orphans": index.orphans,
        "unmapped": index.unmapped,
        "unknown_removals": index.unknown_removals,
        "groups": [_group(index, place, blocks, broken) for place, blocks in sorted(groups.items())],
    }


def _group(index: KVIndex, place: tuple[str, int], blocks: list[tuple[Key, Block]], broken: set[Key]) -> dict[str, Any]:
    return {
        "medium": place[0],
        "group": place[1],
        "block_sizes": sorted({block.block_size for _, block in blocks}),
        "blocks": len(blocks),
        "copies": sum(block.copies for _, block in blocks),
        "mapped": sum(block.tokens is not None for _, block in blocks),
        "broken": sum(key in broken for key, _ in blocks),
        "reach": _reach(index, blocks),
    }


def _reach(index: KVIndex, blocks: list[tuple[Key, Block]]) -> int:
    """Longest whole prefix in tokens, each block's length worked out once."""
    known: dict[Key, int] = {}
    for key, _ in blocks:
        path: list[Key] = []
        at: Key | None = key
        while at is not None and at not in known:
            path.append(at)
            block = index.blocks.get(at)
            if block is None or not block.parent_known:
                known[at] = 0
                break
            if block.parent is None:
                known[at] = block.block_size
                break
            at = Key(at.medium, at.group, block.parent)
        for one in reversed(path):
            if one not in known:
                block = index.blocks[one]
                assert block.parent is not None
                before = known[Key(one.medium, one.group, block.parent)]
                known[one] = before + block.block_size if before else 0
    return max(known.values(), default=0)


def index_tables(index: KVIndex) -> RenderableType:
    """The same for people."""
    data = index_data(index)
    head = ", ".join(f"{data[name]:,} {name.replace('_', ' ')}" for name in data if name not in ("gaps", "groups"))
    parts: list[RenderableType] = [Text(head)]
    for first, last in data["gaps"]:
        parts.append(Text(f"gap: messages {first} to {last} are missing; everything before them was forgotten"))
    table = Table("medium", "group", "block size", "blocks", "copies", "mapped", "broken", "reach (tokens)")
    for row in data["groups"]:
        sizes = ", ".join(map(str, row["block_sizes"]))
        counts = [f"{row[name]:,}" for name in ("blocks", "copies", "mapped", "broken", "reach")]
        table.add_row(row["medium"], str(row["group"]), sizes, *counts)
    return Group(*parts, table, Text(MEANING))
