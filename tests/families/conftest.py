"""Each family's world, recorded when it is first asked for; one thread and a watch as in the tests of the replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.families import world
from tests.replay.conftest import _one_thread, watch
from tests.replay.worlds import World

__all__ = ["_one_thread", "watch"]

Recorded = Callable[[str], World]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: Any) -> Recorded:
    """The world of a family, by its name."""
    folder, found = tmp_path_factory.mktemp("families"), dict[str, World]()

    def get(family: str) -> World:
        if family not in found:
            found[family] = world.record(folder, family)
        return found[family]

    return get
