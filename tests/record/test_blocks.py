from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvassay.record.blocks import block_tables
from kvassay.record.options import RecordOptions
from kvassay.record.transformers import record_sample
from kvassay.trace.blocks import check_overlay
from kvassay.trace.events import EventKind, replay
from kvassay.trace.schema import BranchEntry, PrefixEntry
from kvassay.trace.verify import verify
from tests.trace.tiny import header

from . import tiny
from .conftest import loaded, sample_of


def test_tables_by_hand() -> None:
    # 11 tokens in chunks of 4, blocks of 4, one full group and one with a window of 5; branches of 6 and 3 tokens.
    overlay, events = block_tables(header(), 4)
    assert [(g.layers, g.block_size, g.window) for g in overlay.groups] == [((0,), 4, None), ((1,), 4, 5)]
    prefix, first, second = overlay.requests
    assert (prefix.segment, prefix.tokens, first.tokens, second.tokens) == ("prefix", 11, 17, 14)
    # Chunk by chunk a block each per group. At 8 tokens the next query sees 4 to 7 only, so group 1 lets go of
    # block 2, which group 0 gets at once: unhashed blocks are reused first, with a new generation.
    assert prefix.tables == ((1, 3, 2), (0, 4, 5))
    # Each branch copies the partial third blocks (2 to 6, 5 to 8, ...) and at 15 tokens lets go of block 4.
    assert first.tables == ((1, 3, 6, 7, 10), (0, 0, 8, 9, 11))
    assert second.tables == ((1, 3, 12, 13), (0, 4, 14, 15))
    nulls = [(e.step, e.request, e.group, e.block, e.ordinal) for e in events if e.kind is EventKind.NULL]
    assert nulls == [(2, "prefix", 1, 2, 0), (4, "branch_000", 1, 4, 1)]
    assert [(e.block, e.value) for e in events if e.kind is EventKind.GENERATION] == [(2, 2)]
    steps = [(e.step, e.value) for e in events if e.kind is EventKind.STEP]
    assert steps == [(0, 4), (1, 4), (2, 3), (3, 4), (4, 2), (5, 3)]
    copies = Counter((e.request, e.group) for e in events if e.kind is EventKind.COPY)
    assert copies == {(f"branch_00{b}", g): 1 for b in (0, 1) for g in (0, 1)}
    shared = [(e.request, e.value) for e in events if e.kind is EventKind.HIT]
    assert shared == [("branch_000", 11), ("branch_001", 11)]


@pytest.mark.parametrize("prefix", [1, 4, 8, 37])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_the_events_make_the_tables_and_every_visible_position_has_a_slot(prefix: int, size: int, chunk: int) -> None:
    made = header(
        prefix=PrefixEntry(tokens=prefix),
        branches=tuple(BranchEntry(tokens=n, question_tokens=1) for n in (1, 9, 20)),
        q_from=0,
        taps=(),
        prefill_chunk=chunk,
    )
    overlay, events = block_tables(made, size)
    check_overlay(overlay, made, events)
    tables = replay(events, overlay.block_sizes)
    assert tables.tokens == {"prefix": prefix, **{f"branch_{i:03d}": prefix + n for i, n in enumerate((1, 9, 20))}}
    held = Counter(b for r in overlay.requests for table in r.tables for b in table if b)
    assert {b: n for b, n in tables.owners.items() if n} == held
    again = [e.value for e in events if e.kind is EventKind.GENERATION]
    assert all(value is not None and value > 1 for value in again)


def test_a_recording_comes_with_its_tables(tmp_path: Path) -> None:
    sample = sample_of(tiny.token_ids(45), [(tiny.token_ids(5, seed=1), tiny.token_ids(3, seed=2))])
    trace = record_sample(loaded("gemma3"), sample, tmp_path / "t", RecordOptions(prefill_chunk=16))
    assert trace.overlays == ("recorded",)
    overlay, events = trace.overlay()
    assert (overlay, events) == _stored(block_tables(trace.header), overlay)
    assert overlay.source == "recorded"
    report = verify(trace.path)
    assert (report.problems, report.overlays) == ([], ("recorded",))
    # 3 sliding groups of one layer and one full: 45 + 8 live slots in full, the window's blocks in the others
    assert report.slots == check_overlay(overlay, trace.header, events)
    trace.reblock(32)
    assert trace.overlays == ("block_32", "recorded")


def _stored(made: tuple, overlay: object) -> tuple:
    known = {"trace_sha256": overlay.trace_sha256, "events_sha256": overlay.events_sha256}  # type: ignore[attr-defined]
    return made[0].model_copy(update=known), made[1]
