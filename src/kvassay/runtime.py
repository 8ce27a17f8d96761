"""Process-wide settings that must be in place before torch is imported.

With more than one thread and any other busy process on the machine, OpenMP's default of spinning while
it waits makes decode several times slower, so `prepare()` asks it to sleep instead. Whatever the user has
set already wins.
"""

from __future__ import annotations

import os

DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def prepare() -> None:
    """Set the environment defaults; call before the first `import torch`."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
