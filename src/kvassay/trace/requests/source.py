"""Lines of a JSONL file as objects, and checked access to their keys: every error names file, line and key."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvassay.errors import TraceError, did_you_mean


class Row:
    """One JSON object and where it stands in its file."""

    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        self.where = where
        self.data = data

    def fail(self, key: str, what: str) -> TraceError:
        """The error for one key of this row."""
        return TraceError(f"{self.where}: key '{key}': {what}")

    def get(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.data:
            raise TraceError(f"{self.where}: missing key '{key}'{did_you_mean(key, self.data)}")
        return self.data[key]

    def count(self, key: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.get(key)
        if type(value) is not int or value < least:
            raise self.fail(key, f"{value!r} is not a whole number of at least {least}")
        return value

    def seconds(self, key: str) -> float:
        """A time of at least 0."""
        value = self.get(key)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.fail(key, f"{value!r} is not a time of at least 0")
        return float(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.fail(key, f"{value!r} is no text")
        return value

    def items(self, key: str) -> list[Any]:
        """A list."""
        value = self.get(key)
        if not isinstance(value, list):
            raise self.fail(key, f"a {type(value).__name__} is no list")
        return value

    def only(self, *keys: str) -> None:
        """Raise `TraceError` if there is a key that is none of these: a misspelt option must not be ignored."""
        for key in self.data:
            if key not in keys:
                raise TraceError(f"{self.where}: unknown key '{key}'{did_you_mean(key, keys)}")

    def inner(self, place: str, data: Any) -> Row:
        """An object inside this row."""
        where = f"{self.where}: {place}"
        if not isinstance(data, dict):
            raise TraceError(f"{where}: a {type(data).__name__} is no object")
        return Row(where, data)


def rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line numbers from 1 and their objects; blank lines are skipped, `.gz` is unpacked on the way."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _row(f"{path}:{number}", line)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None


def _row(where: str, line: str) -> Row:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise TraceError(f"{where}: a JSON {type(data).__name__}, not an object")
    return Row(where, data)
