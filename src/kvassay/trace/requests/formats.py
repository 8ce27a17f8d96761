"""The importers: one function per file format, each a generator of requests.

mooncake  one request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; 512 tokens a block,
          the last, partial one included (github.com/kvcache-ai/Mooncake, FAST25-release/traces).
agentic   one session a line: `id`, `block_size`, `hash_id_scope: "local"`, `requests` of `t` (s), `in`, `out`,
          `hash_ids` of full blocks only; an entry of type `subagent` holds `requests` of its own, whose `t` counts
          from its start (github.com/callanjfox/kv-cache-tester).
kvassay   a first line `{"kvassay_requests": 1, "block_size": 16, "rounding": "ceil" | "floor"}`, then one request
          a line: `arrival` (s), `input_tokens`, `output_tokens`, and optionally `blocks` (prefix ids, 0..2^64-1),
          `name` and `session`; ids mean the same over the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvassay.errors import TraceError
from kvassay.trace.requests.chain import Chains
from kvassay.trace.requests.record import Request, RequestFile, Rounding, blocks_expected
from kvassay.trace.requests.source import Row, rows

MOONCAKE_BLOCK = 512
VERSION = 1
ROUNDINGS: tuple[Rounding, ...] = ("ceil", "floor")


def open_requests(path: str | Path, block_size: int | None = None) -> RequestFile:
    """Recognise a request trace by its first line.

    `block_size` is for Mooncake-like files of another block size, as those do not state it.

    Raises:
        TraceError: no such file, no request in it, or an unknown format.
    """
    path = Path(path)
    first = next(rows(path), None)
    if first is None:
        raise TraceError(f"{path}: no requests in it")
    row = first[1]
    if "kvassay_requests" in row.data:
        size, rounding = _header(row)
        opened = RequestFile(path, "kvassay", size, rounding, partial(_plain, path, size, rounding))
    elif "hash_id_scope" in row.data:
        size = row.count("block_size", 1)
        opened = RequestFile(path, "agentic", size, "floor", partial(_agentic, path, size))
    elif "input_length" in row.data:
        size = block_size or MOONCAKE_BLOCK
        return RequestFile(path, "mooncake", size, "ceil", partial(_mooncake, path, size))
    else:
        raise TraceError(
            f"{row.where}: no known request trace: a Mooncake line has 'input_length', an agentic one 'hash_id_scope', "
            "the first line of a kvassay file 'kvassay_requests'"
        )
    if block_size not in (None, opened.block_size):
        raise TraceError(f"{row.where}: key 'block_size': the file says {opened.block_size}, not {block_size}")
    return opened


def _mooncake(path: Path, size: int) -> Iterator[Request]:
    chains, order = Chains(), _Order()
    for number, row in rows(path):
        arrival = order.next(row, "timestamp") / 1000
        tokens, output = row.count("input_length", 1), row.count("output_length")
        blocks = _blocks(row, "hash_ids", chains, tokens, size, "ceil")
        yield Request(str(number), arrival, tokens, output, blocks)


def _agentic(path: Path, size: int) -> Iterator[Request]:
    """Sessions one after the other; within one, requests by time, sub-agents beside their parent."""
    chains = Chains()
    for number, row in rows(path):
        if row.count("block_size", 1) != size:
            raise row.fail("block_size", f"{row.data['block_size']}, but the first line has {size}")
        if row.get("hash_id_scope") != "local":
            raise row.fail("hash_id_scope", f"{row.data['hash_id_scope']!r}, only 'local' is known")
        chains.start_scope()
        session = row.text("id")
        found = [
            (start + one.seconds("t"), place, one)
            for start, place, one in _flat(row, row.items("requests"), "requests", 0.0)
        ]
        for arrival, place, one in sorted(found, key=lambda item: item[0]):
            tokens, output = one.count("in", 1), one.count("out")
            blocks = _blocks(one, "hash_ids", chains, tokens, size, "floor")
            yield Request(f"{number}: {place}", arrival, tokens, output, blocks, session)


def _flat(row: Row, entries: list[object], place: str, start: float) -> Iterator[tuple[float, str, Row]]:
    """(start of its agent, place, object) of every request, sub-agents' included."""
    for ordinal, entry in enumerate(entries):
        here = f"{place}[{ordinal}]"
        one = row.inner(here, entry)
        if one.get("type") == "subagent":
            yield from _flat(row, one.items("requests"), f"{here}.requests", start + one.seconds("t"))
        else:
            yield start, here, one


def _plain(path: Path, size: int, rounding: Rounding) -> Iterator[Request]:
    chains, order = Chains(), _Order()
    lines = rows(path)
    next(lines)
    for number, row in lines:
        row.only("name", "arrival", "input_tokens", "output_tokens", "blocks", "session")
        arrival = order.next(row, "arrival")
        tokens, output = row.count("input_tokens", 1), row.count("output_tokens")
        blocks = _blocks(row, "blocks", chains, tokens, size, rounding) if "blocks" in row.data else None
        name = row.text("name") if "name" in row.data else str(number)
        yield Request(name, arrival, tokens, output, blocks, row.text("session") if "session" in row.data else None)


def _header(row: Row) -> tuple[int, Rounding]:
    row.only("kvassay_requests", "block_size", "rounding")
    if row.get("kvassay_requests") != VERSION:
        raise row.fail("kvassay_requests", f"version {row.data['kvassay_requests']!r}, this kvassay reads {VERSION}")
    rounding = row.get("rounding")
    if rounding not in ROUNDINGS:
        raise row.fail("rounding", f"{rounding!r}, allowed are 'ceil' and 'floor'")
    return row.count("block_size", 1), rounding


def _blocks(row: Row, key: str, chains: Chains, tokens: int, size: int, rounding: Rounding) -> tuple[int, ...]:
    ids = row.items(key)
    expected = blocks_expected(tokens, size, rounding)
    if len(ids) != expected:
        raise row.fail(key, f"{len(ids)} ids for {tokens} tokens, {rounding}({tokens} / {size}) = {expected} expected")
    try:
        return chains.numbers(ids)
    except ValueError as error:
        raise row.fail(key, str(error)) from None


class _Order:
    """Arrivals must not go back in time."""

    def __init__(self) -> None:
        self._last = 0.0

    def next(self, row: Row, key: str) -> float:
        now = row.seconds(key)
        if now < self._last:
            raise row.fail(key, f"{now:g} is earlier than {self._last:g} in the request before")
        self._last = now
        return now
