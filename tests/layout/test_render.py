from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvassay.errors import LayoutError
from kvassay.layout.config import from_config
from kvassay.layout.render import inspect_report, inspect_table
from tests.layout.configs import PUBLISHED


def printed(report: dict[str, object]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(inspect_table(report))
    return out.getvalue()


def test_report_of_gemma_3_270m() -> None:
    report = inspect_report(from_config("gemma-3-270m"), "gemma-3-270m", [2048, 131_072])
    assert [(shape["kind"], shape["layers"]) for shape in report["shapes"]] == [
        ("sliding", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16]),
        ("full", [5, 11, 17]),
    ]
    assert [group["layers"] for group in report["groups"]][5] == (5, 11, 17)
    near, far = report["contexts"]
    assert (near["full"], near["sliding"], near["total"]) == (6 * 2**20, 7.5 * 2**20, 13.5 * 2**20)
    assert near["total_without_hybrid_manager"] == 36 * 2**20
    assert (near["beyond_native_context"], far["beyond_native_context"]) == (False, True)


def test_the_native_context_itself_is_not_beyond() -> None:
    rows = inspect_report(from_config("smollm2-135m"), "smollm2-135m", [8192, 8193])["contexts"]
    assert [row["beyond_native_context"] for row in rows] == [False, True]


def test_table_shows_kinds_apart_and_marks_what_is_beyond() -> None:
    text = printed(inspect_report(from_config(PUBLISHED["glm-5.2"]), "glm-5.2", [131_072, 2_097_152]))
    assert "2,097,152*" in text and "131,072*" not in text
    row = next(line for line in text.splitlines() if "131,072" in line)
    assert row.split() == ["131,072", "bfloat16", "11,232.00", "672.00", "11,904.00", "11,904.00"]
    assert "21: 0-2, 6, 10" in text and "sliding" not in text


def test_a_model_without_a_plan_says_why() -> None:
    report = inspect_report(from_config(PUBLISHED["deepseek-v4-flash"]), "v4")
    assert "groups" not in report and "packed path" in report["groups_refused"]
    assert "packed path" in printed(report)


def test_shared_layers_name_their_source() -> None:
    text = printed(inspect_report(from_config(PUBLISHED["gemma-4-e2b"]), "gemma-4-e2b"))
    assert "15 of 35 layers store a cache" in text
    assert "nothing, reads layer 14" in text and "(read by 19, 24, 29, 34)" in text


def test_a_wrong_block_size_is_not_hidden_as_a_refusal_of_the_model() -> None:
    with pytest.raises(LayoutError, match="block_size is 0"):
        inspect_report(from_config("smollm2-135m"), "smollm2-135m", block_size=0)
