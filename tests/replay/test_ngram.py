"""Prompt lookup against its rule spelt out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvassay.replay.ngram import prompt_lookup


def test_by_hand() -> None:
    text = [1, 2, 3, 4, 2, 3]
    assert prompt_lookup(text, 4, 2, 3) == [4, 2, 3]  # [4, 2, 3] is new, [2, 3] was followed by 4, 2, 3 and the end
    assert prompt_lookup(text, 2, 2, 3) == [4, 2]
    assert prompt_lookup(text, 4, 3, 3) == []
    assert prompt_lookup([7, 8, 7, 9, 7], 1, 1, 4) == [8]  # the earliest of several
    assert prompt_lookup([1, 2, 5, 2, 6, 1, 2], 1, 1, 2) == [5]  # the longest first, though [2] is met later too
    assert prompt_lookup([5, 5, 5], 4, 1, 2) == [5]  # a match may overlap the end
    assert prompt_lookup([], 4, 1, 2) == prompt_lookup([5], 4, 1, 2) == []


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_as_the_rule_says(text: list[int], k: int, shortest: int, more: int) -> None:
    wanted: list[int] = []
    for size in range(shortest, shortest + more + 1):  # longer matches overwrite shorter ones
        starts = [at for at in range(len(text) - size) if text[at : at + size] == text[len(text) - size :]]
        if starts and size < len(text):
            wanted = text[starts[0] + size :][:k]
    assert prompt_lookup(text, k, shortest, shortest + more) == wanted
