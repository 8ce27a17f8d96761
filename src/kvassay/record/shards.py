"""Whether a model's safetensors files are whole: their own headers say how long they must be."""

from __future__ import annotations

import json
from pathlib import Path

from kvassay.errors import ModelError


def check_shards(folder: Path) -> None:
    """Raise `ModelError` for the first `*.safetensors` file of a folder that is cut short or damaged."""
    for path in sorted(folder.glob("*.safetensors")):
        size, needed = path.stat().st_size, _needed(path)
        if needed is None:
            raise ModelError(f"{path}: {size} bytes, not a safetensors file or cut short in its header")
        if size != needed:
            what = "cut short" if size < needed else "too long"
            raise ModelError(f"{path}: {what}: {size} bytes, its header describes {needed}; download it again")


def _needed(path: Path) -> int | None:
    """Bytes that the file's header asks for; None if there is no whole header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            return None
        try:
            entries = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            return 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return None
