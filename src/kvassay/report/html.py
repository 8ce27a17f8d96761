"""The run as one HTML file that needs nothing else: charts with filters, tables, metric cards, provenance.

Beside it lies `report.md`, the same without charts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert

from kvassay.experiment.folder import REPORT, RunFolder
from kvassay.experiment.results import Results
from kvassay.measure.metrics import CARDS
from kvassay.report import charts
from kvassay.report.layers import layer_rows
from kvassay.report.markdown import write_markdown
from kvassay.report.page import page
from kvassay.report.points import METRICS, Row, axes, freed_rows, points, quality_title
from kvassay.report.retained import kept_rows

TEMPLATE = "report.html.j2"
PAGE_INK = "currentColor"
"""The page's own text colour, light or dark."""
EXPORTS = "window.vegaEmbed = vegaEmbed;"
"""What the page's script needs of the bundle."""
FREED_TITLE = "blocks really freed / dense's blocks (higher is better; measured)"


LISTS = {
    "freed": (charts.freed, "freed"),
    "kept": (charts.kept, "kept"),
    "layers": (charts.layers, "layers"),
    "heads": (charts.heads, "layers"),
}
"""Charts that list arms (or an arm's heads), and their rows."""


def write_html(results: Results) -> Path:
    """Write `report.html` and `report.md` into the run folder, return the page's path.

    Raises `ExperimentError` if they cannot be written, `GateError` if there are damaged verdicts.
    """
    folder = RunFolder(results.path)
    target = folder.path / REPORT
    content = page(results)
    folder.write_text(target, render(results, content))
    write_markdown(results, content)
    return target


def render(results: Results, content: dict[str, Any] | None = None) -> str:
    """The page as text; `content` is what `page` says of the results."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    here = Path(__file__).parent
    data = chart_data(results)
    return environment.get_template(TEMPLATE).render(
        **(page(results) if content is None else content),
        css=(here / "page.css").read_text(encoding="utf-8"),
        script=(here / "page.js").read_text(encoding="utf-8"),
        library=library(),
        charts=_json(data),
        drawn=tuple(data["specs"]),
    )


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script; the script must not end early where it lies."""
    return vl_convert.javascript_bundle(EXPORTS, vl_version=vegalite_version()).replace("</script", "<\\/script")


def vegalite_version() -> str:
    """The Vega-Lite that Altair writes, as vl-convert names it."""
    return "v" + ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def chart_data(results: Results) -> dict[str, Any]:
    """Descriptions, rows and choices of all charts, as the page's script takes them."""
    shown = axes(results)
    rows: dict[str, list[Row]] = {
        "points": points(results, shown),
        "freed": freed_rows(results),
        "kept": kept_rows(results),
        "layers": layer_rows(results),
    }
    quality = charts.front(charts.chosen(), results.arms, PAGE_INK).properties(width="container", height=charts.HEIGHT)
    fronts = {axis.front for axis in shown}
    return {
        "config": charts.theme(PAGE_INK),
        "specs": {
            **{front: charts.plain(quality) for front in ("space", "traffic", "time") if front in fronts},
            **{
                name: charts.plain(draw(charts.chosen(axis=False)).properties(width="container"))
                for name, (draw, source) in LISTS.items()
                if rows[source]
            },
        },
        "sources": {name: source for name, (_, source) in LISTS.items()},
        "rows": rows,
        "axes": [{"key": axis.key, "front": axis.front, "name": axis.name, "title": axis.title} for axis in shown],
        "metrics": [{"key": name, "name": CARDS[name].title, "title": quality_title(name)} for name in METRICS],
        "sets": [{"model": found.model, "set": found.label} for found in results.sets],
        "titles": {"freed": FREED_TITLE},
        "placeholders": {"x": charts.X_TITLE, "y": charts.Y_TITLE, "xTip": charts.X_TIP, "yTip": charts.Y_TIP},
    }


def _json(data: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
