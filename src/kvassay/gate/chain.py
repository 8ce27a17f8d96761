"""The log of declared gates: one JSON object a line, each with the hash of the line before.

An entry that is edited, removed or moved breaks the chain behind it. What a chain cannot show by itself is that its
end was cut off, or that all of it was written anew: keep the last hash elsewhere (`kvassay gate verify --head`), or
commit the log.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import filelock

from kvassay.errors import GateError

LOG = "gate-log.jsonl"
"""Name of the log, beside the gate files that are declared in it."""
BEGIN = "0" * 64
"""What the first entry has for the hash of the entry before."""


@dataclass(frozen=True)
class Entry:
    """One declaration."""

    number: int
    """From 1."""
    time: str
    """When it was declared, UTC, ISO 8601 to the second."""
    gate: str
    """Name of the gate."""
    file: str
    """Name of its file, without folders."""
    sha256: str
    """Of the file's bytes."""
    kvassay: str
    """Version that declared it."""
    commit: str | None
    """Commit that last changed the file, if it is committed as declared."""
    previous: str
    """Hash of the entry before; `BEGIN` for the first."""
    hash: str
    """sha256 of all fields above."""


def make_entry(**values: Any) -> Entry:
    """An entry of everything but the hash, which is computed."""
    return Entry(**values, hash=_hash(values))


def read_log(path: Path) -> tuple[Entry, ...]:
    """The entries of a whole log, oldest first; `GateError` names the first line that does not fit the chain.

    A log that is not there holds none.
    """
    if not path.is_file():
        return ()
    entries: list[Entry] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GateError(f"{path}: cannot be read: {error}") from None
    if text and not text.endswith("\n"):
        raise GateError(f"{path}: line {text.count(chr(10)) + 1}: cut off in the middle")
    for number, line in enumerate(text.splitlines(), 1):
        entry = _parse(line, f"{path}: line {number}")
        _follow(entry, entries, f"{path}: line {number}")
        entries.append(entry)
    return tuple(entries)


def _follow(entry: Entry, before: list[Entry], place: str) -> None:
    values = asdict(entry)
    if values.pop("hash") != _hash(values):
        raise GateError(f"{place}: was edited: its hash is not that of what it says")
    previous = before[-1].hash if before else BEGIN
    if entry.number != len(before) + 1 or entry.previous != previous:
        raise GateError(f"{place}: the chain is broken: an entry before it was removed, moved or replaced")
    if before and entry.time < before[-1].time:
        raise GateError(f"{place}: declared at {entry.time}, before the entry above ({before[-1].time})")


def verify(path: Path, head: str | None = None) -> tuple[Entry, ...]:
    """The log's entries, the chain proved; `head`: the hash of an entry that must still be in it.

    Raises `GateError` if there is no log, the chain is broken, or `head` is gone (cut off, or all written anew).
    """
    if not path.is_file():
        raise GateError(f"{path}: there is no log; `kvassay gate declare` begins one")
    entries = read_log(path)
    if head is not None and head not in {entry.hash for entry in entries}:
        raise GateError(f"{path}: no entry has the hash {head}: the log was cut off or written anew")
    return entries


def append(path: Path, **values: Any) -> Entry:
    """Add an entry to the log, in one step that leaves the log whole; `values` are all but number and hashes.

    Raises `GateError` if the log as it stands is broken: nothing is added to it.
    """
    with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=10):
        entries = read_log(path)
        previous = entries[-1].hash if entries else BEGIN
        entry = make_entry(number=len(entries) + 1, previous=previous, **values)
        temporary = path.with_name(f".tmp-{path.name}")
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(dump((*entries, entry)))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    return entry


def dump(entries: tuple[Entry, ...]) -> str:
    """The log's text."""
    return "".join(json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in entries)


def _parse(line: str, place: str) -> Entry:
    try:
        data = json.loads(line)
    except ValueError:
        raise GateError(f"{place}: is not JSON") from None
    names = [field.name for field in fields(Entry)]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        raise GateError(f"{place}: is not an entry of a gate log: it needs {', '.join(names)}")
    if type(data["number"]) is not int or not all(isinstance(data[name], str) for name in names if name not in _OTHER):
        raise GateError(f"{place}: is not an entry of a gate log: a field has another type")
    return Entry(**data)


_OTHER = ("number", "commit")


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
