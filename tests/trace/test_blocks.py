from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import TraceError
from kvassay.trace.blocks import GroupTable, Overlay, RequestTables, check_overlay, reblock
from kvassay.trace.events import Event, EventKind, read_events, replay, write_events
from kvassay.trace.reader import Trace
from kvassay.trace.schema import BranchEntry, PrefixEntry
from kvassay.trace.verify import verify
from kvassay.trace.writer import TraceWriter

from . import tiny


def hashes(path: Path) -> dict[str, str]:
    return {
        str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.parent.name != "blocks"
    }


def brute_force_slots(overlay: Overlay, prefix_tokens: int) -> dict[tuple[int, int], tuple[str, int]]:
    """(group, slot) -> the token that lies there, position by position; fails on a second token in a slot."""
    found: dict[tuple[int, int], tuple[str, int]] = {}
    blocks: dict[int, int] = {}
    for at, group in enumerate(overlay.groups):
        for request in overlay.requests:
            for position in range(request.tokens):
                block = request.tables[at][position // group.block_size]
                assert 0 < block < overlay.num_blocks
                assert blocks.setdefault(block, at) == at
                slot = block * group.block_size + position % group.block_size
                token = ("prefix" if position < prefix_tokens else request.segment, position)
                assert found.setdefault((at, slot), token) == token
    return found


@given(
    prefix=st.integers(1, 70),
    branches=st.lists(st.integers(1, 40), max_size=4),
    block_size=st.integers(1, 33),
)
def test_reblock_maps_each_position_to_exactly_one_slot(prefix: int, branches: list[int], block_size: int) -> None:
    header = tiny.header(
        prefix=PrefixEntry(tokens=prefix),
        branches=tuple(BranchEntry(tokens=n, question_tokens=1) for n in branches),
        q_from=0,
        taps=(),
    )
    overlay, events = reblock(header, block_size)
    slots = brute_force_slots(overlay, prefix)
    assert check_overlay(overlay, header, events) == check_overlay(overlay, header) == len(slots)
    assert [request.tokens for request in overlay.requests] == [prefix, *(prefix + n for n in branches)]
    size, groups = overlay.groups[0].block_size, len(overlay.groups)
    own = [-(-(prefix + n) // size) - prefix // size for n in branches]
    assert overlay.num_blocks == 1 + groups * (-(-prefix // size) + sum(own))


def test_reblock_by_hand() -> None:
    header = tiny.header()  # 11 tokens of prefix; branches of 6 and 3
    overlay, events = reblock(header, 4)
    assert [g.block_size for g in overlay.groups] == [4, 4]
    prefix, first, second = overlay.requests
    assert prefix.tables == ((1, 2, 3), (4, 5, 6))
    assert first.tables == ((1, 2, 7, 8, 9), (4, 5, 10, 11, 12))  # 17 tokens; the partial third block is copied
    assert second.tables == ((1, 2, 13, 14), (4, 5, 15, 16))  # 14 tokens
    copies = [e for e in events if e.kind is EventKind.COPY]
    assert [(e.request, e.group, e.ordinal, e.value, e.block) for e in copies[:2]] == [
        ("branch_000", 0, 2, 3, 7),
        ("branch_000", 1, 2, 6, 10),
    ]


def test_reblock_writes_an_overlay_and_touches_nothing_else(made: tiny.Made) -> None:
    before = hashes(made.path)
    trace = Trace.open(made.path)
    assert trace.overlays == ()
    assert trace.reblock(4) == made.path / "blocks/block_4.json"
    trace.reblock(16, "wide")
    assert hashes(made.path) == before
    assert trace.overlays == ("block_4", "wide")
    overlay, events = trace.overlay("block_4")
    assert (overlay.source, overlay.trace_sha256) == ("reblocked", trace.digest)
    assert check_overlay(overlay, trace.header, events) == check_overlay(*reblock(trace.header, 4)[:1], trace.header)
    report = verify(made.path)
    assert report.ok
    assert report.overlays == ("block_4", "wide")
    with pytest.raises(TraceError, match=r"block_4.json: exists already"):
        trace.reblock(4)
    trace.reblock(4, overwrite=True)
    with pytest.raises(TraceError, match=r"no block tables 'wyde'.*did you mean 'wide'"):
        trace.overlay("wyde")
    with pytest.raises(TraceError, match="block size 0"):
        trace.reblock(0)


def test_an_overlay_recorded_with_the_trace(tmp_path: Path) -> None:
    header = tiny.header()
    overlay, events = reblock(header, 8, "recorded")
    with TraceWriter(tmp_path / "trace", header) as writer:
        tiny.write_rows(writer, tiny.rows_for(tiny.torch.float32))
        writer.add_overlay(overlay.model_copy(update={"source": "recorded"}), events)
    trace = Trace.open(tmp_path / "trace")
    found, log = trace.overlay()
    assert (found.requests, found.source, log) == (overlay.requests, "recorded", events)


def test_a_damaged_overlay_is_found(made: tiny.Made, tmp_path: Path) -> None:
    trace = Trace.open(made.path)
    path = trace.reblock(4)
    log = path.with_suffix(".events.parquet")
    good, events = path.read_text(), log.read_bytes()

    path.write_text(good.replace('"name": "block_4"', '"name": "block_5"'))
    assert "calls itself 'block_5'" in verify(made.path).problems[0]
    path.write_text(good.replace(trace.digest, "0" * 64))
    assert "belongs to another trace" in verify(made.path).problems[0]
    path.write_text(good.replace('"num_blocks"', '"blocks"'))
    assert "unknown key 'blocks' (did you mean 'num_blocks'?)" in verify(made.path).problems[0]
    path.write_text(good)
    log.write_bytes(events[:-1] + b"x")
    assert "sha256 is" in verify(made.path).problems[0]
    log.unlink()
    assert "cannot read: No such file" in verify(made.path).problems[0]


GROUPS = (
    GroupTable(index=0, layers=(0,), block_size=4),
    GroupTable(index=1, layers=(1,), block_size=4, window=5),
)


def overlay_of(*tables: tuple[str, int, tuple[tuple[int, ...], ...]], num_blocks: int = 40) -> Overlay:
    requests = tuple(RequestTables(segment=s, tokens=n, tables=t) for s, n, t in tables)
    return Overlay(name="x", source="recorded", num_blocks=num_blocks, groups=GROUPS, requests=requests)


PREFIX = ("prefix", 11, ((1, 2, 3), (4, 5, 6)))


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([("prefix", 11, ((1, 2, 2), (4, 5, 6)))], "group 0, slot 8 holds two different tokens"),
        ([("prefix", 11, ((1, 2), (4, 5, 6)))], "prefix, group 0: 2 blocks of 4 for 11 tokens"),
        ([("prefix", 11, ((1, 2, 3), (4, 5, 3)))], "block 3 is in groups 0 and 1"),
        ([("prefix", 11, ((1, 2, 40), (4, 5, 6)))], "block 40 in a pool of 40"),
        ([("prefix", 11, ((0, 2, 3), (4, 5, 6)))], "group 0: 4 visible positions lie in the null block"),
        # window 5: the query at 11 sees 7 to 10, so position 7 in the second block must be there
        ([("prefix", 11, ((1, 2, 3), (0, 0, 6)))], "group 1: 1 visible positions lie in the null block"),
        ([("prefix", 12, ((1, 2, 3), (4, 5, 6)))], "prefix has 12 tokens in 2 tables; the trace has 11 tokens"),
        ([("prefix", 11, ((1, 2, 3),))], "prefix has 11 tokens in 1 tables"),
        ([("branch_009", 11, ((1, 2, 3), (4, 5, 6)))], "the trace has no segment 'branch_009'"),
        ([PREFIX, PREFIX], "a sequence is listed twice"),
        # the branch writes position 11 into the prefix's own third block, which the other branch shares
        (
            [
                ("branch_000", 17, ((1, 2, 3, 7, 8), (4, 5, 6, 9, 10))),
                ("branch_001", 14, ((1, 2, 3, 11), (4, 5, 6, 12))),
            ],
            "group 0, slot 15 holds two different tokens",
        ),
    ],
)
def test_check_overlay_refuses(requests: list[tuple[str, int, tuple[tuple[int, ...], ...]]], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        check_overlay(overlay_of(*requests), tiny.header())


def test_null_blocks_behind_the_window_and_shared_prefix_blocks_are_fine() -> None:
    passed = ("prefix", 11, ((1, 2, 3), (0, 5, 6)))
    assert check_overlay(overlay_of(passed), tiny.header()) == 11 + 7
    branch = ("branch_001", 14, ((1, 2, 13, 14), (0, 0, 15, 16)))
    # group 0 shares 8 slots; group 1's branch keeps positions 8 to 13 in blocks of its own
    assert check_overlay(overlay_of(passed, branch), tiny.header()) == (11 + 6) + (7 + 6)


def test_groups_must_cover_every_layer_with_a_cache_once() -> None:
    for groups in (GROUPS[:1], (*GROUPS, GroupTable(index=2, layers=(1,), block_size=4))):
        tables = tuple((1 + 3 * i, 2 + 3 * i, 3 + 3 * i) for i in range(len(groups)))
        overlay = Overlay(
            name="x",
            source="recorded",
            num_blocks=40,
            groups=groups,
            requests=(RequestTables(segment="prefix", tokens=11, tables=tables),),
        )
        with pytest.raises(TraceError, match="each layer with a cache belongs to one"):
            check_overlay(overlay, tiny.header())


A, B = "a", "b"
K = EventKind


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Event(2, K.STEP, value=1), Event(1, K.STEP, value=1)], r"event 1 \(step, step 1\): step 1 after step 2"),
        ([Event(0, K.ALLOC, A, 0, 5, 1, 0)], "ordinal 1, but the table has 0 blocks"),
        ([Event(0, K.ALLOC, A, 0, 0, 0, 0)], "the null block cannot be allocated"),
        ([Event(0, K.ALLOC, A, 3, 5, 0, 0)], "request 'a', group 3: no such table"),
        (
            [Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.ALLOC, B, 0, 5, 0, 0)],
            "event 1 .*block 5 is given out fresh while 1 tables hold it",
        ),
        ([Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.APPEND, A, value=5)], "5 tokens in group 0's 1 blocks of 4"),
        (
            [Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.ALLOC, B, 0, 5, 0, 1), Event(0, K.APPEND, A, value=1)],
            "block 5 is written while 2 tables hold it",
        ),
        (
            [Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.NULL, A, 0, 5, 0), Event(1, K.APPEND, A, value=1)],
            "block 0 is written",
        ),
        ([Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.NULL, A, 0, 6, 0)], "ordinal 0 of a holds 5, not block 6"),
        ([Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.EVICT, block=5)], "evicted while 1 tables hold it"),
        ([Event(0, K.GENERATION, block=5, value=2), Event(0, K.GENERATION, block=5, value=2)], "generation 2 to 2"),
        ([Event(0, K.ALLOC, A, 0, 5, 0)], "'value' is missing"),
        (
            [Event(0, K.ALLOC, A, 0, 5, 0, 0), Event(0, K.APPEND, A, value=1), Event(0, K.HIT, A, value=2)],
            "a has 1 tokens and cannot take 2 this way",
        ),
    ],
)
def test_replay_refuses(events: list[Event], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replay(events, {0: 4})


def test_replay_follows_reuse_copy_and_free() -> None:
    log = [
        Event(0, K.STEP, value=6),
        Event(0, K.ALLOC, A, 0, 1, 0, 0),
        Event(0, K.ALLOC, A, 0, 2, 1, 0),
        Event(0, K.APPEND, A, value=6),
        Event(1, K.ALLOC, B, 0, 1, 0, 1),
        Event(1, K.ALLOC, B, 0, 2, 1, 1),
        Event(1, K.HIT, B, value=6),
        Event(1, K.COPY, B, 0, 3, 1, 2),
        Event(1, K.APPEND, B, value=2),
        Event(2, K.FREE, A, 0, 2, 1),
        Event(2, K.FREE, A, 0, 1, 0),
        Event(3, K.EVICT, block=2),
        Event(3, K.GENERATION, block=2, value=1),
        Event(3, K.ALLOC, B, 0, 2, 2, 0),
        Event(3, K.NULL, B, 0, 1, 0),
    ]
    tables = replay(log, {0: 4})
    assert tables.of(A) == {0: [1, 2]}  # as it was before it was freed
    assert tables.of(B) == {0: [0, 3, 2]}
    assert tables.tokens == {A: 6, B: 8}
    assert tables.owners == {1: 0, 2: 1, 3: 1}
    assert tables.of("c") == {}


def test_a_table_that_is_not_what_its_events_give() -> None:
    header = tiny.header()
    overlay, events = reblock(header, 4)
    first = overlay.requests[0].model_copy(update={"tables": ((1, 3, 2), (4, 5, 6))})
    with pytest.raises(TraceError, match="table of prefix, group 0 is not what its events give"):
        check_overlay(overlay.model_copy(update={"requests": (first,)}), header, events)
    with pytest.raises(TraceError, match="branch_001 has 14 tokens, its events give 11"):
        check_overlay(overlay, header, events[:-1])


def test_events_round_trip_and_a_bad_log_is_refused(tmp_path: Path) -> None:
    _, events = reblock(tiny.header(), 4)
    write_events(tmp_path / "log.parquet", events)
    assert read_events(tmp_path / "log.parquet") == events
    write_events(tmp_path / "empty.parquet", ())
    assert read_events(tmp_path / "empty.parquet") == ()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(TraceError, match=r"bad.parquet: not a readable event log") as error:
        read_events(tmp_path / "bad.parquet")
    assert "\n" not in str(error.value)
    write_events(tmp_path / "odd.parquet", [Event(0, "explode")])  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"row 0: unknown event 'explode' \(allowed: step, alloc"):
        read_events(tmp_path / "odd.parquet")
