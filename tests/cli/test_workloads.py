from __future__ import annotations

import json

from click.testing import CliRunner

from kvassay.cli.workloads import workloads
from kvassay.workload.registry import names


def test_json_tells_everything_about_each_workload() -> None:
    result = CliRunner().invoke(workloads, ["--json"], catch_exceptions=False)
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert tuple(rows) == names()
    assert rows["needle_single"]["role"] == "veto"
    assert rows["copy"]["parameters"] == {"words": 24, "given": 6, "copied": 4}
    assert rows["kv_short"]["scorer"] == "starts_with"
    assert rows["prose"]["role"] == "context"
    assert 0 < rows["chain"]["floor"]["min_top1"] < 1


def test_the_table_names_each_workload() -> None:
    result = CliRunner().invoke(workloads, [], catch_exceptions=False)
    for name in names():
        assert name in result.output


def test_a_preview_needs_no_model() -> None:
    result = CliRunner().invoke(workloads, ["tracking", "--length", "900", "--seed", "4"], catch_exceptions=False)
    assert "900 word tokens, 3 questions (after compression)" in result.output
    assert " lives with " in result.output
