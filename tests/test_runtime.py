"""Settings of the process: what is set, and what the user's own setting keeps."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvassay.runtime import compiled_kernels, peak_rss_bytes

CODE = "import os, kvassay; print(os.environ['NUMBA_CACHE_DIR']); print(os.environ['OMP_WAIT_POLICY'])"


def told(**environment: str) -> list[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=clean | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_compiled_code_goes_where_its_sources_say() -> None:
    assert told() == [str(compiled_kernels()), "passive"]


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    assert told(NUMBA_CACHE_DIR=str(tmp_path), OMP_WAIT_POLICY="active") == [str(tmp_path), "active"]


def test_a_change_in_any_kernel_source_is_another_folder(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "outer.py").write_text("calls inner")
    (kernels / "inner.py").write_text("one")
    before = compiled_kernels(tmp_path)
    assert compiled_kernels(tmp_path) == before
    (kernels / "inner.py").write_text("two")
    assert compiled_kernels(tmp_path) != before


def test_the_peak_is_linuxs_own_line_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "VmPeak:\t    9000 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert peak_rss_bytes() == 2048 * 1024


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_elsewhere_the_peak_is_that_of_getrusage_in_the_systems_unit(
    platform: str, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    monkeypatch.setattr(sys, "platform", platform)
    assert peak_rss_bytes() == 5000 * unit


GROWN = """
import re, sys
from pathlib import Path
from kvassay.runtime import release_memory

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

release_memory()
before = held()
some = [bytearray(100_000) for _ in range(3000)]  # below what is mapped by itself, 286 MiB in all
last = bytearray(100_000)                         # in use behind them
del some
after = held()
release_memory()
print(before, after, held())
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or getattr(ctypes.CDLL(None), "malloc_trim", None) is None,
    reason="only glibc can be asked for freed memory",
)
def test_freed_memory_below_what_is_in_use_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", GROWN], capture_output=True, text=True, check=True)
    before, after, released = map(int, done.stdout.split())
    assert after - before > 200
    assert released - before < 50
