"""The event log of block tables: what the pool did, by scheduler step, and a replay that proves it makes sense.

Stored as parquet with one row per event, in order. Plain data: nothing here allocates a block; the recorder
(or `blocks.reblock`) writes down what happened and `replay` recomputes the tables from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvassay.errors import TraceError

NULL_BLOCK = 0
"""The block id that means "no block here" in a table, as vLLM's pool has it."""


class EventKind(StrEnum):
    """What happened; which fields an event of the kind fills is said at each."""

    STEP = "step"
    """A scheduler step begins; `value` tokens are scheduled."""
    ALLOC = "alloc"
    """`request` in `group` gets `block` at `ordinal`; value 0 = fresh, 1 = a block that holds shared content."""
    HIT = "hit"
    """`request` adopts the first `value` tokens from the shared blocks it was just given (prefix hit, fork)."""
    APPEND = "append"
    """`request` writes `value` new tokens into its blocks, in every group."""
    NULL = "null"
    """`request` in `group` drops `block` at `ordinal`; the null block stands there now."""
    FREE = "free"
    """`request` is done; in `group` it drops `block` at `ordinal`. Its table before that is what is kept."""
    EVICT = "evict"
    """A cached `block` that nobody references loses its content (its hash)."""
    COPY = "copy"
    """Copy on write: at `ordinal` in `group`, `block` replaces the block `value`, whose content it takes."""
    GENERATION = "generation"
    """`block` is reused and now has generation `value`."""


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the log."""

    step: int
    kind: EventKind
    request: str | None = None
    group: int | None = None
    block: int | None = None
    ordinal: int | None = None
    value: int | None = None


SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("request", pa.string()),
        pa.field("group", pa.int32()),
        pa.field("block", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("value", pa.int64()),
    ]
)


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write a log as parquet; OSError passes through."""
    rows = [astuple(event) for event in events]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), path, compression="zstd")


def read_events(path: Path) -> tuple[Event, ...]:
    """Read a log; TraceError if it is not one."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a readable event log: {str(error).splitlines()[0]}") from error
    if not table.schema.equals(SCHEMA):
        raise TraceError(f"{path}: columns {table.schema.names} are not those of an event log {SCHEMA.names}")
    columns = [column.to_pylist() for column in table.columns]
    events: list[Event] = []
    for step, kind, *rest in zip(*columns, strict=True):
        if kind not in set(EventKind):
            allowed = ", ".join(EventKind)
            raise TraceError(f"{path}: row {len(events)}: unknown event '{kind}' (allowed: {allowed})")
        events.append(Event(step, EventKind(kind), *rest))
    return tuple(events)


@dataclass
class Tables:
    """Block tables at the end of a log."""

    block_sizes: Mapping[int, int]
    """Block size by group."""
    live: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """Request -> group -> block ids, for requests that still hold their blocks."""
    freed: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """The same for requests that are done: their tables just before their first `free`."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Request -> tokens in its tables."""
    owners: dict[int, int] = field(default_factory=dict)
    """Block id -> number of tables that hold it."""
    generations: dict[int, int] = field(default_factory=dict)
    """Block id -> last generation logged."""

    def of(self, request: str) -> dict[int, list[int]]:
        """A request's tables by group, as of its last token; empty if the log never names it."""
        return self.freed.get(request) or self.live.get(request, {})


def replay(events: Iterable[Event], block_sizes: Mapping[int, int]) -> Tables:
    """Recompute the tables from a log.

    TraceError with the event's number if a step goes backwards, a fresh block is still referenced, an ordinal
    is not where the table ends or does not hold the block named, tokens are written beyond the table, into a
    null or shared block, or a generation does not grow.
    """
    tables = Tables(block_sizes)
    last_step = 0
    for number, event in enumerate(events):
        try:
            if event.step < last_step:
                raise TraceError(f"step {event.step} after step {last_step}")
            last_step = event.step
            _apply(tables, event)
        except TraceError as error:
            raise TraceError(f"event {number} ({event.kind}, step {event.step}): {error}") from error
    return tables


