"""Importers: what the rows mean, and every mistake named by file, line and key."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvassay.errors import TraceError
from kvassay.trace.requests.formats import open_requests
from kvassay.trace.requests.record import Request


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mooncake(tokens: int, ids: list[Any], at: int = 0) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 5, "hash_ids": ids}


def test_mooncake_counts_the_partial_block_and_milliseconds(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(513, [7, 9]), mooncake(1024, [7, 4], at=1500))
    opened = open_requests(path)
    assert (opened.format, opened.block_size, opened.rounding) == ("mooncake", 512, "ceil")
    assert list(opened) == [Request("1", 0.0, 513, 5, (0, 1)), Request("2", 1.5, 1024, 5, (0, 2))]
    assert list(opened) == list(opened), "iterating again reads again"


def test_ids_that_agree_in_the_low_32_bits_stay_apart(tmp_path: Path) -> None:
    """Cut to 32 bits both would be block 5 and give reuse that is not there (dynamo #12046)."""
    low, high = 5, 5 + (1 << 32)
    path = write(tmp_path / "m.jsonl", mooncake(512, [low]), mooncake(512, [high]), mooncake(512, [2**64 - 1]))
    assert [request.blocks for request in open_requests(path)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (mooncake(20, [1, 2]), "key 'hash_ids': 2 ids for 20 tokens, ceil(20 / 512) = 1 expected"),
        (mooncake(513, [1]), "1 ids for 513 tokens, ceil(513 / 512) = 2 expected"),
        (mooncake(512, [2**64]), "18446744073709551616 is no block id"),
        (mooncake(512, [-1]), "-1 is no block id"),
        (mooncake(512, [1.0]), "1.0 is no block id"),
        (mooncake(512, [True]), "True is no block id"),
        (mooncake(0, []), "key 'input_length': 0 is not a whole number of at least 1"),
        ({**mooncake(512, [1]), "timestamp": -1}, "key 'timestamp': -1 is not a time of at least 0"),
        ({"timestamp": 0, "input_length": 512, "hash_ids": [1]}, "missing key 'output_length'"),
        ({**mooncake(512, [1]), "hash_ids": "1"}, "key 'hash_ids': a str is no list"),
    ],
)
def test_a_bad_mooncake_row_is_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(512, [77]), row)
    with pytest.raises(TraceError) as caught:
        list(open_requests(path))
    assert f"{path}:2: " in str(caught.value)
    assert says in str(caught.value)


def test_another_block_size_must_be_said_and_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(33, [1, 2, 3]))
    assert [request.blocks for request in open_requests(path, 16)] == [(0, 1, 2)]
    with pytest.raises(TraceError, match=r"ceil\(33 / 512\) = 1 expected"):
        list(open_requests(path))


def test_time_may_not_go_back(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(512, [1], at=10), mooncake(512, [1], at=9))
    with pytest.raises(TraceError, match=r"m\.jsonl:2: key 'timestamp': 9 is earlier than 10"):
        list(open_requests(path))


@pytest.mark.parametrize("second", [[2, 1], [3, 1], [1, 3, 3]])
def test_an_id_names_its_whole_prefix(tmp_path: Path, second: list[int]) -> None:
    path = write(tmp_path / "m.jsonl", mooncake(1024, [2, 1]), mooncake(512 * len(second), second))
    if second == [2, 1]:
        assert len(list(open_requests(path))) == 2
    else:
        with pytest.raises(TraceError, match=r"m\.jsonl:2: key 'hash_ids': id [13] at ordinal \d follows another id"):
            list(open_requests(path))


def agentic(session: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": session, "block_size": 64, "hash_id_scope": "local", "requests": requests}


def call(t: float, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": ids}


def test_agentic_floors_and_keeps_ids_to_their_session(tmp_path: Path) -> None:
    rows = agentic("a", [call(0, 127, [1])]), agentic("b", [call(0, 130, [1, 2]), call(9.5, 63, [])])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    opened = open_requests(packed)
    assert (opened.format, opened.block_size, opened.rounding) == ("agentic", 64, "floor")
    assert list(opened) == [
        Request("1: requests[0]", 0.0, 127, 3, (0,), "a"),
        Request("2: requests[0]", 0.0, 130, 3, (1, 2), "b"),
        Request("2: requests[1]", 9.5, 63, 3, (), "b"),
    ]


def test_a_sub_agent_s_clock_starts_when_it_does(tmp_path: Path) -> None:
    agent = {"t": 10.0, "type": "subagent", "requests": [call(0.0, 64, [8]), call(5.0, 64, [8])]}
    path = write(tmp_path / "a.jsonl", agentic("a", [call(0, 64, [1]), agent, call(12.0, 128, [1, 2])]))
    found = [(request.arrival, request.name, request.blocks) for request in open_requests(path)]
    assert found == [
        (0.0, "1: requests[0]", (0,)),
        (10.0, "1: requests[1].requests[0]", (1,)),
        (12.0, "1: requests[2]", (0, 2)),
        (15.0, "1: requests[1].requests[1]", (1,)),
    ]


def test_a_bad_entry_of_a_sub_agent_is_named_by_its_place(tmp_path: Path) -> None:
    agent = {"t": 1.0, "type": "subagent", "requests": [call(0.0, 128, [8])]}
    path = write(tmp_path / "a.jsonl", agentic("a", [call(0, 64, [1]), agent]))
    with pytest.raises(TraceError, match=r"a\.jsonl:1: requests\[1\]\.requests\[0\]: key 'hash_ids': 1 ids for 128"):
        list(open_requests(path))


HEAD = {"kvassay_requests": 1, "block_size": 16, "rounding": "floor"}


def test_the_plain_format_and_requests_without_ids(tmp_path: Path) -> None:
    rows = (
        HEAD,
        {"arrival": 0, "input_tokens": 33, "output_tokens": 1, "blocks": [5, 6], "name": "first"},
        {"arrival": 0.5, "input_tokens": 33, "output_tokens": 1, "session": "s"},
    )
    assert list(open_requests(write(tmp_path / "p.jsonl", *rows))) == [
        Request("first", 0.0, 33, 1, (0, 1)),
        Request("3", 0.5, 33, 1, None, "s"),
    ]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (({**HEAD, "rounding": "up"},), r"p\.jsonl:1: key 'rounding': 'up', allowed are 'ceil' and 'floor'"),
        (({**HEAD, "kvassay_requests": 2},), r"p\.jsonl:1: key 'kvassay_requests': version 2, this kvassay reads 1"),
        ((HEAD, {"arival": 0, "input_tokens": 1, "output_tokens": 1}), r"p\.jsonl:2: unknown key 'arival' .*'arrival'"),
        ((HEAD, {"arrival": 0, "output_tokens": 1}), r"p\.jsonl:2: missing key 'input_tokens'"),
    ],
)
def test_a_bad_plain_row_is_named(tmp_path: Path, rows: tuple[dict[str, Any], ...], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        list(open_requests(write(tmp_path / "p.jsonl", *rows)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no requests in it"),
        ("{}\n", "no known request trace"),
        ("[1]\n", "a JSON list, not an object"),
        ("{\n", ":1: not JSON"),
    ],
)
def test_what_is_no_request_trace_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TraceError, match=says):
        open_requests(path)


def test_a_missing_or_cut_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        open_requests(tmp_path / "none.jsonl")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b"{}" * 10_000)[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        open_requests(cut)
