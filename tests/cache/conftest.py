"""`KVASSAY_POOL=vllm pytest tests/cache` runs this room's tests on vLLM's block pool instead of ours."""

from __future__ import annotations

import os

import pytest

POOL = os.environ.get("KVASSAY_POOL", "ours")


@pytest.fixture(autouse=True)
def pool_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    if POOL == "vllm":
        from kvassay.cache.vllm.pool import VllmPool

        monkeypatch.setattr("kvassay.cache.tables.BlockPool", VllmPool)
    elif POOL != "ours":
        pytest.exit(f"KVASSAY_POOL is '{POOL}', must be 'ours' or 'vllm'")
