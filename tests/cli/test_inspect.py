from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from kvassay.cli.inspect import inspect
from kvassay.errors import LayoutError
from tests.layout.configs import PUBLISHED


def test_embedded_model_as_json() -> None:
    result = CliRunner().invoke(inspect, ["gemma-3-270m", "--context", "4k", "--context", "1M", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert [row["context"] for row in report["contexts"]] == [4096, 1_048_576]
    assert report["contexts"][1]["total"] == 3 * 2**30 + 7.5 * 2**20
    assert len(report["groups"]) == 6


def test_default_contexts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3-8b"]))
    result = CliRunner().invoke(inspect, [str(tmp_path), "--json"])
    contexts = [(row["context"], row["beyond_native_context"]) for row in json.loads(result.output)["contexts"]]
    assert contexts == [(2048, False), (8192, False), (32_768, False), (131_072, True)]


def test_table() -> None:
    result = CliRunner().invoke(inspect, ["smollm2-135m"])
    assert result.exit_code == 0 and "30 of 30 layers store a cache" in result.output.replace("\n", "")


def test_mistakes() -> None:
    unknown = CliRunner().invoke(inspect, ["smollm3"])
    assert isinstance(unknown.exception, LayoutError) and "did you mean 'smollm2-135m'" in str(unknown.exception)
    usage = CliRunner().invoke(inspect, ["smollm2-135m", "--context", "lots"])
    assert usage.exit_code == 2 and "'lots' is not a number of tokens" in usage.output
