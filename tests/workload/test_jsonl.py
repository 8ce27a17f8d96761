from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import WorkloadError
from kvassay.workload import haystack
from kvassay.workload.jsonl import recurring
from kvassay.workload.registry import build, rebuild


@pytest.fixture
def file(tmp_path: Path) -> Path:
    paragraphs = [p for _, doc in haystack.load().documents for p in doc][:80]
    rows = [{"prompt": "How many?", "reasoning": " ".join(paragraphs[i::2]), "answer": f"It is {i}."} for i in range(2)]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_the_branch_is_what_was_written_next(file: Path, with_bos: Any) -> None:
    sample = build("jsonl", with_bos, 900, path=str(file), row=1, continued=40)
    row = json.loads(file.read_text().splitlines()[1])
    whole = with_bos.encode(row["prompt"] + "\n<think>\n" + row["reasoning"] + "\n</think>\n" + row["answer"])
    branch = sample.branches[0]
    assert list(sample.context_ids + branch.token_ids) == whole[: 900 + 1 + 40]
    assert (len(branch.question_ids), len(branch.answer_ids)) == (1, 40)
    assert sample.query_aware  # the prompt stands in the context
    assert branch.meta["final_answer"] == "It is 1."
    assert rebuild(sample.meta["recipe"], with_bos) == sample
    assert build("jsonl", with_bos, 900, path=str(file), index=1, continued=40).context_ids == sample.context_ids


def test_only_tokens_from_far_back_are_scored(file: Path, plain: Any) -> None:
    sample = build("jsonl", plain, 900, path=str(file), far=300)
    ids = [*sample.context_ids, *sample.branches[0].token_ids]
    scored = set(sample.branches[0].scored)
    assert 0 < len(scored) < 64
    for i in range(64):
        at = 901 + i
        earlier = [j for j in range(at) if ids[j] == ids[at]]
        assert (i in scored) is (bool(earlier) and at - earlier[-1] > 300)
    everything = build("jsonl", plain, 900, path=str(file), score="all").branches[0]
    assert everything.scored == tuple(range(64))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 12), st.integers(0, 40))
def test_recurring_against_a_scan(ids: list[int], far: int, start: int) -> None:
    expected = [
        i for i in range(min(start, len(ids)), len(ids)) if ids[i] in ids[:i] and ids[i] not in ids[max(0, i - far) : i]
    ]
    assert recurring(ids, start, len(ids), far) == expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"row": 2}, "row 2 was asked for, the file has 2"),
        ({"answer_key": "anwser"}, r"traces.jsonl:1: key 'anwser' is missing or no text \(did you mean 'answer'\?\)"),
        ({"score": "fra"}, r"score 'fra' \(did you mean 'far'\?\)"),
        ({"given": 0}, "given=0 and continued=64 must be >= 1"),
        ({"far": 100_000}, "none of the 64 answer tokens recurs from more than far=100000"),
        (
            {"continued": 90_000},
            r"the trace has \d+ tokens, but length 900 with given=1 and continued=90000 takes 90901",
        ),
    ],
)
def test_refusals(file: Path, plain: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        build("jsonl", plain, 900, path=str(file), **params)


def test_a_broken_line_is_named(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"prompt": "a"\n[1]\n')
    with pytest.raises(WorkloadError, match=r"broken\.jsonl:1: not JSON"):
        build("jsonl", plain, 900, path=str(path))
    with pytest.raises(WorkloadError, match=r"broken\.jsonl:2: not a JSON object"):
        build("jsonl", plain, 900, path=str(path), row=1)
