"""The page as a file: what comes first, that its numbers are the cells', and that it needs nothing from outside."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvassay.experiment.results import Results
from kvassay.measure.metrics import CARDS, RECLAIM_TEXT
from kvassay.report.html import library, render, write_html
from tests.report.full_run import SNAPKV, make_full_run
from tests.runs import make_run

LIMIT_BYTES = 5_000_000


class Page(HTMLParser):
    """Collects tags, what they load, rows of table cells, tips of heads, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.tips: dict[str, str] = {}
        self.scripts: list[str] = []
        self._inside, self._tip = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.links += [values[name] for name in ("src", "href", "xlink:href", "data", "srcset") if name in values]
        self._tip = values.get("title", "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")
        self._inside = tag if tag in ("td", "th", "script") or self._inside not in ("td", "th") else self._inside

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
            if self._tip:
                self.tips[data] = self._tip
        if self._inside == "script":
            self.scripts[-1] += data


def rows_of(text: str, arm: str) -> list[list[str]]:
    return [row[1:] for row in Page(text).rows if row and row[0] == arm]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_full_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return render(results)


@pytest.fixture(scope="module")
def data(text: str) -> dict[str, Any]:
    return json.loads(Page(text).scripts[0])


def test_the_page_needs_nothing_from_outside(text: str) -> None:
    page = Page(text)
    assert page.links == ["data:,"]  # the icon, so that none is asked for
    assert not {"iframe", "img", "object", "embed"} & set(page.tags)
    own = text.replace(library(), "")
    assert "@import" not in own and "url(" not in own and "fetch(" not in own
    assert not re.search(r"https?://", own)
    assert len(text.encode()) < LIMIT_BYTES


def test_the_chart_library_is_in_the_page_whole(text: str) -> None:
    assert Page(text).scripts[1] == library()
    assert "window.vegaEmbed=" in library() and "</script" not in library()


def test_verdicts_come_first_and_findings_before_any_number(text: str) -> None:
    places = [text.index(f'id="{name}"') for name in ("verdicts", "findings", "results", "states", "flips", "limits")]
    assert places == sorted(places)
    assert places[0] < text.index("top-1, mean")
    verdict = rows_of(text, SNAPKV)[0]
    assert verdict == ["reject", "quality top1: -0.375, at least -0.05", "tiny-model; kv_short"]
    assert "Gate mine (declared 2026-01-01T00:00:00+00:00, sha256 cccccccccccc)" in text
    assert "no verdict: dense" in text and "<li>one note</li>" in text


def test_each_check_says_threshold_value_and_evidence(text: str) -> None:
    assert rows_of(text, "quality top1") == [["≥ -0.05", "-0.375", "fraction", "failed", "measured", ""]]
    assert rows_of(text, "latency") == [["≥ 1.2", "1.6", "dense / arm", "passed", "modelled, H200", ""]]


def test_an_exploratory_judgement_is_said_before_the_title(tmp_path: Path) -> None:
    text = render(make_full_run(tmp_path, exploratory=True))
    body = text[text.index("<body>") :]
    assert body.index("EXPLORATORY: the gate was written after the cells") < body.index("<h1>")
    assert "(exploratory)" in rows_of(text, SNAPKV)[0][0]


def test_without_a_gate_the_page_says_how_to_declare_one(tmp_path: Path) -> None:
    text = render(make_full_run(tmp_path, judged=False))
    assert "No gate judged this run" in text and "for looking, not for choosing" in text
    assert "kvassay keys gate --example" in text and "kvassay gate declare gate.toml" in text
    assert text.index("No gate judged") < text.index('id="findings"')


def test_findings_by_severity_the_gravest_first(text: str) -> None:
    found = text[text.index('id="findings"') : text.index('id="results"')]
    assert found.index("suspect</span>") < found.index("note</span>")
    assert rows_of(text, "budget_base") == [["tiny-model", "kv_short 2k", SNAPKV, "holds 512 of <b>2048</b> tokens"]]
    assert rows_of(text, "underpowered") == [["tiny-model", "kv_short 2k", "all", "2 contexts"]]


def test_the_numbers_are_in_the_tables(text: str) -> None:
    _, worst, quality, amounts, blocks, time, layers, speculation = rows_of(text, SNAPKV)
    assert worst == ["reject", "-0.375 (tiny-model, kv_short 2k)", "1.6 (tiny-model, kv_short 2k)"]
    # Context means of top-1 are 0.75 and 0.5; dense has 1 everywhere. Two contexts give no interval.
    assert quality == [
        "0.625", "-0.375", "-", "0.750", "1/0", "1", "1.250", "1.250", "0.750", "0.500", "4.0", "1/4",
    ]  # fmt: skip
    assert amounts == [
        "250 KiB", "25%", "12%", "125 KiB", "0.98 MiB", "2048", "225 KiB", "25%", "56.2 KiB", "0 B", "0.12",
    ]  # fmt: skip
    assert blocks == ["128", "3", "20", "80", "64", "96"]
    assert time == ["10.0 ms [9.00 ms, 11.0 ms]", "50%", "5.00 ms", "50%", "40%"]
    assert layers == ["0.4500", "0.4500", "0", "0.7500", "0.7500", "0"]
    assert speculation == ["compressed", "0.50", "0.75", "0.50", "0.50", "1.00", "0.50", "1.00", "2.00"]


def test_every_head_of_a_number_says_unit_and_direction(text: str) -> None:
    tips = Page(text).tips
    assert tips["top-1, mean [95%]"] == CARDS["top1"].sentence
    assert tips["read / dense"] == CARDS["read_fraction"].sentence
    assert tips["H200, modelled / dense"].endswith("lower is better; modelled")
    assert "measured" in tips["attention / dense"] and "higher is better" in tips["compaction"]


