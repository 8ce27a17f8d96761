"""TOML files that a schema checks: what their tables are made of, and one line for the first mistake in them."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from kvassay.errors import ExperimentError, KvassayError, did_you_mean


class Table(BaseModel):
    """Base of every table: frozen, strict about types, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def as_tuple(value: object) -> object:
    """TOML has lists; a frozen table holds tuples."""
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


def read_toml(path: str | Path, error: type[KvassayError]) -> dict[str, Any]:
    """What a TOML file holds; an `error` that names file and reason if it cannot be read."""
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as found:
        raise error(f"{file}: cannot be read: {found.strerror or found}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as found:
        raise error(f"{file}: not valid TOML: {found}") from None


@contextmanager
def at(place: str) -> Iterator[None]:
    """Say where in the file it stands if something is refused."""
    try:
        yield
    except KvassayError as error:
        raise ExperimentError(f"{place}: {error}") from None


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line for the first mistake in a file: where it is, what is wrong, what is allowed, how many more there are.

    root: the model of the whole file
    """
    found = _independent(error.errors(include_url=False))
    found.sort(key=lambda item: item["type"] != "extra_forbidden")  # a misspelt key explains much of the rest
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    *parents, key = first["loc"] or ("file",)
    table = _table_name(parents)
    if first["type"] == "extra_forbidden":
        return f"{table}unknown key '{key}'{did_you_mean(str(key), _known(parents, root))}{more}"
    if first["type"] == "missing":
        return f"{table}missing key '{key}'{more}"
    message = first["msg"].removeprefix("Value error, ").replace("\n", " ")
    message = message.replace("tuple", "list").replace("Tuple", "List")
    if first["type"] == "string_pattern_mismatch":
        message = "letters, digits, '.', '_' and '-' only, beginning with a letter or digit"
    got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
    return f"{_place(parents, key, root) if first['loc'] else ''}{message}{got}{more}"


def _place(parents: Sequence[str | int], key: str | int, root: type[BaseModel]) -> str:
    """`[table] key: `, or the name of a whole table as the file writes it."""
    if isinstance(key, int) and len(parents) == 1 and _table_of(parents, root) is not root:
        return f"[[{parents[0]}]] {key + 1}: "
    if not parents and _table_of([key], root) is not root and not _is_list(key, root):
        return f"[{key}] "
    return f"{_table_name(parents)}{_key_name(key)}: "


def _independent(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The errors without those that others entail: a misspelt key leaves one missing, a bad entry a list short."""
    places = [item["loc"] for item in errors]
    misspelt = {item["loc"][:-1] for item in errors if item["type"] == "extra_forbidden"}
    return [
        item
        for item in errors
        if not (item["type"] == "missing" and item["loc"][:-1] in misspelt)
        and not (item["type"] == "too_short" and any(_inside(place, item["loc"]) for place in places))
    ]


def _inside(place: tuple[int | str, ...], table: tuple[int | str, ...]) -> bool:
    return place != table and place[: len(table)] == table


def _key_name(key: str | int) -> str:
    return f"entry {key + 1}" if isinstance(key, int) else key


def _table_name(parents: Sequence[str | int]) -> str:
    """How the file writes the place: `[arms] `, `[[workload]] 2: `."""
    if not parents:
        return ""
    name, *rest = parents
    if rest and isinstance(rest[0], int):
        inner = "".join(f"{_key_name(part)} " for part in rest[1:])
        return f"[[{name}]] {rest[0] + 1}: {inner}"
    return f"[{name}] " + "".join(f"{_key_name(part)} " for part in rest)


def _known(parents: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """Keys of the table at a place."""
    return list(_table_of(parents, root).model_fields)


def _table_of(parents: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel]:
    """Model of the table that the first parent names; the file's own if it names none."""
    field = root.model_fields.get(str(parents[0])) if parents else None
    if field is None:
        return root
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return root


def _is_list(key: str | int, root: type[BaseModel]) -> bool:
    return typing.get_origin(root.model_fields[str(key)].annotation) is tuple
