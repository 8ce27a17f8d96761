from __future__ import annotations

from pathlib import Path

import pytest

from . import tiny


@pytest.fixture
def made(tmp_path: Path) -> tiny.Made:
    return tiny.make(tmp_path / "trace")
