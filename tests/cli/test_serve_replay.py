"""The command on a tiny trace, and its documented schema."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli, main
from kvassay.replay.serving.footprint import Footprint
from kvassay.replay.serving.result import Levels, ServingResult

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    trace.write_text((json.dumps(row) + "\n") * 6)
    arms = tmp_path / "arms.toml"
    arms.write_text('[[footprint]]\narm = "half"\nfreed_fraction = 0.5\ncorrect = 0.5\ndense_correct = 0.75\n')
    times = tmp_path / "times.toml"
    times.write_text("step = 2.0\n")
    return [
        *("serve-replay", str(trace), "--model", "smollm2-135m", "--pool-bytes", "60MiB"),
        *("--footprint", str(arms), "--times", str(times)),
    ]


def test_json_by_hand(arguments: list[str]) -> None:
    """Blocks of 512 tokens are 11.25 MiB: 5, 4 usable; a request holds 2, and shares the first one of them.

    Three at a time (1 + 3 blocks), 5 steps of 2 s each, twice.
    """
    data = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    assert data["parameters_how"] == "estimated from the layout"
    assert data["requests_sha256"] == hashlib.sha256(Path(arguments[1]).read_bytes()).hexdigest()
    assert data["count"] is None
    dense, half = data["results"]
    assert (dense["pool_blocks"], dense["peak_requests"], dense["seconds"]) == (4, 3, 20.0)
    assert (dense["hit_tokens"], dense["prompt_tokens"], dense["hit_rate"]) == (5 * 512, 6000, 5 * 512 / 6000)
    assert dense["goodput"] == 6 * 0.75 / 20
    assert half["footprint"]["how"] == "assumed"
    assert data["levels"][0]["blocks_freed"] == 0.5


def test_the_table_says_what_is_modelled_and_what_is_not_judged(arguments: list[str]) -> None:
    shown = " ".join(CliRunner().invoke(cli, arguments).output.split())
    assert "Step times: table: times.toml" in shown
    assert "not judged here" in shown
    assert "Footprint of half: assumed (" in shown
    assert re.search(r"half │ +1.00 │ +1.00 │ +0.50", shown)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--mode", "whole"], "no reclaim mode 'whole' (did you mean 'whole_block'"),
        (["--hardware", "h900"], "unknown hardware 'h900'"),
        (["--pool-bytes", "1MiB"], "2 are needed"),
    ],
)
def test_wrong_input_is_said_on_one_line(
    arguments: list[str], extra: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([*arguments, *extra])
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_bytes_are_parsed(arguments: list[str]) -> None:
    for text, says in (("5 apples", "no number of bytes"), ("0.3B", "no whole, positive number")):
        result = CliRunner().invoke(cli, [*arguments, "--pool-bytes", text])
        assert result.exit_code == 2
        assert says in result.output


def test_every_field_of_the_schema_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for kind in (ServingResult, Levels, Footprint):
        missing = [field.name for field in fields(kind) if f"`{field.name}`" not in text]
        assert not missing, f"{kind.__name__}: {missing}"
