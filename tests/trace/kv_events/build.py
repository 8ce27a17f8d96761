"""Messages as vLLM sends them, in both of its encodings."""

from __future__ import annotations

from typing import Any

import msgspec

from kvassay.trace.kv_events.frames import Frame


def stored(
    hashes: list[Any], tokens: list[int], parent: Any = None, size: int = 2, group: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": group,
        **more,
    }


def removed(*hashes: Any, group: int = 0, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group}


CLEARED = {"type": "AllBlocksCleared"}


def message(number: int, *events: Any, rank: int | None = None) -> Frame:
    batch = [1.5, list(events)] if rank is None else [1.5, list(events), rank]
    return Frame(number, msgspec.msgpack.encode(batch))
