"""Cells as rows of `cells.parquet`: nothing is lost, and nothing is without a type."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvassay.experiment.rows import cell_from_row, cell_to_row, read_table, write_cells
from kvassay.measure.aggregate import aggregate
from kvassay.measure.metrics import QUALITY
from tests.rows import SILENT, row

LABELS = {"model": "m", "trace_set": "copy 2k"}


@pytest.mark.parametrize("contexts", [2, 6])
@pytest.mark.parametrize("arms", [("dense", "dense'", "knorm keep=0.5"), ("fp8",)])
def test_a_cell_survives_its_row(arms: tuple[str, ...], contexts: int, tmp_path: Path) -> None:
    rows = [
        row(arm, f"t{context}", nll=0.5 + number * context / 7, task=float((number + context) % 2))
        for context in range(contexts)
        for number, arm in enumerate(arms)
    ]
    cells = aggregate(rows).cells
    assert tuple(cell_from_row(cell_to_row(cell)) for cell in cells) == cells
    file = tmp_path / "cells.parquet"
    write_cells([(LABELS, cells)], file)
    assert tuple(cell_from_row(found) for found in read_table(file)) == cells
    back = cell_from_row(read_table(file)[-1])
    assert back.quality["task"].bounds == (0.0, 1.0) and back.quality["nll"].bounds is None
    assert all(back.difference[name].bounds == ((-1.0, 1.0) if name in ("task", "top1", "agree") else None)
               for name in back.difference)  # fmt: skip
    types = {field.name: str(field.type) for field in pq.read_schema(file)}
    assert "null" not in types.values()
    assert {types[f"{name}{part}"] for name in QUALITY for part in ("", "_error", "_noise", "_diff_worst")} == {
        "double"
    }


def test_what_was_never_generated_is_null_and_absent_again(tmp_path: Path) -> None:
    cells = aggregate([row(arm, f"t{n}", **SILENT) for n in range(6) for arm in ("dense", "fp8")]).cells
    file = tmp_path / "cells.parquet"
    write_cells([(LABELS, cells)], file)
    raw = read_table(file)[1]
    free = [name for name in raw if name.startswith(("task", "generated_tokens")) or name == "diverged"]
    assert len(free) == 2 * 11 + 3 + 1 and all(raw[name] is None for name in free)
    assert cell_from_row(raw) == cells[1]
    older = {**raw, "task": 0.0, "task_diff": 0.0, "task_lost": 0, "generated_tokens": 0.0, "diverged": 0}
    assert cell_from_row(older) == cells[1]
