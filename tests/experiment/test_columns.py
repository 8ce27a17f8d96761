"""Every column of every result file is documented, and the committed page is what the records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import ExperimentError
from kvassay.experiment.columns import files, schema_json
from kvassay.experiment.records import record_schema
from kvassay.measure import columns
from kvassay.measure.acceptance import AcceptanceResult
from kvassay.measure.cost import CostResult
from kvassay.measure.latency import LatencyResult
from kvassay.measure.metrics import CARDS
from kvassay.measure.result import LayerFidelity
from kvassay.report.columns import lines, markdown
from tests.runs import make_run

PAGE = Path(__file__).parents[2] / "docs" / "results-schema.md"
FILES = {file.name: file for file in files()}


def kind_of(field: Any) -> str:
    """A column's type; Parquet and memory name the entries of a list differently."""
    return str(field.type).replace("item: ", "").replace("element: ", "")


def test_the_page_is_what_the_records_say() -> None:
    fresh = markdown(files())
    assert PAGE.read_text(encoding="utf-8") == fresh, "run: kvassay columns --markdown > docs/results-schema.md"


@pytest.mark.parametrize("name", ["samples.parquet", "cells.parquet"])
def test_every_column_that_is_really_written_is_documented(tmp_path: Path, name: str) -> None:
    make_run(tmp_path)
    real = pq.read_schema(tmp_path / name)
    assert [(column.name, column.type) for column in FILES[name].columns] == [(f.name, kind_of(f)) for f in real]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("latency.parquet", LatencyResult),
        ("cost.parquet", CostResult),
        ("speculation.parquet", AcceptanceResult),
        ("fidelity.parquet", LayerFidelity),
    ],
)
def test_every_field_of_a_record_is_documented(name: str, kind: type) -> None:
    assert [(c.name, c.type) for c in FILES[name].columns] == [(f.name, kind_of(f)) for f in record_schema(kind)]


def test_every_number_has_a_unit_and_what_is_measured_a_meaning() -> None:
    for file in FILES.values():
        for column in file.columns:
            assert len(column.meaning) > 8 and column.meaning.endswith("."), (file.name, column)
            if column.type in ("double", "int64"):
                assert column.unit, (file.name, column)
            if "fraction" in column.unit or " per " in column.unit:
                assert column.denominator, (file.name, column)


def test_metrics_say_what_their_cards_say_and_differences_are_over_the_same() -> None:
    cells = {column.name: column for column in FILES["cells.parquet"].columns}
    for name, card in CARDS.items():
        assert (cells[name].unit, cells[name].better, cells[name].how) == (card.unit, card.better, card.how)
    assert cells["nll_diff_low"].unit == "nats per token" and cells["nll_diff_low"].better == "lower"
    assert "clustered by context" in cells["nll_diff_low"].meaning
    assert {column.how for column in FILES["cost.parquet"].columns if column.type == "double"} == {"modelled"}


def test_a_new_field_without_words_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: words for name, words in columns.LATENCY.items() if name != "flops"}
    monkeypatch.setitem(columns.RECORDS, LatencyResult, known)
    with pytest.raises(ExperimentError, match=r"LatencyResult\.flops has no unit"):
        files()


def test_schema_json_and_the_command(tmp_path: Path) -> None:
    data = json.loads(schema_json())
    top1 = next(c for c in data["files"]["cells.parquet"]["columns"] if c["name"] == "top1")
    assert (top1["unit"], top1["better"], top1["how"], top1["type"]) == ("fraction", "higher", "measured", "double")
    assert CliRunner().invoke(cli, ["columns", "--json"]).output == schema_json()
    shown = CliRunner().invoke(cli, ["columns", "flops"]).output
    assert shown.startswith("latency.parquet  flops  (operations per decoded token;") and "lower is better" in shown
    with pytest.raises(ExperimentError, match=r"no column is called 'topp1' \(did you mean 'top1'\?\)"):
        list(lines(files(), "topp1"))
