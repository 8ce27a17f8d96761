"""The adapter's own rules, which need no vLLM."""

from __future__ import annotations

import sys

import pytest

from kvassay.cache.vllm.api import api, call, check_version, takes
from kvassay.errors import CacheError


@pytest.mark.parametrize("version", ["0.25.1", "0.28.0", "0.32.0", "0.33.0", "0.33.2", "0.33.0+empty", "0.32.1rc1"])
def test_versions_known_to_work(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.0", "0.22.1", "0.34.0", "1.0.0", "0.9", "dev"])
def test_other_versions_are_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(CacheError, match=rf"vLLM {version} is not supported: 0\.25\.1 to 0\.33\.x are"):
        check_version(version)


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(CacheError, match=r"vLLM cannot be imported \(.*\): `make vllm` sets up"):
        api.__wrapped__()


def test_keywords_go_where_the_signature_takes_them() -> None:
    def renamed(old: int, *, new: int = 0) -> tuple[int, int]:
        return old, new

    assert call(renamed, old=1, new=2, later=3) == (1, 2)
    assert call(renamed, old=1, later=3) == (1, 0)
    assert takes(renamed, "new") and not takes(renamed, "later")
