"""Block tables laid over a trace: which slot each position had, for one block size, apart from K and V.

An overlay is `blocks/<name>.json` (tables) and `blocks/<name>.events.parquet` (how they came about), tied to
its trace by the sha256 of `trace.json`. The recorder stores what an engine did as `recorded`; `reblock` adds
another for any block size without touching a tensor. Overlays are plain data: no pool, no ledger.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from kvassay.errors import TraceError, did_you_mean
from kvassay.layout.groups import paged_part, plan_groups
from kvassay.trace.events import NULL_BLOCK, Event, EventKind, read_events, replay, write_events
from kvassay.trace.files import os_errors, sha256_file, sync
from kvassay.trace.schema import PREFIX, Record, Sha256, TraceHeader, explain
from kvassay.trace.shapes import segment_start

FOLDER = "blocks"
RECORDED = "recorded"
"""Name of the overlay the recorder stores."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class GroupTable(Record):
    """One KV cache group of the overlay."""

    index: int = Field(ge=0)
    """Its index."""
    layers: tuple[int, ...] = Field(min_length=1)
    """Layers that use its tables."""
    block_size: int = Field(ge=1)
    """Tokens per block."""
    window: int | None = Field(default=None, ge=1)
    """Visible tokens, the query's own included, if the group is windowed: only then may a table hold nulls."""


class RequestTables(Record):
    """One sequence: the prefix, or the prefix followed by a branch."""

    segment: str
    """`prefix` or `branch_000`, ...: the sequence ends with this segment."""
    tokens: int = Field(ge=1)
    """Its tokens, the prefix included."""
    tables: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    """Per group, in the overlay's order: the block id of each ordinal; 0 is the null block."""


class Overlay(Record):
    """Block tables for a whole trace at one set of block sizes."""

    schema_version: Literal[1] = 1
    """Version of this file's schema."""
    name: Name
    """File name without its ending."""
    source: Literal["recorded", "reblocked"]
    """Whether an engine or pool really did this, or it was computed afterwards."""
    num_blocks: int = Field(ge=1)
    """Blocks of the pool, the null block included: ids are below it."""
    groups: tuple[GroupTable, ...] = Field(min_length=1)
    """KV cache groups; they share one pool, so a block belongs to one group at a time."""
    requests: tuple[RequestTables, ...] = Field(min_length=1)
    """Sequences."""
    trace_sha256: Sha256 | None = None
    """sha256 of the `trace.json` it belongs to; filled in when stored."""
    events_sha256: Sha256 | None = None
    """sha256 of the event log beside it; None if there is none."""

    @property
    def block_sizes(self) -> dict[int, int]:
        """Block size by group index."""
        return {group.index: group.block_size for group in self.groups}


def overlay_names(root: Path) -> tuple[str, ...]:
    """Names of the overlays stored in a trace folder, sorted."""
    return tuple(sorted(path.stem for path in (root / FOLDER).glob("*.json")))


def save_overlay(
    root: Path,
    overlay: Overlay,
    events: Sequence[Event],
    header: TraceHeader,
    trace_sha256: str,
    *,
    overwrite: bool = False,
) -> Path:
    """Check an overlay and store it under `root`; the table file appears last, whole, or not at all."""
    path = root / FOLDER / f"{overlay.name}.json"
    if path.exists() and not overwrite:
        raise TraceError(f"{path}: exists already; --overwrite (overwrite=True) replaces it")
    check_overlay(overlay, header, events)
    log = path.with_suffix(".events.parquet")
    with os_errors(path, "write"):
        path.parent.mkdir(exist_ok=True)
        update: dict[str, Any] = {"trace_sha256": trace_sha256, "events_sha256": None}
        if events:
            _replace_file(log, lambda partial: write_events(partial, events))
            update["events_sha256"] = sha256_file(log)
        text = overlay.model_copy(update=update).model_dump_json(indent=1) + "\n"
        _replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        sync(path.parent)
    return path


