"""The page of method cards: as committed, complete, and honest about what it lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.errors import PolicyError
from kvassay.policy import registry
from kvassay.policy.applicability import CANDIDATES
from kvassay.policy.card import Card, Effect
from kvassay.policy.cards import markdown

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


def test_the_page_is_what_the_cards_say() -> None:
    fresh = markdown(registry.get(name) for name in registry.BUILT_IN)
    assert PAGE.read_text(encoding="utf-8") == fresh, "run: kvassay policies --markdown > docs/policies.md"


@pytest.mark.parametrize("name", [name for name in CANDIDATES if name in registry.BUILT_IN])
def test_a_candidate_says_where_it_fails_and_what_it_needs(name: str) -> None:
    card = registry.get(name).card
    part = PAGE.read_text(encoding="utf-8").split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert card.limits and all(limit in part for limit in card.limits)
    assert "What an engine needs:" in part and card.source in part
    assert ("reconstruction" in part) is card.reconstruction


def test_every_policy_is_on_it_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [text.count(f"\n## {name}\n") for name in registry.BUILT_IN] == [1] * len(registry.BUILT_IN)


@pytest.mark.parametrize(
    ("field", "given", "message"),
    [
        ("when", "after_prefil", r"card 'mine': no when 'after_prefil' \(did you mean 'after_prefill'\?\)"),
        ("effects", "evikt", r"card 'mine': no effects 'evikt' \(did you mean 'evict'\?\)"),
        ("evidence", "key", r"no evidence 'key' \(did you mean 'keys'\?\)"),
        ("approximates", "value", r"no approximates 'value' \(did you mean 'values'\?\)"),
        ("budgets", "keep", r"no budgets 'keep' \(known: bytes, keep_tokens, per_window, read_tokens\)"),
    ],
)
def test_a_card_names_only_what_there_is(field: str, given: str, message: str) -> None:
    fields = {"effects": frozenset({Effect.EVICT}), field: frozenset({given})}
    with pytest.raises(PolicyError, match=message):
        Card("mine", source="test", summary="test", **fields)  # type: ignore[arg-type]
