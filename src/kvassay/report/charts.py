"""The charts, as Altair describes them: drawn in the page with filters, and exported with their choices fixed.

In the page a chart picks its rows with the parameters `model`, `set`, `metric` and `axis`, which the page sets; an
exported chart gets rows that are picked already. Axis titles depend on the choice: `X_TITLE` and `Y_TITLE` stand for
them until the chart is drawn, `X_TIP` and `Y_TIP` for the same on one line.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from kvassay.experiment.arminfo import ArmInfo
from kvassay.measure.result import RECLAIM_MODES
from kvassay.report.points import ROLES, Row, policy_of, role

X_TITLE, Y_TITLE = "@x", "@y"
X_TIP, Y_TIP = "@x in a tip", "@y in a tip"
INK = "#0f1e2d"
"""Text and lines on white."""
GREY = "#8a8f98"
"""Arms that are no candidates."""
PALETTE = (
    "#0077bb", "#ee7733", "#009988", "#cc3311", "#33bbee", "#ee3377", "#aa8800", "#7766cc",
    "#558822", "#996655", "#226688", "#bb5599", "#99bb00", "#445577", "#dd8899", "#55aa88",
)  # fmt: skip
SHAPES = {"dense": "cross", "always on": "diamond", "candidate": "circle", "reference": "triangle-up"}
MODE_SHAPES = ("square", "triangle-up", "circle", "diamond", "triangle-down")
HEIGHT = 340
CHOICES = ("model", "set", "metric", "axis")
"""Parameters of a chart in the page."""


def theme(ink: str) -> dict[str, Any]:
    """Settings of every chart: one ink, no background, room for long names."""
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
    return {
        "background": None,
        "view": {"stroke": None},
        "axis": {**text, "domainColor": ink, "tickColor": ink, "gridColor": ink, "gridOpacity": 0.1, "labelLimit": 260},
        "legend": {
            **text,
            "orient": "bottom",
            "columns": 5,
            "labelLimit": 260,
            "symbolStrokeWidth": 1.5,
            "symbolBaseFillColor": ink,
            "symbolBaseStrokeColor": ink,
            "title": None,
            "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},
        },
        "title": {"color": ink, "anchor": "start", "fontSize": 13},
        "text": {"color": ink},
    }


def chosen(axis: bool = True) -> alt.Chart:
    """A chart of the page's rows, narrowed by its parameters; with `axis` also by metric, its cost being `x`."""
    chart = alt.Chart(alt.NamedData("points" if axis else "rows")).add_params(
        *(alt.param(name=name, value="") for name in (CHOICES if axis else CHOICES[:2]))
    )
    chart = chart.transform_filter("datum.model == model && datum.set == set")
    if not axis:
        return chart
    return chart.transform_filter(
        "datum.metric == metric && isValid(datum.y) && isValid(datum[axis])"
    ).transform_calculate(
        x="datum[axis]",
        x_low="datum[axis + '_low']",
        x_high="datum[axis + '_high']",
        on_front="indexof(datum.front, axis) >= 0",
    )


def picked(rows: Sequence[Row], axis: str | None = None, **choice: str) -> alt.Chart:
    """A chart of the rows that have these values; with `axis`, its number being `x`."""
    mine = [row for row in rows if all(row[name] == value for name, value in choice.items())]
    if axis is not None:
        mine = [
            {**row, "x": row[axis], "x_low": row.get(f"{axis}_low"), "x_high": row.get(f"{axis}_high"),
             "on_front": axis in row["front"]}
            for row in mine if axis in row
        ]  # fmt: skip
    return alt.Chart(alt.InlineData(values=mine))


