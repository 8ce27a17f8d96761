"""The page in a real browser, from disk: no errors, nothing loaded, filters and tips work, readable when narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvassay.report.html import write_html
from tests.report.browser import CHROMIUM, Tab, browser
from tests.report.full_run import SNAPKV, make_two_sets

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]
MARKS = "[...document.querySelectorAll('#chart-{} .mark-symbol.role-mark path')].map(mark => mark.ariaLabel)"
TITLES = "[...document.querySelectorAll('#chart-{} .role-axis-title text')].map(title => title.textContent).join(' ')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_html(make_two_sets(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(chromium: Tab, page: Path) -> Tab:
    chromium.logged.clear()
    chromium.requested.clear()
    chromium.open(page)
    return chromium


def points(tab: Tab, chart: str) -> dict[str, tuple[float, float]]:
    """Cost and quality of each point, by arm, as its accessible text says them."""
    found = {}
    for text in filter(None, tab.evaluate(MARKS.format(chart))):
        arm = re.search(r"; arm: ([^;]+);", text)
        costs = re.match(r".*?\): ([-\d.]+)%; .*?\): ([-\d.]+);", text)
        assert arm and costs, text
        found[arm[1]] = (float(costs[1]), float(costs[2]))
    return found


def test_it_loads_from_disk_without_a_word_and_asks_for_nothing(tab: Tab, page: Path) -> None:
    assert tab.logged == []
    assert [url for url in tab.requested if not url.startswith("data:")] == [page.resolve().as_uri()]
    drawn = tab.evaluate("[...document.querySelectorAll('figure svg.marks')].length")
    assert drawn == 7  # three fronts, blocks freed, kept positions, error by layer and by head
    assert set(points(tab, "space")) == {"dense", "dense'", "hindsight keep=0.25", "fp8", SNAPKV, "kivi"}


def test_verdicts_and_their_warning_come_before_all_else(tab: Tab) -> None:
    top = "document.querySelector('{}').getBoundingClientRect().top"
    places = [tab.evaluate(top.format(what)) for what in (".caution", "h1", "#verdicts table", "#findings", "figure")]
    assert places == sorted(places)
    assert "about earlier cells" in tab.evaluate("document.querySelector('.caution').textContent")


def test_choosing_a_metric_changes_points_and_axis(tab: Tab) -> None:
    assert points(tab, "traffic")[SNAPKV] == (25.0, 0.625)
    tab.choose("metric", "nll")
    assert points(tab, "traffic")[SNAPKV] == (25.0, 1.25)
    assert "NLL (nats per token; lower is better; measured)" in tab.evaluate(TITLES.format("traffic"))
    assert tab.logged == []


def test_choosing_a_cost_changes_one_chart(tab: Tab) -> None:
    assert points(tab, "space")[SNAPKV] == (2.34375, 0.625)
    tab.choose("space", "held")
    assert points(tab, "space")[SNAPKV] == (25.0, 0.625)
    assert "bytes held / dense's" in tab.evaluate(TITLES.format("space"))
    tab.choose("time", "modelled_H200")
    time = points(tab, "time")
    assert set(time) == {"dense", SNAPKV} and time[SNAPKV] == (40.0, 0.625)
    assert "modelled for H200" in tab.evaluate(TITLES.format("time"))
    assert "KV bytes read" in tab.evaluate(TITLES.format("traffic"))
    assert tab.logged == []


def test_choosing_a_workload_changes_charts_and_tables(tab: Tab) -> None:
    shown = "[...document.querySelectorAll('[data-set]')].filter(part => !part.hidden).map(part => part.dataset.set)"
    assert points(tab, "space")["kivi"] == (0.0, 0.75)
    assert set(tab.evaluate(shown)) == {"kv_short 2k"}
    tab.choose("set", "copy 2k")
    assert points(tab, "space")["kivi"] == (0.0, 0.25)
    assert set(tab.evaluate(shown)) == {"copy 2k"}
    tab.evaluate("document.getElementById('choose-all').click()")
    assert set(tab.evaluate(shown)) == {"kv_short 2k", "copy 2k"}
    assert tab.logged == []


def test_a_tip_says_what_a_point_is(tab: Tab) -> None:
    tab.hover(f"#chart-traffic path[aria-label*='; arm: {SNAPKV};']")
    tab.until("document.querySelector('#vg-tooltip-element.visible') !== null")
    tip = tab.evaluate("document.querySelector('#vg-tooltip-element').innerText")
    for said in (SNAPKV, "candidate", "0.6250", "-0.375", "25.00%", "4 questions on 2 contexts"):
        assert said in tip, tip


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out_and_text_keeps_its_size(tab: Tab, page: Path, width: int) -> None:
    tab.open(page, width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('figure svg.marks')].map(svg => svg.getBoundingClientRect().right)"
    assert max(tab.evaluate(wide)) <= width
    sizes = (
        "[...document.querySelectorAll('p, td, li, label')].map(part => parseFloat(getComputedStyle(part).fontSize))"
    )
    assert min(tab.evaluate(sizes)) >= 12
    assert tab.logged == []
