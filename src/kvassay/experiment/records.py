"""Flat records as parquet: a frozen dataclass per row, one column per field."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from kvassay.errors import ExperimentError

T = TypeVar("T")
_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def arrow_type(hint: Any) -> Any:
    """Column type of a field: `str`, `int`, `float`, `bool`, each perhaps `| None`, a literal of strings, or a tuple
    of one type."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        hint = type(typing.get_args(hint)[0])
    if typing.get_origin(hint) is tuple:
        return pa.list_(arrow_type(typing.get_args(hint)[0]))
    return _ARROW[hint]


def record_schema(kind: type[Any]) -> Any:
    """Columns of a dataclass of flat fields, in order."""
    hints = typing.get_type_hints(kind)
    return pa.schema([(f.name, arrow_type(hints[f.name])) for f in dataclasses.fields(kind)])


def write_records(records: Sequence[Any], kind: type[Any], path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Write records of one kind; `notes` go into the file's metadata."""
    schema = record_schema(kind).with_metadata(dict(notes or {}))
    pq.write_table(pa.Table.from_pylist([dataclasses.asdict(record) for record in records], schema=schema), path)


def read_records(path: Path, kind: type[T]) -> tuple[T, ...]:
    """Read them back; none if there is no file. `ExperimentError` if it is damaged or of another version."""
    if not path.is_file():
        return ()
    try:
        return tuple(kind(**_frozen(row)) for row in pq.read_table(path).to_pylist())
    except (pa.ArrowException, OSError, TypeError) as error:
        raise ExperimentError(f"{path}: cannot be read: {first_line(error)}") from None


def _frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose lists are tuples again."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def first_line(error: Exception) -> str:
    """An exception on one line."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def read_notes(path: Path) -> dict[str, str]:
    """What `write_records` noted; empty if there is no file, or it is damaged."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        return {}
    return {key.decode(): value.decode() for key, value in metadata.items()}