def front(base: alt.Chart, arms: Mapping[str, ArmInfo], ink: str, *, clicked: bool = True) -> Any:
    """Quality over a cost: a point per arm with its intervals, a line per policy through its budgets.

    The dashed line is dense; the broad one joins the exact arms that no other beats on both. With `clicked`,
    clicking a policy in the legend leaves the others pale.
    """
    x = alt.X("x:Q", title=X_TITLE, scale=alt.Scale(zero=False, nice=False, padding=14), axis=alt.Axis(format="%"))
    y = alt.Y("y:Q", title=Y_TITLE, scale=alt.Scale(zero=False, nice=False, padding=24))
    focus = alt.selection_point(name="focus", fields=["policy"], bind="legend", on="click")
    scale, candidates = _colours(arms, ink)
    legend = alt.Legend(values=candidates, symbolType="stroke", symbolOpacity=1, title=None) if candidates else None
    colour = alt.Color("policy:N", scale=scale, legend=legend)
    shape = alt.Shape("role:N", scale=alt.Scale(domain=list(ROLES), range=[SHAPES[name] for name in ROLES]))
    pale = alt.when(focus).then(alt.value(0.9)).otherwise(alt.value(0.12)) if clicked else alt.value(0.9)
    runnable = alt.datum.role != "reference"
    rule = base.transform_filter(alt.datum.arm == "dense").mark_rule(strokeDash=[5, 4], opacity=0.6, color=ink)
    broad = base.transform_filter("datum.on_front").mark_line(strokeWidth=9, opacity=0.13, color=ink, strokeCap="round")
    bars = base.transform_filter("isValid(datum.low)").mark_rule(opacity=0.35)
    across = base.transform_filter("isValid(datum.x_low)").mark_rule(opacity=0.35)
    lines = base.transform_filter(runnable).mark_line(strokeWidth=1.2, opacity=0.5)
    exact = base.transform_filter(alt.datum.exact == "exact").mark_point(size=85, filled=True)
    other = base.transform_filter(alt.datum.exact != "exact").mark_point(size=75, strokeWidth=1.6)
    return alt.layer(
        rule.encode(y=y),
        broad.encode(x=x, y=y, order="x:Q"),
        bars.encode(x=x, y=alt.Y("low:Q", title=Y_TITLE), y2="high:Q", color=colour),
        across.encode(x=alt.X("x_low:Q", title=X_TITLE), x2="x_high:Q", y=y, color=colour),
        lines.encode(x=x, y=y, color=colour, detail=["policy:N", "exact:N"], order="x:Q"),
        *(marks.encode(x=x, y=y, color=colour, shape=shape, opacity=pale, tooltip=_tips())
          for marks in (exact.add_params(focus) if clicked else exact, other)),
        *(names.encode(x=x, y=y, text="names:N") for names in _names(base, ink)),
    )  # fmt: skip


def _names(base: alt.Chart, ink: str) -> tuple[alt.Chart, alt.Chart]:
    """Names beside their points, towards the middle of the chart; those of one place in one line.

    In the left half above the point, in the right half below, so that lines from both sides do not meet.
    """
    named = (
        base.transform_joinaggregate(least="min(x)", most="max(x)", low_y="min(y)", high_y="max(y)")
        .transform_filter("isValid(datum.label)")
        .transform_calculate(
            column="round(6 * (datum.x - datum.least) / (datum.most - datum.least + 1e-9))",
            row="round(25 * (datum.y - datum.low_y) / (datum.high_y - datum.low_y + 1e-9))",
        )
        .transform_joinaggregate(together="values(label)", groupby=["column", "row"])
        .transform_window(place="row_number()", groupby=["column", "row"])
        .transform_filter("datum.place == 1")
        .transform_calculate(names="join(pluck(datum.together, 'label'), ', ')")
    )
    look: dict[str, Any] = {"fontSize": 10.5, "color": ink}
    return (
        named.transform_filter("datum.column <= 3").mark_text(align="left", dx=6, dy=-9, **look),
        named.transform_filter("datum.column > 3").mark_text(align="right", dx=-6, dy=12, **look),
    )


def _colours(arms: Mapping[str, ArmInfo], ink: str) -> tuple[alt.Scale, list[str]]:
    """A colour per candidate, the same in every chart of a run; all others grey, dense in ink. And the candidates."""
    found = {policy_of(info): role(info) for info in arms.values()}
    candidates = [policy for policy, kind in found.items() if kind == "candidate"]
    shades = {policy: PALETTE[at % len(PALETTE)] for at, policy in enumerate(candidates)}
    fixed = {policy: ink if kind == "dense" else GREY for policy, kind in found.items()}
    colours = {**fixed, **shades}
    return alt.Scale(domain=list(colours), range=list(colours.values())), candidates


def _tips() -> list[alt.Tooltip]:
    return [
        alt.Tooltip("arm:N"),
        alt.Tooltip("role:N"),
        alt.Tooltip("exact:N", title="attention"),
        alt.Tooltip("y:Q", title=Y_TIP, format=".4f"),
        alt.Tooltip("interval:N", title="its 95% interval"),
        alt.Tooltip("against:N", title="minus dense, paired [95%]"),
        alt.Tooltip("noise:N", title="noise of that difference"),
        alt.Tooltip("x:Q", title=X_TIP, format=".2%"),
        alt.Tooltip("samples:N"),
    ]


