from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Run, Step
from kvassay.record.vllm.sequences import Conversation, Place, Sequences, common, conversations, runs

from .steps import arrived, head_of, step, write

TABLE = {"a": ((1, 2),), "b": ((1, 3),)}
SHARED = [1, 2, 3, 4]


def two_requests() -> list[Step]:
    """b finds the first block of a; both decode in one step, b's row first."""
    a, b = [*SHARED, 5], [*SHARED, 6, 7]
    return [
        step(0, ("a", 0, a[:3]), tables={"a": ((1,),)}, arrived=(arrived("a", a),)),
        step(1, ("a", 3, a[3:]), tables={"a": TABLE["a"]}),
        step(2, ("b", 4, [6, 7]), ("a", 5, [50]), tables=TABLE, arrived=(arrived("b", b, hit=4),)),
        step(3, ("b", 6, [60]), ("a", 6, [51]), tables=TABLE),
    ]


def test_rows_from_the_cache_are_those_of_who_computed_them(tmp_path: Path) -> None:
    capture = write(tmp_path, head_of([0], q_from=4, logits_k=1, logits_from=5), two_requests())
    found = Sequences(capture)
    a, b = found.requests["a"], found.requests["b"]
    assert (a.tokens, b.tokens) == ([*SHARED, 5, 50, 51], [*SHARED, 6, 7, 60])
    places = found.places(b, 0, 7)
    assert places[:4] == found.places(a, 0, 4)
    assert places[3:] == [Place(1, 0, None, None), Place(2, 0, 0, None), Place(2, 1, 1, 0), Place(3, 0, 0, 0)]
    assert found.places(a, 4, 7) == [Place(1, 1, 0, None), Place(2, 2, 2, 1), Place(3, 1, 1, 1)]
    assert runs(places, "row") == [Run(0, 0, 3), Run(1, 0, 1), Run(2, 0, 2), Run(3, 0, 1)]
    assert runs(places[4:], "q_row") == [Run(2, 0, 2), Run(3, 0, 1)]
    with pytest.raises(RecordError, match="captured without its q"):
        runs(places, "q_row")


def test_what_was_cached_before_the_capture_is_missed(tmp_path: Path) -> None:
    steps = two_requests()[2:]
    found = Sequences(write(tmp_path, head_of([0]), steps))
    assert list(found.requests) == ["b"]
    assert not found.complete(found.requests["b"])
    assert conversations(found) == []
    with pytest.raises(RecordError, match="token 0 came from the prefix cache"):
        found.places(found.requests["b"], 0, 1)


def test_a_preempted_request_is_not_whole(tmp_path: Path) -> None:
    steps = two_requests()
    again = step(4, ("a", 0, [*SHARED, 5, 50, 51]), tables=TABLE, preempted=("a",))
    found = Sequences(write(tmp_path, head_of([0]), [*steps, again]))
    assert not found.complete(found.requests["a"])
    assert found.complete(found.requests["b"])


def test_a_gap_is_refused(tmp_path: Path) -> None:
    steps = [two_requests()[0], step(1, ("a", 4, [5]), tables={"a": TABLE["a"]})]
    with pytest.raises(RecordError, match="step 1: request a goes on at position 4, not 3"):
        Sequences(write(tmp_path, head_of([0]), steps))


def test_requests_that_share_their_beginning_become_one_conversation(tmp_path: Path) -> None:
    capture = write(tmp_path, head_of([0]), two_requests())
    found = Sequences(capture)
    assert conversations(found) == [Conversation(4, ("a", "b"))]
    assert conversations(found, share=0.81) == [Conversation(4, ("a",)), Conversation(5, ("b",))]


def test_other_sampling_is_another_conversation(tmp_path: Path) -> None:
    steps = two_requests()
    warm = steps[2].model_copy(update={"arrived": (arrived("b", [*SHARED, 6, 7], hit=4, temperature=0.7),)})
    found = Sequences(write(tmp_path, head_of([0]), [*steps[:2], warm, steps[3]]))
    assert conversations(found) == [Conversation(4, ("a",)), Conversation(5, ("b",))]


def test_common_leaves_every_prompt_a_token() -> None:
    assert common([[1, 2, 3]]) == 2
    assert common([[1, 2, 3], [1, 2]]) == 1
    assert common([[1, 2, 3], [1, 9, 3]]) == 1
    assert common([[1, 2], [3, 4]]) == 0
