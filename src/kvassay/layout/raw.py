"""A strict, named view of a raw model configuration: every error names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvassay.errors import LayoutError


class _Required:
    """Marks a key that has no default."""


REQUIRED = _Required()


@dataclass(frozen=True)
class Raw:
    """Raw configuration keys of one text model.

    `name` says where they came from (a file, an id, a class). A key holding null counts as absent,
    as it does for every reader of these files.
    """

    data: Mapping[str, Any]
    name: str
    model_type: str

    def has(self, key: str) -> bool:
        """Return whether `key` is present and not null."""
        return self.data.get(key) is not None

    def error(self, problem: str) -> LayoutError:
        """Return a one-line `LayoutError` that names the source and the model type."""
        return LayoutError(f"{self.name}: {problem} (model type '{self.model_type}')")

    def integer(self, key: str, default: int | _Required = REQUIRED, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"key '{key}' must be an integer, not {value!r}")
        if value < minimum:
            raise self.error(f"key '{key}' is {value}, must be at least {minimum}")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED) -> float:
        """Return a positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(f"key '{key}' must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; 0 and 1 are taken as such."""
        value = self._get(key, default)
        if value not in (0, 1, False, True):
            raise self.error(f"key '{key}' must be true or false, not {value!r}")
        return bool(value)

    def items(self, key: str, default: list[Any] | _Required = REQUIRED) -> list[Any]:
        """Return a list."""
        value = self._get(key, default)
        if not isinstance(value, list | tuple):
            raise self.error(f"key '{key}' must be a list, not {value!r}")
        return list(value)

    def table(self, key: str) -> dict[str, Any]:
        """Return an object as a dict; empty if the key is absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(f"key '{key}' must be an object, not {value!r}")
        return dict(value)

    def sub(self, key: str) -> Raw:
        """Return the object under `key` as a view of its own, whose errors name the path."""
        return Raw(self.table(key), f"{self.name}: {key}", self.model_type)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Raw:
        """Return a view in which absent keys take the values of `defaults`."""
        absent = {key: value for key, value in defaults.items() if not self.has(key)}
        return Raw({**self.data, **absent}, self.name, self.model_type)

    def _get(self, key: str, default: Any) -> Any:
        if self.has(key):
            return self.data[key]
        if isinstance(default, _Required):
            raise self.error(f"missing key '{key}'")
        return default