def _apply(tables: Tables, event: Event) -> None:
    match event.kind:
        case EventKind.ALLOC:
            _alloc(tables, event)
        case EventKind.HIT:
            _grow(tables, event, write=False)
        case EventKind.APPEND:
            _grow(tables, event, write=True)
        case EventKind.NULL | EventKind.FREE | EventKind.COPY:
            _replace(tables, event)
        case EventKind.GENERATION:
            block, value = _need(event, "block"), _need(event, "value")
            last = tables.generations.get(block, -1)
            if value <= last:
                raise TraceError(f"block {block} goes from generation {last} to {value}")
            tables.generations[block] = value
        case EventKind.EVICT:
            block = _need(event, "block")
            if tables.owners.get(block, 0):
                raise TraceError(f"block {block} is evicted while {tables.owners[block]} tables hold it")
        case EventKind.STEP:
            _need(event, "value")


def _need(event: Event, name: str) -> int:
    value: int | None = getattr(event, name)
    if value is None:
        raise TraceError(f"'{name}' is missing")
    return value


def _table(tables: Tables, event: Event) -> list[int]:
    group = _need(event, "group")
    if event.request is None or group not in tables.block_sizes:
        raise TraceError(f"request {event.request!r}, group {group}: no such table")
    return tables.live.setdefault(event.request, {}).setdefault(group, [])


def _alloc(tables: Tables, event: Event) -> None:
    table, block, fresh = _table(tables, event), _need(event, "block"), not _need(event, "value")
    if event.ordinal != len(table):
        raise TraceError(f"ordinal {event.ordinal}, but the table has {len(table)} blocks")
    _take(tables, block, fresh=fresh)
    table.append(block)


def _take(tables: Tables, block: int, *, fresh: bool) -> None:
    if block == NULL_BLOCK and fresh:
        raise TraceError("the null block cannot be allocated")
    if fresh and tables.owners.get(block, 0):
        raise TraceError(f"block {block} is given out fresh while {tables.owners[block]} tables hold it")
    if block != NULL_BLOCK:
        tables.owners[block] = tables.owners.get(block, 0) + 1


def _replace(tables: Tables, event: Event) -> None:
    table, block, ordinal = _table(tables, event), _need(event, "block"), _need(event, "ordinal")
    old = _need(event, "value") if event.kind is EventKind.COPY else block
    if not 0 <= ordinal < len(table) or table[ordinal] != old:
        held = table[ordinal] if 0 <= ordinal < len(table) else "nothing"
        raise TraceError(f"ordinal {ordinal} of {event.request} holds {held}, not block {old}")
    if event.kind is EventKind.FREE and event.request is not None and event.request not in tables.freed:
        tables.freed[event.request] = {g: list(ids) for g, ids in tables.live[event.request].items()}
    if event.kind is EventKind.COPY:
        _take(tables, block, fresh=True)
    table[ordinal] = block if event.kind is EventKind.COPY else NULL_BLOCK
    if old != NULL_BLOCK:
        tables.owners[old] -= 1


def _grow(tables: Tables, event: Event, *, write: bool) -> None:
    if event.request is None:
        raise TraceError("'request' is missing")
    old, more = tables.tokens.get(event.request, 0), _need(event, "value")
    if more < 0 or (not write and old):
        raise TraceError(f"{event.request} has {old} tokens and cannot take {more} this way")
    for group, size in tables.block_sizes.items():
        table = tables.live.get(event.request, {}).get(group, [])
        if old + more > len(table) * size:
            raise TraceError(f"{event.request}: {old + more} tokens in group {group}'s {len(table)} blocks of {size}")
        if write and more:
            _check_writable(tables, table[old // size : (old + more - 1) // size + 1])
    tables.tokens[event.request] = old + more


def _check_writable(tables: Tables, blocks: Sequence[int]) -> None:
    for block in blocks:
        if block == NULL_BLOCK or tables.owners[block] != 1:
            raise TraceError(f"block {block} is written while {tables.owners.get(block, 0)} tables hold it")
