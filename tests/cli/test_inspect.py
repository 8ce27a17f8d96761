from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from kvassay.cli.inspect import inspect
from kvassay.errors import LayoutError, UnsupportedModel
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
    assert contexts == [
        (8192, False),
        (32_768, False),
        (131_072, True),
        (262_144, True),
        (500_000, True),
        (1_048_576, True),
    ]


def test_table() -> None:
    result = CliRunner().invoke(inspect, ["smollm2-135m"])
    assert result.exit_code == 0 and "30 of 30 layers store a cache" in result.output.replace("\n", "")


def test_without_a_name_the_registry_is_listed() -> None:
    listed = json.loads(CliRunner().invoke(inspect, ["--json"]).output)
    glm = next(entry for entry in listed if entry["id"] == "glm-5.2")
    assert (len(listed), glm["growing_bytes_per_token"], glm["kinds"]) == (37, 95_232, ["latent", "index"])
    shown = CliRunner().invoke(inspect, []).output
    assert "kimi-k3 1,048,576 refused" in " ".join(shown.split())
    assert "granite-4.1-8b†" in shown and max(map(len, shown.splitlines())) <= 80


def test_a_registry_model_brings_its_facts_and_its_shipped_format() -> None:
    report = json.loads(CliRunner().invoke(inspect, ["deepseek-v3.2", "--context", "128k", "--json"]).output)
    assert report["registry"]["repo"] == "deepseek-ai/DeepSeek-V3.2"
    assert report["registry"]["config"]["kv_lora_rank"] == 512
    (row,) = report["contexts"]
    assert row["shipped"]["fp8_ds_mla"]["total"] == 61 * (656 + 132) * 131_072
    shown = " ".join(CliRunner().invoke(inspect, ["deepseek-v3.2", "--context", "128k"]).output.split())
    assert "131,072 bfloat16 8,784.00 1,952.00 10,736.00 10,736.00" in shown
    assert "131,072 fp8_ds_mla 5,002.00 1,006.50 6,008.50 6,008.50" in shown
    assert "evidence config_copy, seen" in shown and "parameters 37B active, 671B total" in shown


def test_a_refused_registry_model() -> None:
    refused = CliRunner().invoke(inspect, ["kimi-k3"])
    assert isinstance(refused.exception, UnsupportedModel) and "24 of 93 layers would page" in str(refused.exception)


def test_mistakes() -> None:
    unknown = CliRunner().invoke(inspect, ["smollm3"])
    assert isinstance(unknown.exception, LayoutError) and "did you mean 'smollm2-135m'" in str(unknown.exception)
    usage = CliRunner().invoke(inspect, ["smollm2-135m", "--context", "lots"])
    page = CliRunner().invoke(inspect, ["hy3", "--markdown"])
    assert page.exit_code == 2 and "leave NAME out" in page.output
    assert usage.exit_code == 2 and "'lots' is not a number of tokens" in usage.output
