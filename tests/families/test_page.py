"""`docs/families.md` says what is tested, of every family."""

from __future__ import annotations

from pathlib import Path

from tests.families import models, table

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == table.page(), "run: python -m tests.families.table > docs/families.md"


def test_every_family_has_its_row() -> None:
    tested = [family for family in models.ALL if family not in models.WRAPPED]
    assert [row.family for row in table.rows()] == tested
    assert set(table.PUBLISHED) == set(tested)
