"""Writing an experiment as TOML; the standard library only reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvassay.experiment.schema import Experiment


def resolved_toml(experiment: Experiment) -> str:
    """The experiment with every default written out; `load_experiment` reads an equal one back.

    A model folder under the user's home is written with `~`.
    """
    data = experiment.model_dump(mode="json")
    data["experiment"]["models"] = [_without_home(name) for name in data["experiment"]["models"]]
    parts: list[str] = []
    for name, value in data.items():
        tables = value if isinstance(value, list) else [value]
        heading = f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
        parts.extend(f"{heading}\n{_lines(table)}" for table in tables)
    return "\n".join(parts)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    # JSON's strings, numbers and booleans are TOML's too, but DEL must be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_home(name: str) -> str:
    try:
        return f"~/{Path(name).relative_to(Path.home()).as_posix()}"
    except (ValueError, RuntimeError):
        return name
