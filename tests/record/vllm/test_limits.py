from __future__ import annotations

import pytest

from kvassay.errors import RecordError
from kvassay.record.vllm.limits import Limits, from_environment, parse_indices, parse_steps


@pytest.mark.parametrize(
    ("text", "found"), [("0", (0,)), ("5, 0,5", (0, 5)), ("0,8-11", (0, 8, 9, 10, 11)), ("3-3", (3,))]
)
def test_indices(text: str, found: tuple[int, ...]) -> None:
    assert parse_indices(text) == found


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-2", "1,,2"])
def test_no_indices(text: str) -> None:
    with pytest.raises(ValueError):
        parse_indices(text)


@pytest.mark.parametrize(
    ("text", "found"), [("200", (0, 200)), ("10:200", (10, 200)), ("10:", (10, None)), (":7", (0, 7))]
)
def test_steps(text: str, found: tuple[int, int | None]) -> None:
    assert parse_steps(text) == found


@pytest.mark.parametrize("text", ["", ":", "a:b", "1:2:3", "-4"])
def test_no_steps(text: str) -> None:
    with pytest.raises(ValueError):
        parse_steps(text)


def test_the_environment_says_what_to_record() -> None:
    assert from_environment({"HOME": "/x", "KVASSAY_VLLM_RECORD_LAYERS": "1"}) is None
    variables = {
        "KVASSAY_VLLM_RECORD": "/captures/a",
        "KVASSAY_VLLM_RECORD_LAYERS": "0,5",
        "KVASSAY_VLLM_RECORD_KV_HEADS": "1",
        "KVASSAY_VLLM_RECORD_STEPS": "0:9",
        "KVASSAY_VLLM_RECORD_Q_FROM": "64",
        "KVASSAY_VLLM_RECORD_OUTPUT": "1",
        "KVASSAY_VLLM_RECORD_LOGITS_K": "8",
        "KVASSAY_VLLM_RECORD_LOGITS_FROM": "70",
    }
    limits = Limits(layers=(0, 5), kv_heads=(1,), steps=(0, 9), q_from=64, output=True, logits_k=8, logits_from=70)
    assert from_environment(variables) == ("/captures/a", limits)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LAYER", "1", "did you mean 'KVASSAY_VLLM_RECORD_LAYERS'"),
        ("LAYERS", "x", "KVASSAY_VLLM_RECORD_LAYERS='x' is not a list of indices"),
        ("STEPS", "9:9", "hold no step"),
        ("OUTPUT", "yes", "is not 0 or 1"),
        ("LOGITS_K", "-1", "at least 0"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_environment({"KVASSAY_VLLM_RECORD": "/captures/a", f"KVASSAY_VLLM_RECORD_{name}": value})
    with pytest.raises(RecordError, match="KVASSAY_VLLM_RECORD is empty"):
        from_environment({"KVASSAY_VLLM_RECORD": ""})
