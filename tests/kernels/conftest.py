"""Kernels of tiny caches: a second thread would only wait, unless a test is about threads."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest

from tests.kernels.devices import DEVICES, Device


@pytest.fixture(scope="session", params=DEVICES)
def on(request: pytest.FixtureRequest) -> Device:
    """Each device that has a kernel here."""
    return Device(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
