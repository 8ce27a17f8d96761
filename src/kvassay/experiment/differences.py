"""Settings and provenance of two runs, side by side: what of code, versions, machine and protocol differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPARED = ("code_sha256", "commit", "machine", "protocol", "protection", "jobs", "threads_per_job", "calibrations")
"""Keys of a manifest that say how its numbers came to be; models and trace sets come besides, by name."""


@dataclass(frozen=True)
class Change:
    """One thing that differs; None on a side that does not say."""

    what: str
    before: Any
    after: Any


NAMED = (
    ("models", "model", ("name",)),
    ("trace_sets", "trace set", ("model", "trace_set")),
    ("arms", "arm", ("label",)),
)
"""Lists of a manifest: key, word, and what names an entry. Entries of one run alone are not told here."""
LEFT_OUT = ("floor", "missing", "summary")
"""Keys of such entries that follow from the results, or are only words."""


def changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    """What differs between two manifests, key by key; `machine.torch` names a key in a table."""
    found = list(_differing("", {k: a.get(k) for k in COMPARED}, {k: b.get(k) for k in COMPARED}))
    codes = [manifest.get("policy_code", {}) for manifest in (a, b)]
    found += _differing(
        "own code of arm ", *({arm: code[arm] for arm in codes[0] if arm in codes[1]} for code in codes)
    )
    for key, word, names in NAMED:
        mine, theirs = (_by_name(manifest.get(key, ()), names) for manifest in (a, b))
        for name in mine:
            if name in theirs:
                found += _differing(f"{word} {name}: ", mine[name], theirs[name])
    return tuple(found)


def _by_name(entries: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Entries by what names them, without it."""
    return {
        ", ".join(str(entry.get(name)) for name in names): {
            key: value for key, value in entry.items() if key not in (*names, *LEFT_OUT)
        }
        for entry in entries
    }


def _differing(path: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    before, after = dict(_leaves(a)), dict(_leaves(b))
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Change(path + name, before.get(name), after.get(name))


def _leaves(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner
