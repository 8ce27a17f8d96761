from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Capture, CapturedGroup, CaptureWriter
from kvassay.record.vllm.tables import recorded_tables
from kvassay.trace.events import Event, EventKind, replay

from .steps import arrived, head_of, step, write

GROUPS = [CapturedGroup(layers=(0, 1), block_size=4), CapturedGroup(layers=(2, 3), block_size=4, window=3)]
A = list(range(10, 19))
PREFIX, FIRST = "prefix", "branch_000"


def capture(folder: Path, layers: tuple[int, ...] = (0, 2)) -> Capture:
    """`a` prefills 9 tokens in two steps and ends; `b` hits its 2 whole blocks, with a null one in the window group."""
    steps = [
        step(0, ("a", 0, A[:6]), tables={"a": ((1, 2), (3, 4))}, arrived=(arrived("a", A),)),
        step(1, ("x", 0, [1]), ("a", 6, A[6:]), tables={"a": ((1, 2, 5), (0, 4, 6)), "x": ((7,), (8,))}),
        step(
            2,
            ("b", 8, [A[8], 30]),
            tables={"b": ((1, 2, 5), (0, 4, 3))},
            arrived=(arrived("b", [*A, 30], hit=8),),
            finished=("a", "x"),
        ),
    ]
    return write(folder, head_of(layers, GROUPS), steps)


def test_events_say_what_the_manager_did(tmp_path: Path) -> None:
    overlay, events = recorded_tables(capture(tmp_path), {"a": PREFIX, "b": FIRST}, {"a": 9, "b": 10})
    e = EventKind
    assert list(events) == [
        Event(0, e.STEP, value=6),
        Event(0, e.ALLOC, PREFIX, 0, 1, 0, 0),
        Event(0, e.ALLOC, PREFIX, 0, 2, 1, 0),
        Event(0, e.ALLOC, PREFIX, 1, 3, 0, 0),
        Event(0, e.ALLOC, PREFIX, 1, 4, 1, 0),
        Event(0, e.APPEND, PREFIX, value=6),
        Event(1, e.STEP, value=4),
        Event(1, e.NULL, PREFIX, 1, 3, 0),
        Event(1, e.ALLOC, PREFIX, 0, 5, 2, 0),
        Event(1, e.ALLOC, PREFIX, 1, 6, 2, 0),
        Event(1, e.APPEND, PREFIX, value=3),
        Event(2, e.STEP, value=2),
        Event(2, e.FREE, PREFIX, 0, 1, 0),
        Event(2, e.FREE, PREFIX, 0, 2, 1),
        Event(2, e.FREE, PREFIX, 0, 5, 2),
        Event(2, e.FREE, PREFIX, 1, 4, 1),
        Event(2, e.FREE, PREFIX, 1, 6, 2),
        Event(2, e.ALLOC, FIRST, 0, 1, 0, 1),
        Event(2, e.ALLOC, FIRST, 0, 2, 1, 1),
        Event(2, e.GENERATION, block=5, value=2),
        Event(2, e.ALLOC, FIRST, 0, 5, 2, 0),
        Event(2, e.ALLOC, FIRST, 1, 0, 0, 1),
        Event(2, e.ALLOC, FIRST, 1, 4, 1, 1),
        Event(2, e.GENERATION, block=3, value=2),
        Event(2, e.ALLOC, FIRST, 1, 3, 2, 0),
        Event(2, e.HIT, FIRST, value=8),
        Event(2, e.APPEND, FIRST, value=2),
    ]
    assert replay(events, overlay.block_sizes).of(FIRST) == {0: [1, 2, 5], 1: [0, 4, 3]}
    assert [(g.index, g.layers, g.window) for g in overlay.groups] == [(0, (0,), None), (1, (1,), 3)]
    assert [request.tables for request in overlay.requests] == [((1, 2, 5), (0, 4, 6)), ((1, 2, 5), (0, 4, 3))]


def test_a_group_without_a_recorded_layer_is_left_out(tmp_path: Path) -> None:
    overlay, events = recorded_tables(capture(tmp_path, layers=(2, 3)), {"a": PREFIX}, {"a": 9})
    assert [(g.index, g.layers) for g in overlay.groups] == [(0, (0, 1))]
    assert overlay.requests[0].tables == ((0, 4, 6),)
    assert {event.group for event in events} == {None, 0}


def test_a_row_written_elsewhere_is_found(tmp_path: Path) -> None:
    head = head_of([0])
    writer = CaptureWriter(tmp_path, head)
    writer.tensors(0, {"slots.0": torch.tensor([4, 5, 7])})
    writer.line(step(0, ("a", 0, [1, 2, 3]), tables={"a": ((1,),)}, arrived=(arrived("a", [1, 2, 3]),)))
    with pytest.raises(RecordError, match="step 0, group 0: row 2 was written to slot 7, its block table says 6"):
        recorded_tables(Capture(tmp_path), {"a": PREFIX}, {"a": 3})


def test_a_block_that_becomes_another_is_refused(tmp_path: Path) -> None:
    steps = [
        step(0, ("a", 0, [1]), tables={"a": ((1,),)}, arrived=(arrived("a", [1, 2]),)),
        step(1, ("a", 1, [2]), tables={"a": ((2,),)}),
    ]
    with pytest.raises(RecordError, match="block 1 of a became block 2"):
        recorded_tables(write(tmp_path, head_of([0]), steps), {"a": PREFIX}, {"a": 2})
