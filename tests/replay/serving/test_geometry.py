"""Units: block counts and shared numbers against single tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import CacheError
from kvassay.layout.config import from_config
from kvassay.replay.serving.geometry import PER_REQUEST, PRIVATE, Geometry, unit_ids
from tests.replay.serving.build import ask, full, hybrid

OWN = PRIVATE + 7 * PER_REQUEST


def test_the_groups_of_real_models() -> None:
    plain = Geometry.of(from_config("smollm2-135m"), 16)
    assert (plain.unit, plain.block_bytes, plain.components) == (16, 16 * 30 * 3 * 2 * 64 * 2, ("full",))
    gemma = Geometry.of(from_config("gemma-3-270m"), 16)
    assert gemma.components == ("full",) + ("sliding",) * 5 or gemma.components.count("sliding") == 5
    windows = [group.window for group in gemma.groups if group.window is not None]
    assert windows == [33] * 5, "511 tokens before the query's own are 32 units of 16"


@given(st.integers(1, 300), st.integers(1, 4))
def test_blocks_are_those_of_single_tokens(tokens: int, size: int) -> None:
    """With a unit of 4 tokens and blocks of `size` units."""
    geometry = full(4)
    assert geometry.blocks(geometry.units(tokens)) == -(-tokens // 4)
    assert -(-geometry.units(tokens) // size) == -(-tokens // (4 * size))
    assert (geometry.units(tokens) - 1) // size == (tokens - 1) // (4 * size), "whole blocks before the last token"


def test_a_windowed_group_never_holds_more_than_its_window_and_a_chunk() -> None:
    """40 units: 20 blocks of 2, and min(40, (3 - 1 + 8) + 1) of 1; what a hit brought is there already."""
    assert hybrid().blocks_after(40, [0, 0], 8) == 20 + 11
    assert hybrid().blocks_after(40, [5, 11], 8) == 15


def test_a_unit_is_shared_as_far_as_the_trace_tells() -> None:
    """9 tokens in units of 2, trace blocks of 4 (ceil): ids 50, 50, 60, 60, and 70 for the ninth."""
    request = ask(0, 9, 5, [50, 60, 70])
    assert unit_ids(request, 7, 2, 4, 0, 7) == [50, 50, 60, 60, 70, OWN + 5, OWN + 6]
    assert unit_ids(request, 7, 2, 4, 3, 6) == [60, 70, OWN + 5]


def test_tokens_beyond_the_last_id_are_the_request_s_own() -> None:
    """Floor: 11 tokens have 2 ids; the unit of tokens 8 and 9 has none."""
    assert unit_ids(ask(0, 11, 1, [50, 60]), 7, 2, 4, 0, 6) == [50, 50, 60, 60, OWN + 4, OWN + 5]
    assert unit_ids(ask(0, 3, 1), 7, 2, 4, 0, 2) == [OWN, OWN + 1]


def test_a_large_unit_needs_its_whole_prefix_shared() -> None:
    """Units of 8 over trace blocks of 4 take the id of the block in which they end."""
    assert unit_ids(ask(0, 20, 4, [50, 60, 70, 80, 90]), 7, 8, 4, 0, 3) == [60, 80, 90]
    assert unit_ids(ask(0, 23, 1, [50, 60, 70, 80, 90]), 7, 8, 4, 0, 3) == [60, 80, OWN + 2]


def test_a_pool_too_small_for_anything_is_refused() -> None:
    assert full().pool_blocks(5_500) == 5
    assert full().pool_blocks(5_500, 0.5) == 11
    with pytest.raises(CacheError, match="holds 1 blocks of 1000, 2 are needed"):
        full().pool_blocks(1_999)