def test_state_by_kind_is_the_layouts(text: str) -> None:
    # 2 heads x 8 numbers x 2 bytes = 32 bytes per token: 2048 tokens full, 128 in the window.
    assert rows_of(text, "tiny-model") == [["2,048", "bfloat16", "64.0 KiB", "4.00 KiB", "0", "0", "0"]]


def test_turned_answers_with_both_texts_raw(text: str) -> None:
    assert [row for row in Page(text).rows if row and row[0] == "right to wrong"] == [
        ["right to wrong", "t0, 0", " 12|34", " 1234", ' 99 "</script><script>alert(1)</script>']
    ]
    assert len(Page(text).scripts) == 3  # data, library, the page's own


def test_what_is_not_proved_and_where_it_comes_from(text: str) -> None:
    limits = text[text.index('id="limits"') : text.index('id="meaning"')]
    for said in ("Anything beyond the model tiny-model", "fewer than 5 contexts", "about a GPU", "modelled hardware"):
        assert said in limits
    assert rows_of(text, "model tiny-model") == [
        [f"weights sha256 {'a' * 64}; tokenizer sha256 {'b' * 64}; licence MIT"]
    ]
    assert rows_of(text, "gate") == [[f"mine, sha256 {'c' * 64}"]]
    assert "Some CPU, 2 CPUs, 8.0 GiB; torch 2.13.0" in text


def test_the_charts_numbers_are_the_cells(data: dict[str, Any], results: Results) -> None:
    cell = results.sets[0].cell(SNAPKV)
    assert cell is not None
    mine = {row["metric"]: row for row in data["rows"]["points"] if row["arm"] == SNAPKV}
    assert set(mine) == {"top1", "task", "nll", "kl", "agree"}
    for metric, row in mine.items():
        assert row["y"] == pytest.approx(cell.quality[metric].mean, rel=1e-5)
        assert (row["held"], row["read"]) == (0.25, 0.25)
        assert row["whole_block"] == pytest.approx(3 / 128, rel=1e-5)
        assert row["compaction"] == 0.75
        assert (row["attention"], row["attention_policy"], row["modelled_H200"]) == (0.5, 0.75, 0.4)
        assert (row["attention_low"], row["attention_high"]) == (0.45, 0.55)
        assert "low" not in row  # two contexts give no interval
    assert data["rows"]["kept"] == [
        {"model": "tiny-model", "set": "kv_short 2k", "arm": SNAPKV, "share": [1.0] + [0.25] * 62 + [1.0]}
    ]


def test_errors_by_layer_and_head_are_means_over_questions(data: dict[str, Any]) -> None:
    (row,) = data["rows"]["layers"]
    assert (row["arm"], row["layer"], row["error"], row["mass"]) == (SNAPKV, 0, 0.45, 0.75)
    assert row["heads"] == pytest.approx([0.6, 0.3])


def test_the_front_has_exact_arms_an_engine_can_run(data: dict[str, Any]) -> None:
    on = {row["arm"] for row in data["rows"]["points"] if row["metric"] == "top1" and "held" in row["front"]}
    assert on == {"dense", "dense'", SNAPKV}  # not hindsight, a reference, nor fp8, which approximates
    freed = {row["arm"] for row in data["rows"]["points"] if row["metric"] == "top1" and "compaction" in row["front"]}
    assert freed == {"dense", "dense'", SNAPKV}
    nll = {row["arm"] for row in data["rows"]["points"] if row["metric"] == "nll" and "held" in row["front"]}
    assert nll == {"dense", SNAPKV}  # dense' has a higher NLL at the same cost


def test_every_axis_says_direction_and_how_it_was_had(data: dict[str, Any]) -> None:
    assert {axis["front"] for axis in data["axes"]} == {"space", "traffic", "time"}
    for axis in data["axes"]:
        assert re.search(r"\((higher|lower) is better; (measured|modelled)", axis["title"]), axis
    by_key = {axis["key"]: axis["title"] for axis in data["axes"]}
    assert "measured on Some CPU, 2 threads" in by_key["attention"]
    assert "modelled for H200, batch 1, not calibrated" in by_key["modelled_H200"]


def test_what_a_run_lacks_is_said_not_drawn(tmp_path: Path) -> None:
    text = render(make_run(tmp_path))
    drawn = json.loads(Page(text).scripts[0])["specs"]
    assert set(drawn) == {"space", "traffic", "freed"}
    for said in (
        "no chart of it",
        "did not record where",
        "the layout is not known",
        "Not measured in this run",
        "fidelity RUN",
    ):
        assert said in text


def test_a_set_has_two_parts_and_each_arm_is_in_one(text: str) -> None:
    exact, transforming = (part for part in text.split("<h3>") if part.startswith(("Exact", "Transforming")))
    assert f"<td>{SNAPKV}</td>" in exact and "<td>fp8</td>" not in exact
    assert "<td>fp8</td>" in transforming


def test_cards_are_there(text: str) -> None:
    for card in CARDS.values():
        assert f"<dt>{card.title}</dt>" in text
    for line in RECLAIM_TEXT.values():
        assert line in text
    assert "deviation: keeps its rotation" in text


def test_names_from_outside_are_escaped(results: Results) -> None:
    text = render(replace(results, manifest={**results.manifest, "name": "<script>alert(1)</script>"}))
    assert len(Page(text).scripts) == 3 and "&lt;script&gt;alert(1)" in text


def test_page_and_markdown_are_put_into_the_run_folder(tmp_path: Path) -> None:
    page = write_html(make_run(tmp_path))
    assert page == tmp_path / "report.html"
    assert "<!doctype html>" in page.read_text(encoding="utf-8")[:2000]
    assert (tmp_path / "report.md").is_file()
