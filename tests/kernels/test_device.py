"""Finding a kernel by device."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from kvassay.errors import KernelError
from kvassay.kernels import device
from kvassay.kernels.cpu import CpuKernel
from kvassay.kernels.gather import ReferenceKernel


def test_the_built_in_kernels() -> None:
    assert isinstance(device.kernel("cpu"), CpuKernel)
    assert isinstance(device.kernel("reference"), ReferenceKernel)


def test_a_device_without_a_kernel() -> None:
    known = r"\(known: cpu, cuda, interpreted, reference\)"
    with pytest.raises(KernelError, match=rf"^no decode kernel for device 'xla' {known}$"):
        device.kernel("xla")
    with pytest.raises(KernelError, match=r"did you mean 'cpu'\?"):
        device.kernel("cpus")


def test_a_number_where_there_is_one_device() -> None:
    with pytest.raises(KernelError, match="the decode kernel for device 'cpu:1' cannot be loaded"):
        device.kernel("cpu:1")


def test_a_kernel_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("gpu", f"{__name__}:Fake", device.GROUP), EntryPoint("npu", "no.such.module:K", device.GROUP)]
    monkeypatch.setattr(device, "entry_points", lambda group: points if group == device.GROUP else [])
    assert isinstance(device.kernel("gpu"), Fake)
    with pytest.raises(KernelError, match=r"the decode kernel for device 'npu' cannot be loaded: No module named 'no'"):
        device.kernel("npu")


def test_looking_for_a_kernel_compiles_nothing() -> None:
    code = "import sys, kvassay.kernels.device; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Fake:
    pass
