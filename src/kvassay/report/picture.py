"""One picture of a run for a README: what each policy holds, reads and frees, for each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import os_errors
from kvassay.experiment.results import Results, SetResult
from kvassay.report import charts, words
from kvassay.report.html import FREED_TITLE, vegalite_version
from kvassay.report.points import HELD, READ, Axis, Row, freed_rows, points, quality_title

METRIC = "top1"
WIDTH, HEIGHT = 400, 300
READING = (
    "Dashed: dense. Broad line: the front of the exact arms an engine can run. "
    "Hollow: keys, values or logits are approximated. Bars: 95% intervals."
)
Convert = Callable[..., Any]
WRITERS: Mapping[str, Convert] = {
    ".png": lambda spec, **more: vl_convert.vegalite_to_png(spec, scale=2, **more),
    ".svg": lambda spec, **more: vl_convert.vegalite_to_svg(spec, **more).encode(),
    ".pdf": lambda spec, **more: vl_convert.vegalite_to_pdf(spec, **more),
}


def write_picture(results: Results, path: str | Path) -> Path:
    """Draw the first trace set of each model to `path`; its suffix is the format (.png, .svg or .pdf)."""
    target = Path(path)
    if target.suffix not in WRITERS:
        raise ExperimentError(f"{target}: a picture is written as {', '.join(WRITERS)}")
    drawn = WRITERS[target.suffix](picture(results), vl_version=vegalite_version())
    with os_errors(target):
        target.write_bytes(drawn)
    return target


def picture(results: Results) -> dict[str, Any]:
    """The picture as Vega-Lite describes it, with its numbers."""
    rows, freed = points(results, (HELD, READ)), freed_rows(results)
    firsts = [sets[0] for _, sets in words.models(results)]
    return {
        "title": {"text": READING, "fontSize": 11, "fontWeight": "normal", "offset": 12},
        "vconcat": [_sheet(found, rows, freed, results) for found in firsts],
        "spacing": 30,
        "resolve": {"scale": {"color": "independent"}},
        "config": charts.theme(charts.INK),
        "background": "white",
    }


def _sheet(found: SetResult, rows: list[Row], freed: list[Row], results: Results) -> dict[str, Any]:
    """One row: two fronts and the blocks freed."""
    mine = {"model": found.model, "set": found.label}
    panels = [_front(axis, rows, mine, results) for axis in (HELD, READ)]
    if any(row["model"] == found.model and row["set"] == found.label for row in freed):
        panels.append(_fixed(charts.freed(charts.picked(freed, **mine)), FREED_TITLE, ""))
    apart = dict.fromkeys(("color", "fill", "shape", "x", "y"), "independent")
    return {"title": f"{found.model}: {found.label}", "hconcat": panels, "spacing": 30, "resolve": {"scale": apart}}


def _front(axis: Axis, rows: list[Row], mine: Mapping[str, str], results: Results) -> dict[str, Any]:
    base = charts.picked(rows, axis.key, metric=METRIC, **mine)
    return _fixed(charts.front(base, results.arms, charts.INK, clicked=False), axis.title, quality_title(METRIC))


def _fixed(chart: alt.Chart | alt.LayerChart, x: str, y: str) -> dict[str, Any]:
    """A panel of fixed size, its titles put in."""
    spec = charts.plain(chart.properties(width=WIDTH, height=HEIGHT))
    return charts.titled(spec, x, y)