def freed(base: alt.Chart) -> alt.Chart:
    """Blocks each way of reclaiming frees, a row per exact arm that frees any."""
    modes = [mode.replace("_", " ") for mode in RECLAIM_MODES]
    return base.mark_point(size=55, strokeWidth=1.6, clip=False).encode(
        x=alt.X("share:Q", title=X_TITLE, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%")),
        y=alt.Y("arm:N", title=None, sort=None, axis=alt.Axis(grid=True)),
        color=alt.Color("mode:N", scale=alt.Scale(domain=modes, range=["#cc3311", *PALETTE[5:9]]), legend=alt.Legend()),
        shape=alt.Shape("mode:N", scale=alt.Scale(domain=modes, range=list(MODE_SHAPES))),
        fill=alt.condition("datum.mode == 'whole block'", alt.value("#cc3311"), alt.value(None)),
        tooltip=["arm:N", "mode:N", alt.Tooltip("share:Q", format=".1%", title="freed"), alt.Tooltip("count:N")],
    )


def kept(base: alt.Chart) -> alt.Chart:
    """Where in the context what is held lies: a row per arm, a cell per stretch of positions."""
    ends = {"from": "datum.number / datum.stretches", "to": "(datum.number + 1) / datum.stretches"}
    where = alt.Scale(domain=[0, 1], nice=False)
    return (
        base.transform_calculate(stretches="length(datum.share)", number="sequence(0, length(datum.share))")
        .transform_flatten(["share", "number"])
        .transform_calculate(**ends)
        .mark_rect()
        .encode(
            x=alt.X("from:Q", title="position / context tokens", scale=where, axis=alt.Axis(format="%", grid=False)),
            x2="to:Q",
            y=alt.Y("arm:N", title=None, sort=None),
            color=alt.Color(
                "share:Q",
                scale=alt.Scale(domain=[0, 1], scheme="viridis"),
                legend=alt.Legend(title="tokens held / tokens (measured)", format="%", gradientLength=160),
            ),
            tooltip=[
                alt.Tooltip("arm:N"),
                alt.Tooltip("from:Q", format=".1%", title="position from"),
                alt.Tooltip("to:Q", format=".1%", title="to"),
                alt.Tooltip("share:Q", format=".1%", title="held"),
            ],
        )
    )


def layers(base: alt.Chart) -> alt.Chart:
    """Open-loop attention error: a row per arm, a cell per layer it may act on."""
    return _errors(base, "arm:N", ["arm:N", "layer:O", ERROR_TIP, alt.Tooltip("mass:Q", format=".4f", title="mass")])


def heads(base: alt.Chart) -> alt.Chart:
    """The same of one arm: a row per query head, a cell per layer."""
    one = base.add_params(alt.param(name="arm", value="")).transform_filter("datum.arm == arm")
    one = one.transform_calculate(error="datum.heads", head="sequence(0, length(datum.heads))")
    return _errors(one.transform_flatten(["error", "head"]), "head:O", ["arm:N", "layer:O", "head:O", ERROR_TIP])


ERROR_TIP = alt.Tooltip("error:Q", format=".4f", title="||arm - dense|| / ||dense||")


def _errors(base: alt.Chart, row: str, tips: Sequence[Any]) -> alt.Chart:
    legend = alt.Legend(title="error (lower is better; measured)", gradientLength=160)
    return base.mark_rect().encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True, labelSeparation=5)),
        y=alt.Y(row, title="query head" if row == "head:O" else None, sort=None),
        color=alt.Color("error:Q", scale=alt.Scale(scheme="viridis", domainMin=0), legend=legend),
        tooltip=list(tips),
    )


def plain(chart: alt.Chart | alt.LayerChart) -> dict[str, Any]:
    """The description without what only a whole one has."""
    with alt.data_transformers.enable(consolidate_datasets=False):  # a part's data must lie in the part
        spec: dict[str, Any] = chart.to_dict()
    return {key: value for key, value in spec.items() if key not in ("$schema", "config")}


def titled(spec: dict[str, Any], x: str, y: str, columns: int = 60) -> dict[str, Any]:
    """The description with its axis titles put in, in lines of so many characters."""
    titles = {X_TITLE: textwrap.wrap(x, columns), Y_TITLE: textwrap.wrap(y, columns), X_TIP: x, Y_TIP: y}
    return {key: _titled(value, titles) for key, value in spec.items()}


def _titled(part: Any, titles: Mapping[str, Any]) -> Any:
    if isinstance(part, dict):
        return {key: _titled(value, titles) for key, value in part.items()}
    if isinstance(part, list):
        return [_titled(value, titles) for value in part]
    return titles.get(part, part) if isinstance(part, str) else part
