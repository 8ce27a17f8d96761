"""A python that is none: runs `kvpress_fake.py` whatever it is asked to run."""

from __future__ import annotations

import sys
from pathlib import Path


def fake_python(folder: Path) -> Path:
    """An executable in `folder` that KVASSAY_KVPRESS_PYTHON may name."""
    script = Path(__file__).with_name("kvpress_fake.py")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}" "$@"\n')
    python.chmod(0o755)
    return python
