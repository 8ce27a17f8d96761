"""The roofs are what was measured: sizes and clock are the only inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvassay.kernels import device_roofs, roofs


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


def test_a_device_that_torch_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second passes between looks at the clock, over ten calls."""
    ticks = iter(range(100))
    monkeypatch.setattr(device_roofs.time, "perf_counter", lambda: 0.5 * next(ticks))
    rates = device_roofs.device_rates(torch.device("cpu"), 3, read_bytes=4096, matrix=16)
    assert rates == [(4096 / 0.05, 2 * 16**3 / 0.05)] * 3
    assert device_roofs.typical([(1.0, 5.0), (2.0, 7.0), (6.0, 6.0)]) == (2.0, 6.0, 6.0, 7.0)
