"""The built-in experiment, and the models it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvassay.record.fetch import fetch
from kvassay.record.models import embedded, is_fetched

DEMO = Path(__file__).with_name("demo.toml")


def fetch_models(names: Sequence[str], say: Callable[[str], None]) -> None:
    """Fetch the embedded models that are not there yet, saying each one's licence first."""
    for name in names:
        if is_fetched(name):
            continue
        licence = embedded(name).licence
        say(f"{name}: {licence.name}. {licence.note}")
        fetch(name, _said_of(name, say))


def _said_of(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: say(f"{name}: {line}")
