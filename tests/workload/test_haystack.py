from __future__ import annotations

import random

import pytest

from kvassay.errors import WorkloadError
from kvassay.workload import haystack
from kvassay.workload.lexicon import NAMES, WORDS


def test_paragraphs_read_as_prose_and_come_once() -> None:
    paragraphs = [p for _, doc in haystack.load("all").documents for p in doc]
    assert len(paragraphs) == len(set(paragraphs)) > 1000
    assert sum(map(len, paragraphs)) > 250_000
    for paragraph in paragraphs:
        assert paragraph.isascii() and paragraph[0].isupper() and paragraph[-1] == "."
        assert len(paragraph) >= 90
        assert "\n" not in paragraph and not any(c.isdigit() for c in paragraph)


def test_the_splits_part_the_whole() -> None:
    parts = [{p for _, doc in haystack.load(s).documents for p in doc} for s in ("test", "calibration", "all")]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == parts[2]


def test_order_follows_the_generator_and_keeps_documents_whole() -> None:
    hay = haystack.load()
    first = hay.paragraphs(random.Random("a"))
    assert first == hay.paragraphs(random.Random("a"))
    assert first != hay.paragraphs(random.Random("b"))
    assert sorted(first) == sorted(hay.paragraphs(random.Random("b")))
    name, document = max(hay.documents, key=lambda item: len(item[1]))
    at = first.index(document[0])
    assert first[at : at + len(document)] == list(document), name


def test_sentences_join_back() -> None:
    text = "One is here. Two, e.g. this, follows! And the third? Yes."
    assert haystack.sentences(text) == ["One is here.", "Two, e.g. this, follows!", "And the third?", "Yes."]
    for _, doc in haystack.load().documents[:30]:
        assert all(" ".join(haystack.sentences(paragraph)) == paragraph for paragraph in doc)


def test_a_file_without_prose_is_refused(tmp_path) -> None:
    file = tmp_path / "numbers.txt"
    file.write_text("1 2 3\n\n4 5 6")
    with pytest.raises(WorkloadError, match=r"numbers\.txt: no paragraph reads as prose"):
        haystack.load("all", str(file))


def test_the_lexicon_has_no_doubles() -> None:
    assert len(set(NAMES)) == len(NAMES) > 80
    assert len(set(WORDS)) == len(WORDS) > 800
    assert not set(WORDS) & {name.lower() for name in NAMES}
