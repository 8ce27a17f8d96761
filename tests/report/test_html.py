from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvassay.errors import ExperimentError
from kvassay.measure.metrics import CARDS, RECLAIM_TEXT
from kvassay.report.html import render, write_html
from kvassay.report.picture import write_picture
from tests.runs import make_run


class Page(HTMLParser):
    """Collects tags, attributes and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.links += [values[name] or "" for name in ("src", "href", "xlink:href", "data", "srcset") if name in values]
        self.ids += [values["id"] or ""] if "id" in values else []
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(make_run(tmp_path_factory.mktemp("run")))


def test_the_page_needs_nothing_from_outside(text: str) -> None:
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert not re.search(r"https?://", text)


def test_three_figures_whose_ids_do_not_collide(text: str) -> None:
    page = Page(text)
    assert page.tags.count("svg") == 3
    assert len(page.ids) == len(set(page.ids))
    targets = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert targets and targets <= set(page.ids)


def test_the_numbers_are_in_the_tables(text: str) -> None:
    rows: dict[str, list[list[str]]] = {}
    for row in Page(text).rows:
        rows.setdefault(row[0], []).append(row[1:])
    quality, amounts, blocks = rows["snapkv(window=16) keep=0.25"]
    # Context means of top-1 are 0.75 and 0.5; dense has 1 everywhere.
    assert quality[0] == "0.625 [0.500, 0.750]"
    assert quality[1] == "-0.375 [-0.500, -0.250]"
    assert quality[3:6] == ["1/0", "1.250 [1.250, 1.250]", "1.250"]
    assert quality[-1] == "1/4"
    assert amounts == ["250 KiB", "25%", "12%", "0.98 MiB", "2048", "225 KiB", "25%", "0 B", "0.12"]
    assert blocks == ["128", "3", "20", "80", "64", "96"]
    assert rows["fp8"][2] == ["128", "0", "0", "0", "0", "0"]
    assert len(rows["hindsight† keep=0.25"]) == 3


def test_a_set_has_two_parts_and_each_arm_is_in_one(text: str) -> None:
    exact, transforming = text.split("<h3>")[1:]
    assert exact.startswith("Exact attention") and transforming.startswith("Transforming")
    assert "<td>snapkv(window=16) keep=0.25</td>" in exact and "<td>fp8</td>" not in exact
    assert "<td>fp8</td>" in transforming.split("<h2>")[0]


def test_cards_and_provenance_are_there(text: str) -> None:
    for card in CARDS.values():
        assert f"<dt>{card.title}</dt>" in text
    for line in RECLAIM_TEXT.values():
        assert line in text
    assert "deviation: keeps its rotation" in text
    assert "Some CPU, 2 CPUs, 8.0 GiB; torch 2.13.0" in text


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    results = make_run(tmp_path)
    text = render(replace(results, manifest={**results.manifest, "name": "<script>alert(1)</script>"}))
    assert "<script>" not in text and "&lt;script&gt;" in text


def test_the_page_is_put_into_the_run_folder(tmp_path: Path) -> None:
    page = write_html(make_run(tmp_path))
    assert page == tmp_path / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_pictures_by_suffix(tmp_path: Path) -> None:
    results = make_run(tmp_path)
    assert write_picture(results, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "tiny-model: kv_short 2k" in write_picture(results, tmp_path / "a.svg").read_text(encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"a\.jpeg: a picture is written as \.png, \.svg, \.pdf"):
        write_picture(results, tmp_path / "a.jpeg")
    with pytest.raises(ExperimentError, match=r"none/a\.png: cannot be written: No such file"):
        write_picture(results, tmp_path / "none" / "a.png")
