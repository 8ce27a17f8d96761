"""Worlds recorded once per session, and a watch that makes every step of a replay prove the cache's laws."""

from __future__ import annotations

from typing import Any

import numba
import pytest
import torch

from kvassay.policy.kvpress.bridge import SETTING
from tests.policy.kvpress_setup import fake_python
from tests.replay.watch import Watch
from tests.replay.worlds import HYBRID, World, make


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    numba.set_num_threads(1)


@pytest.fixture(scope="session")
def _fake_kvpress(tmp_path_factory: Any) -> Any:
    return fake_python(tmp_path_factory.mktemp("kvpress"))


@pytest.fixture(autouse=True)
def _kvpress(monkeypatch: pytest.MonkeyPatch, _fake_kvpress: Any) -> None:
    monkeypatch.setenv(SETTING, str(_fake_kvpress))  # the bridge needs an environment that is not here


@pytest.fixture(scope="session")
def llama(tmp_path_factory: Any) -> World:
    """4 full layers, 4 query heads over 2 KV heads, 404 tokens of context: the last block is partial."""
    return make(tmp_path_factory.mktemp("llama"), "llama", 404)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: Any) -> World:
    """Sliding and full layers, 2 KV heads."""
    return make(tmp_path_factory.mktemp("gemma"), "gemma3", 150, **HYBRID)


@pytest.fixture(scope="session")
def gemma_mqa(tmp_path_factory: Any) -> World:
    """Sliding and full layers, 1 KV head for all query heads."""
    return make(tmp_path_factory.mktemp("gemma-mqa"), "gemma3", 150, **HYBRID, num_key_value_heads=1)


@pytest.fixture
def world(request: Any) -> World:
    """A world by name, for `indirect` parameters."""
    found: World = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Installs a `Watch` on every replay of the test."""
    return Watch(monkeypatch)
