"""Every key of the two files a user writes, experiment and gate: as a page, as lines, and by example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from kvassay.errors import KvassayError, did_you_mean
from kvassay.experiment.demo import DEMO
from kvassay.experiment.keys import KeyCard, TableCard, tables_of
from kvassay.experiment.schema import Experiment
from kvassay.gate.schema import EXAMPLE, Gate

FILES: dict[str, tuple[type[BaseModel], Path]] = {"experiment": (Experiment, DEMO), "gate": (Gate, EXAMPLE)}
"""File: the schema that checks it, and a whole one as an example."""

HEAD = """# Every key of the two files

What is run stands in an experiment file, what would convince you in a gate file; both are TOML. Generated from the
schemas that check them by `kvassay keys --markdown`; do not edit. `kvassay keys gate` prints the same in a terminal,
`kvassay keys gate --example` a whole file to copy. An unknown key is an error that says what was probably meant.

A `[table]` stands once in a file; a `[[table]]` may be given several times.
"""
FIELDS = ("key", "type", "default", "meaning")


def example(file: str) -> str:
    """A whole file, with comments; `file` is one of `FILES`."""
    return FILES[file][1].read_text(encoding="utf-8")


def markdown() -> str:
    """The page."""
    parts = [HEAD]
    for file, (schema, _) in FILES.items():
        parts += [f"## {file}.toml", "", *(line for table in tables_of(schema) for line in _section(table))]
    return "\n".join([*parts, "## A whole gate", "", f"```toml\n{example('gate')}```", ""])


def lines(file: str | None = None, name: str | None = None) -> Iterator[str]:
    """Each table of the files (of one, if named; and of that one table alone, if named too) with two lines per key.

    Raises `KvassayError` if the file has no such table.
    """
    found = [(each, table) for each in FILES if file in (None, each) for table in tables_of(FILES[each][0])]
    known = [table.plain for _, table in found]
    if name is not None and name not in known:
        raise KvassayError(f"no table of {file}.toml is called '{name}'{did_you_mean(name, known)}")
    for each, table in found:
        if name in (None, table.plain):
            yield f"{each}.toml {table.name} ({table.use}): {table.meaning}"
            for key in table.keys:
                yield f"  {key.name}  ({key.type}; {_default(key)})"
                yield f"    {key.meaning}"


def _default(key: KeyCard) -> str:
    return key.default if key.default == "required" else f"default {key.default}"


def _section(table: TableCard) -> list[str]:
    head = [f"| {' | '.join(FIELDS)} |", "|" + "---|" * len(FIELDS)]
    title = table.name[:1].upper() + table.name[1:] if table.name == table.plain else f"`{table.name}`"
    return [f"### {title}", "", f"{table.meaning} ({table.use})", "", *head, *map(_row, table.keys), ""]


def _row(key: KeyCard) -> str:
    default = key.default if key.default == "required" else f"`{key.default}`"
    cells = (f"`{key.name}`", key.type, default, key.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
