"""What invalidates a cell, and what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvassay.experiment import code
from kvassay.policy.registry import make, parse

PLUGIN = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from kvassay.policy.base import Policy
from kvassay.policy.card import Card, Effect


@dataclass(frozen=True)
class Mine(Policy):
    card: ClassVar[Card] = Card(name="mine", effects=frozenset({{Effect.EVICT}}), source="test", summary="test")
    strength: int = 1

    def score(self, layer, memory):
        return layer.alive.float() * {factor}
"""


def plugin_hash(folder: Path, factor: str, name: str = "mine.py") -> str:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(PLUGIN.format(factor=factor), encoding="utf-8")
    policy = parse(f"{file}:Mine")
    found = code.replay_code([policy])
    del sys.modules[type(policy).__module__]
    code.source_file.cache_clear()
    return found


def test_the_closure_holds_what_computes_and_nothing_above() -> None:
    found = code.closure([code.REPLAY, "kvassay.policy.snapkv"])
    assert {
        "kvassay.replay.closed",
        "kvassay.replay.rows",
        "kvassay.cache.store",
        "kvassay.cache.ledger",
        "kvassay.kernels.cpu",
        "kvassay.kernels.reference",
        "kvassay.measure.result",
        "kvassay.measure.task",
        "kvassay.layout.groups",
        "kvassay.trace.reader",
        "kvassay.policy.base",
        "kvassay.policy.snapkv",
    } <= found
    rooms = {name.split(".")[1] for name in found}
    assert not rooms & {"cli", "report", "gate", "experiment"}
    assert "kvassay.policy.kivi" not in found
    assert "kvassay.measure.aggregate" not in found and "kvassay.measure.metrics" not in found


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("def f(x):\n    return x + 1\n", True),
        ('"""Docs."""\n\n\ndef f(x):  # a comment\n    """More."""\n    return (x +\n            1)\n', True),
        ("def f(x):\n    return x + 2\n", False),
        ("def f(y):\n    return y + 1\n", False),
        ("def f(x):\n    return x + 1\n\n\nZ = 'text'\n", False),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(
    text: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for number, source in enumerate(("def f(x):\n    return x + 1\n", text)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "probe_module.py").write_text(source, encoding="utf-8")
        monkeypatch.setattr(code, "source_file", lambda _, folder=folder: folder / "probe_module.py")
        hashes.append(code.code_sha256(["kvassay.probe"]))
    assert (hashes[0] == hashes[1]) is same


def test_another_policy_is_other_code_and_parameters_are_not() -> None:
    assert code.replay_code([make("snapkv")]) == code.replay_code([make("snapkv", window=8)])
    assert code.replay_code([make("snapkv")]) != code.replay_code([make("knorm")])
    assert code.replay_code([make("snapkv")]) != code.replay_code([make("snapkv~flipped")])


def test_a_plug_in_counts_wherever_its_file_lies(tmp_path: Path) -> None:
    first = plugin_hash(tmp_path / "a", "1.0")
    assert plugin_hash(tmp_path / "b", "1.0") == first
    assert plugin_hash(tmp_path / "b", "1.0  # the same") == first
    assert plugin_hash(tmp_path / "b", "2.0") != first
