from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiment.tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer llama with a byte tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")
