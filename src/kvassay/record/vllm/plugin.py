"""The general plug-in that vLLM loads in each of its processes: it records where the environment says so."""

from __future__ import annotations

import os


def register() -> None:
    """Install a recorder if `KVASSAY_VLLM_RECORD` names a folder; else do nothing, and import nothing."""
    from kvassay.record.vllm.limits import from_environment

    wanted = from_environment(os.environ)
    if wanted is None:
        return
    from kvassay.record.vllm.install import install
    from kvassay.record.vllm.recorder import Recorder

    install(Recorder(*wanted))
