"""Where a result comes from: the machine in words, versions and commit; nothing that names a person or a path."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from kvassay import __version__

PACKAGES = ("torch", "transformers", "numpy", "scipy", "numba")


def machine(device: str) -> dict[str, Any]:
    """The machine and its software."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cpu_count": psutil.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "device": torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "cpu",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvassay": __version__,
        **{name: _version(name) for name in PACKAGES},
    }


def commit() -> dict[str, Any] | None:
    """The commit of kvassay's own source and whether files differ from it; None if it is not in a repository."""
    here = Path(__file__).resolve().parents[1]
    if git(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = git(here, "rev-parse", "HEAD")
    if found is None:
        return None
    return {"commit": found, "changed": bool(git(here, "status", "--porcelain", "--", "."))}


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def git(folder: Path, *arguments: str) -> str | None:
    """What a git command in a folder prints; None if it fails, or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
