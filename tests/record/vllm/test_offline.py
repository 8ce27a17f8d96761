from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvassay.errors import RecordError
from kvassay.layout.config import from_config
from kvassay.record.options import RecordOptions
from kvassay.record.vllm.offline import VllmOptions, cache_gib, check_options
from kvassay.record.vllm.plugin import register
from tests.record import tiny


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16}, "block_size 16 is not a multiple of 32"),
        ({"generate": -1}, "generate is -1"),
        ({"steps": (3, 9)}, "steps begin at 3"),
    ],
)
def test_options_that_vllm_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        VllmOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": ("output", "lse")}, "tap 'lse' cannot be had from vLLM"),
        ({"taps": ("output",), "tap_layers": (1,)}, "limit the layers recorded"),
        ({"logits": "full"}, "choose topk or none"),
    ],
)
def test_options_of_the_other_recorder(options: dict[str, Any], message: str) -> None:
    check_options(RecordOptions(taps=("output",), logits="none"))
    with pytest.raises(RecordError, match=message):
        check_options(RecordOptions(**options))


def test_the_cache_holds_all_requests_with_nothing_shared() -> None:
    layout = from_config(tiny.config_of("llama"))  # 4 layers x 2 heads x (16 + 16) elements x 4 bytes
    assert cache_gib(layout, longest=100, branches=2, block_size=32) == 1
    tokens = 3 * (1_000_000 + 32)
    assert cache_gib(layout, longest=1_000_000, branches=2, block_size=32) == -(-2 * tokens * 1024 // 2**30)


def test_the_plugin_does_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("kvassay.record.vllm.install.install", lambda recorder: asked.append("installed"))
    monkeypatch.delenv("KVASSAY_VLLM_RECORD", raising=False)
    register()
    assert asked == []
    monkeypatch.setenv("KVASSAY_VLLM_RECORD", "captures")
    register()
    assert asked == ["installed"]


def test_vllm_finds_the_plugin() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    module, name = value.split(":")
    assert importlib.util.find_spec(module) is not None
    assert (module, name) == (register.__module__, register.__name__)
