"""The roofs are what was measured: sizes and clock are the only inputs."""

from __future__ import annotations

import numpy as np
import pytest

from kvassay.kernels import roofs


def test_the_sum_reads_everything() -> None:
    x = np.arange(64, dtype=np.float32)
    assert roofs._read(x, 8) == 64 * 63 / 2


def test_bytes_and_operations_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(roofs, "READ_BYTES", 4096)
    monkeypatch.setattr(roofs, "MATRIX", 16)
    monkeypatch.setattr(roofs.time, "perf_counter", lambda: float(next(ticks)))
    for cached in (roofs._memory, roofs._matrices):
        cached.cache_clear()
    found = roofs.measure_roofs(rounds=3)
    for cached in (roofs._memory, roofs._matrices):
        cached.cache_clear()
    assert (found.bandwidth, found.matrix_rate) == (4096.0, 2 * 16.0**3)
    assert (found.bandwidth_best, found.matrix_rate_best) == (4096.0, 8192.0)
