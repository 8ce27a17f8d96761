"""The list of public cases names tests that exist, and every test file of this folder."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)


def test_every_test_named_exists() -> None:
    assert len(NAMED) > 50
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if not (TESTS / file).exists() or not re.search(rf"def {name}\(", (TESTS / file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_every_test_of_this_folder_is_listed() -> None:
    here = {
        (f"cases/{path.name}", name)
        for path in Path(__file__).parent.glob("test_*.py")
        if path != Path(__file__)
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert here - set(NAMED) == set()


def test_no_case_is_listed_without_its_thread() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| thread")]
    assert len(rows) > 80
    assert [row for row in rows if len(row.split(" | ")) != 3] == []
