"""The run as Markdown: what the page says, without charts and filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from kvassay.experiment.folder import MARKDOWN, RunFolder
from kvassay.experiment.results import Results
from kvassay.report.page import page
from kvassay.report.tables import Grid

TEMPLATE = "report.md.j2"


def write_markdown(results: Results, content: dict[str, Any] | None = None) -> Path:
    """Write `report.md` into the run folder and return its path; `ExperimentError` if it cannot be written."""
    folder = RunFolder(results.path)
    target = folder.path / MARKDOWN
    folder.write_text(target, render_markdown(results, content))
    return target


def render_markdown(results: Results, content: dict[str, Any] | None = None) -> str:
    """The text; `content` is what `page` says of the results."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=False,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"cell": cell, "grid": grid}
    return environment.get_template(TEMPLATE).render(**(page(results) if content is None else content))


def cell(text: object) -> str:
    """Text that stays one table cell, and is never taken for markup."""
    plain = str(text).replace("\\", "\\\\").replace("\r", "").replace("\n", "⏎")
    for mark in "|*_`<[":
        plain = plain.replace(mark, f"\\{mark}")
    return plain


def grid(table: Grid) -> str:
    """A table; numbers to the right."""
    heads = [cell(head.name) for head in table.heads]
    align = ["---"] + ["---" if table.prose else "---:"] * (len(heads) - 1)
    lines = [heads, align, *([cell(text) for text in line.cells] for line in table.lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