def _replace_file(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        write(partial)
        sync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_overlay(root: Path, name: str, trace_sha256: str) -> tuple[Overlay, tuple[Event, ...]]:
    """Read an overlay and its events (none: empty); TraceError if it is damaged or of another trace."""
    path = root / FOLDER / f"{name}.json"
    if name not in overlay_names(root):
        raise TraceError(f"{root}: no block tables '{name}'{did_you_mean(name, overlay_names(root))}")
    with os_errors(path, "read"):
        text = path.read_bytes()
    try:
        overlay = Overlay.model_validate_json(text)
    except ValidationError as error:
        raise TraceError(f"{path}: {explain(error, Overlay)}") from error
    if overlay.name != name:
        raise TraceError(f"{path}: calls itself '{overlay.name}'")
    if overlay.trace_sha256 != trace_sha256:
        raise TraceError(f"{path}: belongs to another trace ({overlay.trace_sha256}, this one is {trace_sha256})")
    if overlay.events_sha256 is None:
        return overlay, ()
    log = path.with_suffix(".events.parquet")
    with os_errors(log, "read"):
        found = sha256_file(log)
    if found != overlay.events_sha256:
        raise TraceError(f"{log}: sha256 is {found}, {path.name} says {overlay.events_sha256}")
    return overlay, read_events(log)


def check_overlay(overlay: Overlay, header: TraceHeader, events: Sequence[Event] = ()) -> int:
    """Prove that every position of every sequence maps to exactly one slot; returns how many slots are in use.

    A slot may be shared only by sequences that have the same token at the same position (the prefix). Null blocks
    are allowed where the window has wholly passed. With an event log its replay must be consistent and end in
    these tables; sequences the log has freed need not be disjoint from later ones. TraceError says the first fault.
    """
    _check_groups(overlay, header)
    freed: set[str] = set()
    if events:
        tables = replay(events, overlay.block_sizes)
        freed = set(tables.freed)
        for request in overlay.requests:
            _check_replayed(overlay, request, tables.of(request.segment), tables.tokens.get(request.segment, 0))
    live = [request for request in overlay.requests if request.segment not in freed]
    used = _check_slots(overlay, header, live)
    return used + sum(_check_slots(overlay, header, [r]) for r in overlay.requests if r.segment in freed)


def _check_groups(overlay: Overlay, header: TraceHeader) -> None:
    listed = [layer for group in overlay.groups for layer in group.layers]
    owners = {layer.index for layer in header.layout.layers if layer.cache_of is None}
    twice = sorted({layer for layer in listed if listed.count(layer) > 1})
    if twice or not owners <= set(listed) or set(listed) - set(range(len(header.layout.layers))):
        raise TraceError(
            f"overlay '{overlay.name}': groups list layers {sorted(listed)}; each layer with a cache belongs to one"
        )
    if len(overlay.block_sizes) != len(overlay.groups):
        raise TraceError(f"overlay '{overlay.name}': two groups have the same index")
    names = [request.segment for request in overlay.requests]
    if len(set(names)) != len(names):
        raise TraceError(f"overlay '{overlay.name}': a sequence is listed twice: {', '.join(names)}")
    for request in overlay.requests:
        if request.segment not in header.segment_names:
            known = did_you_mean(request.segment, header.segment_names)
            raise TraceError(f"overlay '{overlay.name}': the trace has no segment '{request.segment}'{known}")
        tokens = segment_start(header, request.segment) + header.segment_tokens(request.segment)
        if request.tokens != tokens or len(request.tables) != len(overlay.groups):
            raise TraceError(
                f"overlay '{overlay.name}': {request.segment} has {request.tokens} tokens in {len(request.tables)} "
                f"tables; the trace has {tokens} tokens, the overlay {len(overlay.groups)} groups"
            )


def _check_replayed(overlay: Overlay, request: RequestTables, tables: Mapping[int, list[int]], tokens: int) -> None:
    if tokens != request.tokens:
        raise TraceError(
            f"overlay '{overlay.name}': {request.segment} has {request.tokens} tokens, its events give {tokens}"
        )
    for group, table in zip(overlay.groups, request.tables, strict=True):
        if tables.get(group.index, []) != list(table):
            raise TraceError(
                f"overlay '{overlay.name}': table of {request.segment}, group {group.index} is not what its events give"
            )


def _check_slots(overlay: Overlay, header: TraceHeader, requests: Sequence[RequestTables]) -> int:
    used = 0
    group_of: dict[int, int] = {}
    for at, group in enumerate(overlay.groups):
        pairs = [_slots(overlay, header, request, at) for request in requests]
        slots = np.concatenate([pair[0] for pair in pairs]) if pairs else np.empty(0, np.int64)
        contents = np.concatenate([pair[1] for pair in pairs]) if pairs else np.empty(0, np.int64)
        distinct = np.unique(np.stack([slots, contents]), axis=1)
        repeated = np.nonzero(np.diff(distinct[0]) == 0)[0]
        if repeated.size:
            slot = int(distinct[0, repeated[0]])
            raise TraceError(f"overlay '{overlay.name}': group {group.index}, slot {slot} holds two different tokens")
        for block in np.unique(distinct[0] // group.block_size).tolist():
            other = group_of.setdefault(block, group.index)
            if other != group.index:
                raise TraceError(f"overlay '{overlay.name}': block {block} is in groups {other} and {group.index}")
        used += distinct.shape[1]
    return used


def _slots(
    overlay: Overlay, header: TraceHeader, request: RequestTables, at: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Slot and content identity of each live position of one sequence in one group."""
    group, where = overlay.groups[at], f"overlay '{overlay.name}': {request.segment}, group {overlay.groups[at].index}"
    table = np.asarray(request.tables[at], dtype=np.int64)
    needed = -(-request.tokens // group.block_size)
    if len(table) < needed:
        raise TraceError(f"{where}: {len(table)} blocks of {group.block_size} for {request.tokens} tokens")
    if len(table) and table.max() >= overlay.num_blocks:
        raise TraceError(f"{where}: block {table.max()} in a pool of {overlay.num_blocks}")
    positions = np.arange(request.tokens, dtype=np.int64)
    blocks = table[positions // group.block_size]
    live = blocks != NULL_BLOCK
    # The next query, at position `tokens`, sees positions above tokens - window.
    visible = positions > request.tokens - group.window if group.window else np.ones_like(live)
    if lost := int((visible & ~live).sum()):
        raise TraceError(f"{where}: {lost} visible positions lie in the null block")
    start = segment_start(header, request.segment)
    branch = header.segment_names.index(request.segment)
    contents = positions + np.where(positions < start, 0, branch << 32)
    slots = blocks * group.block_size + positions % group.block_size
    return slots[live], contents[live]


def reblock(header: TraceHeader, block_size: int, name: str | None = None) -> tuple[Overlay, tuple[Event, ...]]:
    """Plain contiguous tables for another block size, with the events that make them.

    The prefix fills blocks 1, 2, ... group by group; each branch forks it: full blocks by reference, the partial
    one by copy, then blocks of its own. Nothing is dropped, windowed groups included. K and V are not touched.
    """
    if block_size < 1:
        raise TraceError(f"block size {block_size}: at least 1")
    groups = tuple(
        GroupTable(index=g.index, layers=g.layers, block_size=g.block_size, window=g.window)
        for g in plan_groups(paged_part(header.layout), block_size)
    )
    events = tuple(_contiguous(header, groups))
    tables = replay(events, {group.index: group.block_size for group in groups})
    requests = tuple(
        RequestTables(
            segment=segment,
            tokens=tables.tokens[segment],
            tables=tuple(tuple(tables.of(segment)[group.index]) for group in groups),
        )
        for segment in header.segment_names
    )
    try:
        overlay = Overlay(
            name=name or f"block_{block_size}",
            source="reblocked",
            num_blocks=1 + max(tables.owners),
            groups=groups,
            requests=requests,
        )
    except ValidationError as error:
        raise TraceError(f"block tables '{name}': {explain(error, Overlay)}") from error
    return overlay, events


def _contiguous(header: TraceHeader, groups: Sequence[GroupTable]) -> Iterator[Event]:
    prefix: dict[int, list[int]] = {}
    fresh = 1
    for step, segment in enumerate(header.segment_names):
        shared = segment_start(header, segment)
        tokens = shared + header.segment_tokens(segment)
        yield Event(step, EventKind.STEP, value=header.segment_tokens(segment))
        for group in groups:
            size, g = group.block_size, group.index
            have = -(-shared // size)
            for ordinal in range(have):
                yield Event(step, EventKind.ALLOC, segment, g, prefix[g][ordinal], ordinal, 1)
            if shared % size:
                yield Event(step, EventKind.COPY, segment, g, fresh, have - 1, prefix[g][have - 1])
                fresh += 1
            count = -(-tokens // size) - have
            own = range(fresh, fresh + count)
            fresh += count
            for ordinal, block in enumerate(own, start=have):
                yield Event(step, EventKind.ALLOC, segment, g, block, ordinal, 0)
            if segment == PREFIX:
                prefix[g] = list(own)
        if shared:
            yield Event(step, EventKind.HIT, segment, value=shared)
        yield Event(step, EventKind.APPEND, segment, value=header.segment_tokens(segment))
