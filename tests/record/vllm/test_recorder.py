from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Arrived
from kvassay.record.vllm.engine import arrived
from kvassay.record.vllm.recorder import PLAN, Plan, Recorder

TABLES = {"a": ([1, 2], [3, 0]), "b": ([4], [5])}


class Output(SimpleNamespace):
    """What a `SchedulerOutput` has that is looked at."""

    def __init__(self, tokens: dict[str, int], finished: tuple[str, ...] = (), new: tuple[Any, ...] = ()) -> None:
        super().__init__(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            finished_req_ids=set(finished),
            scheduled_new_reqs=list(new),
        )


def scheduler(*running: str) -> Any:
    manager = SimpleNamespace(get_block_ids=lambda name: TABLES[name])
    return SimpleNamespace(running=[SimpleNamespace(request_id=name) for name in running], kv_cache_manager=manager)


def request(**changes: Any) -> Any:
    sampling = SimpleNamespace(temperature=0.5, top_p=0.9, seed=3, max_tokens=7)
    values = {"req_id": "a", "prompt_token_ids": [8, 9], "num_computed_tokens": 1, "mm_features": []}
    return SimpleNamespace(**{**values, "sampling_params": sampling, **changes})


def plan(recorder: Recorder, state: Any, output: Output) -> Plan | None:
    recorder.scheduled(state, output)
    # As it travels to the model's process.
    found: Plan | None = pickle.loads(pickle.dumps(vars(output))).get(PLAN)
    return found


def test_the_scheduler_side_notes_requests_tables_and_who_is_gone() -> None:
    recorder = Recorder("never-made")
    first = plan(recorder, scheduler("a", "b"), Output({"b": 1, "a": 4}, new=(request(),)))
    assert first is not None
    expected = Arrived(id="a", prompt_ids=(8, 9), hit=1, temperature=0.5, top_p=0.9, seed=3, max_tokens=7)
    assert first.arrived == (expected,)
    assert first.tables == {"b": ((4,), (5,)), "a": ((1, 2), (3, 0))}
    assert list(first.tables) == ["b", "a"]  # the scheduler's order
    assert (first.finished, first.preempted) == ((), ())
    # A step without tokens is none, but what it says of requests that ended is kept for the next one.
    assert plan(recorder, scheduler("b"), Output({}, finished=("a",))) is None
    second = plan(recorder, scheduler(), Output({"b": 1}))
    assert second is not None
    assert (second.finished, second.preempted) == (("a",), ("b",))


def test_nothing_is_noted_before_start_and_after_stop() -> None:
    recorder = Recorder()
    assert plan(recorder, scheduler("a"), Output({"a": 1})) is None
    with pytest.raises(RecordError, match="no vLLM engine was made"):
        recorder.start("never-made", limits=None)  # type: ignore[arg-type]  # it does not come to that


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": None}, "its prompt is not token ids alone"),
        ({"mm_features": ["image"]}, "its prompt is not token ids alone"),
        ({"sampling_params": None}, "pooling requests"),
    ],
)
def test_requests_that_no_trace_can_hold(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        arrived(request(**changes))
