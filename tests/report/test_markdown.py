"""The Markdown twin: the same order and the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.report.markdown import cell, render_markdown
from tests.report.full_run import SNAPKV, make_full_run
from tests.runs import make_run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render_markdown(make_full_run(tmp_path_factory.mktemp("run"), exploratory=True))


def test_the_warning_is_the_first_line_and_verdicts_the_first_section(text: str) -> None:
    assert text.lstrip().startswith("> **EXPLORATORY: the gate was written after the cells**")
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "## Verdicts", "## Findings", "## Arms and numbers", "## Every check, by arm",
            "## State by kind, dense",
        "## Attention error, open loop", "## Answers that turned",
        "## Speculative acceptance", "## What this does not prove", "## What the numbers mean", "## Provenance",
    ]  # fmt: skip
    assert (
        f"| {SNAPKV} | **reject** (exploratory) | quality top1: -0.375, at least -0.05 | tiny-model; kv\\_short |"
        in text
    )


def test_the_numbers_are_the_cells(text: str) -> None:
    quality = "0.625 | -0.375 | - | 0.750 | 1/0 | 1 | 1.250 | 1.250 | 0.750 | 0.500 | 4.0 | 1/4"
    assert f"| {SNAPKV} | {quality} |" in text
    assert f"| {SNAPKV} | 128 | 3 | 20 | 80 | 64 | 96 |" in text
    assert "| tiny-model | 2,048 | bfloat16 | 64.0 KiB | 4.00 KiB | 0 | 0 | 0 |" in text
    assert f"**{SNAPKV}**: 1 lost, 0 won of 4 questions." in text
    assert '| right to wrong | t0 | 0 |  12\\|34 |  1234 |  99 "\\</script>\\<script>alert(1)\\</script> |' in text


def test_every_table_has_as_many_cells_as_heads(text: str) -> None:
    widths: list[int] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            widths = []
            continue
        widths.append(line.replace("\\|", "").count("|"))
        assert widths[-1] == widths[0], line


def test_without_a_gate_it_says_how_to_declare_one(tmp_path: Path) -> None:
    text = render_markdown(make_run(tmp_path))
    assert text.index("No gate judged this run") < text.index("## Findings")
    assert "Numbers without a gate declared beforehand are for looking, not for choosing." in text
    assert "kvassay keys gate --example > gate.toml\n" in text
    assert "kvassay run experiment.toml --gate gate.toml" in text and "The checks found nothing." in text


def test_a_cell_stays_one_cell() -> None:
    assert cell("a|b\nc *d* <e> `f`") == "a\\|b⏎c \\*d\\* \\<e> \\`f\\`"
