from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import WorkloadError
from kvassay.workload.preview import WordTokenizer, preview
from kvassay.workload.registry import names


@given(st.text())
def test_words_decode_to_the_very_text(text: str) -> None:
    tokenizer = WordTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", [name for name in names() if name != "jsonl"])
def test_every_workload_can_be_looked_at(name: str) -> None:
    text = preview(name, 1500, seed=2)
    questions = 1 if name in ("needle_single", "scratchpad") else 3
    assert f"1500 word tokens, {questions} questions (after compression); [scored]:" in text
    assert text.count("  ->  ") == questions


def test_scored_tokens_stand_in_brackets() -> None:
    last = preview("needle_multikey", 700, query_aware=True).splitlines()[-4:]
    assert last[0] == "700 word tokens, 3 questions (visible to compression); [scored]:"
    for i, line in enumerate(last[1:]):
        head, _, answer = line.partition("  ->  ")
        assert head.startswith(f"  {i}  depth 0.")
        assert answer[:2] == " [" and answer[2:7].isdigit() and answer[7:] == "]"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(WorkloadError, match="did you mean 'copy'"):
        preview("copi", 700)
