"""Process-wide settings that must be in place before torch and numba are imported.

With more than one thread and any other busy process on the machine, OpenMP's default of spinning while
it waits makes decode several times slower, so `prepare()` asks it to sleep instead. numba keeps compiled code
until the file of the function itself changes, whatever it took in from other files, so compiled kernels go to a
folder named by all of their sources. Whatever the user has set already wins.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import sys
from pathlib import Path

import platformdirs

DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def prepare() -> None:
    """Set the environment defaults; call before the first `import torch`."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "NUMBA_CACHE_DIR" not in os.environ:
        os.environ["NUMBA_CACHE_DIR"] = str(compiled_kernels())


def compiled_kernels(package: Path = Path(__file__).parent) -> Path:
    """Where numba keeps the compiled kernels of a package: another folder for every state of their sources."""
    found = hashlib.sha256()
    for source in sorted((package / "kernels").glob("*.py")):
        found.update(source.read_bytes())
    return platformdirs.user_cache_path("kvassay") / "compiled" / found.hexdigest()[:16]


def release_memory() -> None:
    """Drop unreachable objects, and give freed memory back to the system where the allocator can be asked to (glibc).

    It keeps what lies below the last thing in use: after twenty contexts under 25 arms a process held 9.4 GiB with 2.7
    in use.
    """
    gc.collect()
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far, mapped files included.

    Linux says it per program; elsewhere the figure of `getrusage` may include what the process was before it
    executed this program.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
