"""The picture: its formats, and the numbers it draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.errors import ExperimentError
from kvassay.report.picture import picture, write_picture
from tests.runs import make_run


def test_pictures_by_suffix(tmp_path: Path) -> None:
    results = make_run(tmp_path)
    assert write_picture(results, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert write_picture(results, tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    text = write_picture(results, tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "tiny-model: kv_short 2k" in text and ">snapkv(window=16) keep=0.25<" in text
    with pytest.raises(ExperimentError, match=r"a\.jpeg: a picture is written as \.png, \.svg, \.pdf"):
        write_picture(results, tmp_path / "a.jpeg")
    with pytest.raises(ExperimentError, match=r"none/a\.png: cannot be written: No such file"):
        write_picture(results, tmp_path / "none" / "a.png")


def test_it_draws_the_cells(tmp_path: Path) -> None:
    (sheet,) = picture(make_run(tmp_path))["vconcat"]
    held, read, freed = sheet["hconcat"]
    for panel in (held, read):
        (points,) = {id(rows): rows for rows in [panel["data"]["values"]]}.values()
        found = {row["arm"]: (row["x"], row["y"]) for row in points}
        assert found["snapkv(window=16) keep=0.25"] == (0.25, 0.625) and found["kivi"] == (0.2, 0.75)
    shares = {row["mode"]: row["share"] for row in freed["data"]["values"]}
    assert shares["compaction"] == 0.75 and shares["whole block"] == pytest.approx(3 / 128, rel=1e-5)
