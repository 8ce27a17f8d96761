"""Where in the context what is held lies, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvassay.replay.levels import kept_by_position


def lane(length: int, live: dict[int, list[list[int]]], scope: set[int] | None = None) -> Any:
    """A lane of `length` tokens whose layers' heads hold these positions."""
    ledger = SimpleNamespace(live=lambda seq, layer: tuple(np.array(head, dtype=np.int64) for head in live[layer]))
    return SimpleNamespace(cache=SimpleNamespace(ledger=ledger), seq=0, length=length, scope=frozenset(scope or live))


def test_shares_are_over_the_stretchs_tokens_and_all_heads() -> None:
    # Ten tokens in four stretches: 0-2, 3-4, 5-7, 8-9.
    found = kept_by_position(lane(10, {0: [[0, 1, 9], [0]], 1: [[0, 1, 2, 3], [8, 9]]}), bins=4)
    assert found == pytest.approx((6 / 12, 1 / 8, 0.0, 3 / 8))


def test_layers_out_of_scope_do_not_count() -> None:
    assert kept_by_position(lane(4, {0: [[0]], 1: [[0, 1, 2, 3]]}, scope={0}), bins=2) == (0.5, 0.0)


def test_a_short_context_has_a_stretch_per_token_and_a_full_one_is_all_ones() -> None:
    assert kept_by_position(lane(3, {0: [[0, 2]]})) == (1.0, 0.0, 1.0)
    assert kept_by_position(lane(200, {0: [list(range(200))] * 3})) == (1.0,) * 64
