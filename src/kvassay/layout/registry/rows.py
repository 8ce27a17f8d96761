"""Reading the registry: one JSON file per model, whose layout comes from the raw configuration in it.

A row adds what no configuration says: the context a model was trained for, the formats engines ship its cache in,
weights, window conventions, and how well each fact is known. The configuration holds only the keys on which a
layout depends, spelt as the published file spells them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from kvassay.errors import LayoutError, did_you_mean

_ENDING = ".json"


@dataclass(frozen=True)
class Context:
    """Tokens a model was made for, and tokens claimed for it."""

    native: int
    """Trained and released for; it may be less than the configuration's `max_position_embeddings`."""
    advertised: int | None = None
    """What vendor or hosts say, where it differs from `native` or from the configuration."""
    note: str | None = None


@dataclass(frozen=True)
class Shipped:
    """A format in which an engine or a checkpoint holds the cache."""

    name: str
    """A dtype or a record format of `layout.formats`."""
    where: str


@dataclass(frozen=True)
class Parameters:
    """Weights, rounded as published."""

    source: str
    active: float | None = None
    """How many take part in one token."""
    total: float | None = None


@dataclass(frozen=True)
class Evidence:
    """Where the facts of a row are from."""

    grade: Literal[
        "config_copy", "test_assertion", "derivative_config", "port", "class_default", "model_card", "article"
    ]
    """Best first: the checkpoint's configuration; a test that asserts it; a fine-tune's; a third-party engine that
    quotes it; the default of a class whose documented checkpoint this is; a card; an article."""
    confidence: Literal["seen", "reported"]
    """`seen`: in a configuration or in code; `reported`: in a card or an article."""
    sources: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True)
class Row:
    """One published model."""

    id: str
    title: str
    repo: str
    """On Hugging Face."""
    context: Context
    formats: tuple[Shipped, ...]
    evidence: Evidence
    config: Mapping[str, Any]
    """Raw configuration, which `from_config` reads; not to be changed."""
    parameters: Parameters | None = None
    window: str | None = None
    """How engines count the window; `Window.size` here is visible tokens, the query's own included."""
    drafter: str | None = None
    """Layers for multi-token prediction or a draft model, which no count here includes."""
    notes: tuple[str, ...] = ()


@cache
def ids() -> tuple[str, ...]:
    """Return the ids of all rows, sorted."""
    found = (entry.name for entry in files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(_ENDING) for name in found if name.endswith(_ENDING)))


def find(name: object) -> Row | None:
    """Return the row called `name`, or None: a path or a repository is no id, even where one ends like it."""
    return row(name) if isinstance(name, str) and name in ids() else None


@cache
def row(name: str) -> Row:
    """Return the row called `name`; `LayoutError` names the nearest."""
    if name not in ids():
        raise LayoutError(f"no model '{name}' in the registry{did_you_mean(name, ids())}")
    return read(json.loads(files(__package__).joinpath(name + _ENDING).read_text(encoding="utf-8")))


def of_repo(repo: str) -> Row | None:
    """Return the row of a Hugging Face repository, or None."""
    return next((found for found in map(row, ids()) if found.repo.lower() == repo.lower()), None)


def read(document: Mapping[str, Any]) -> Row:
    """Return the row that a file's object spells; a wrong key is a `TypeError`, since the files are our own."""
    given = dict(document)
    given["context"] = Context(**given["context"])
    given["formats"] = tuple(Shipped(**one) for one in given["formats"])
    given["evidence"] = Evidence(**{**given["evidence"], "sources": tuple(given["evidence"]["sources"])})
    given["parameters"] = Parameters(**given["parameters"]) if "parameters" in given else None
    given["notes"] = tuple(given.get("notes", ()))
    return Row(**given)
