"""The keys of a TOML file, read off the schema that checks it, so that what is told of them cannot go stale."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from kvassay.experiment.tokens import parse_tokens

TOP = "top of the file"
"""Stands for the name of a table where keys come before any."""
WORDS = {str: "string", int: "integer", float: "number", bool: "boolean"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class KeyCard:
    """One key of a table: its type with what is allowed, its default as TOML writes it (or `required`), its meaning."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class TableCard:
    """One table of a file: its name, as the file writes it (`[arms]`, `[[workload]]`, or `TOP`), and its keys.

    use: `required` or `optional`
    """

    name: str
    use: str
    meaning: str
    keys: tuple[KeyCard, ...]

    @property
    def plain(self) -> str:
        """The name without brackets."""
        return self.name.strip("[]")


def tables_of(root: type[BaseModel]) -> tuple[TableCard, ...]:
    """Cards of a file's tables in the schema's order, keys of the file itself first; `root` is the whole file's."""
    own: list[KeyCard] = []
    tables: list[TableCard] = []
    for name, field in root.model_fields.items():
        table = _table(field)
        if table is None:
            own.append(_key(name, field))
        else:
            tables.append(_card(name, field, table))
    top = [TableCard(TOP, "optional", "Keys that stand before the first table.", tuple(own))] if own else []
    return (*top, *tables)


def _table(field: FieldInfo) -> type[BaseModel] | None:
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _card(name: str, field: FieldInfo, table: type[BaseModel]) -> TableCard:
    several = typing.get_origin(field.annotation) is tuple
    use = "required" if field.is_required() else "optional"
    meaning = inspect.getdoc(table) or ""
    meaning = meaning.partition(": ")[2] if meaning.startswith("`[") else meaning
    keys = tuple(_key(key, inner) for key, inner in table.model_fields.items())
    return TableCard(
        f"[[{name}]]" if several else f"[{name}]",
        use,
        _line(f"{meaning[:1].upper()}{meaning[1:]} {field.description or ''}"),
        keys,
    )


def _key(name: str, field: FieldInfo) -> KeyCard:
    default = "required" if field.is_required() else _toml(field.get_default(call_default_factory=True))
    return KeyCard(name, _type(field.annotation, field.metadata), default, _line(field.description or ""))


def _type(kind: Any, facts: Sequence[Any] = ()) -> str:
    """The type in words, with its bounds: `list of string, at least one`, `integer ≥ 1`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type(inner[0], [*inner[1:], *facts])
    if any(isinstance(fact, BeforeValidator) and fact.func is parse_tokens for fact in facts):
        return 'tokens, 2048 or "2k"'
    if origin is Literal:
        return _or([f'"{choice}"' for choice in inner])
    if origin is tuple:
        least = any(getattr(fact, "min_length", None) for fact in facts)
        return f"list of {_type(inner[0])}" + ", at least one" * least
    if origin is dict:
        return f"table of name = {_type(inner[1])}"
    if origin is types.UnionType:
        return _or([_type(each) for each in inner])
    return WORDS[kind] + _bounds(facts)


def _or(choices: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def _bounds(facts: Sequence[Any]) -> str:
    found = [(sign, getattr(fact, key, None)) for fact in facts for key, sign in SIGNS.items()]
    return ",".join(f" {sign} {bound:g}" for sign, bound in found if bound is not None)


def _toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _line(text: str) -> str:
    return " ".join(text.split())
