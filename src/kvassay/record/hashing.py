"""sha256 of weights and tokenizers: what a trace's provenance names a model by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHUNK = 1 << 22


def file_sha256(path: Path) -> str:
    """Return the sha256 of one file, hex."""
    return files_sha256([path])


def files_sha256(paths: Iterable[Path]) -> str:
    """Return the sha256 of the files' bytes joined in the given order, hex."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the sha256 of everything that decides how `tokenizer` splits text, hex.

    A fast tokenizer is hashed by its whole serialised pipeline, a slow one by its vocabulary.
    """
    if getattr(tokenizer, "is_fast", False):
        text = tokenizer.backend_tokenizer.to_str()
    else:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()
