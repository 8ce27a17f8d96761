"""The block tables that vLLM's manager really had, and the log of how they came about, for one trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from kvassay.errors import RecordError
from kvassay.record.vllm.capture import Capture, CapturedGroup, Run, Step, Tables
from kvassay.trace.blocks import RECORDED, GroupTable, Overlay, RequestTables
from kvassay.trace.events import NULL_BLOCK, Event, EventKind


def recorded_tables(
    capture: Capture, segments: Mapping[str, str], tokens: Mapping[str, int]
) -> tuple[Overlay, tuple[Event, ...]]:
    """The overlay and events of the requests in `segments` (request -> segment), which have `tokens` each.

    Groups of which no layer was captured are left out; layers are numbered as in the trace. A step's event says how
    many tokens it computed in all, other requests' included. vLLM has no generations: a block's are counted here,
    over this trace's requests. `RecordError` if a row was written elsewhere than its table says.
    """
    number = {layer: i for i, layer in enumerate(capture.head.layers)}
    kept = [g for g, group in enumerate(capture.head.groups) if number.keys() & set(group.layers)]
    check_slots(capture, kept)
    log = _Log([capture.head.groups[g] for g in kept], kept, segments)
    events = tuple(event for step in capture.steps for event in log.step(step))
    overlay = Overlay(
        name=RECORDED,
        source="recorded",
        num_blocks=capture.head.num_blocks,
        groups=tuple(
            GroupTable(
                index=i,
                layers=tuple(number[layer] for layer in capture.head.groups[g].layers if layer in number),
                block_size=capture.head.groups[g].block_size,
                window=capture.head.groups[g].window,
            )
            for i, g in enumerate(kept)
        ),
        requests=tuple(
            RequestTables(segment=segment, tokens=tokens[request], tables=log.tables[request])
            for request, segment in segments.items()
        ),
    )
    return overlay, events


class _Log:
    """Tables under way; `kept` are the engine's numbers of the groups."""

    def __init__(self, groups: Sequence[CapturedGroup], kept: Sequence[int], segments: Mapping[str, str]) -> None:
        self.groups, self.kept, self.segments = groups, kept, segments
        self.tables: dict[str, Tables] = {}
        self.given: Counter[int] = Counter()

    def step(self, step: Step) -> Iterator[Event]:
        """A step's events: what is let go of comes before what is given."""
        mine = [name for name in step.tables if name in self.segments]
        gone = [name for name in step.finished if name in self.tables]
        if not mine and not gone:
            return
        yield Event(step.step, EventKind.STEP, value=sum(len(ran.ids) for ran in step.ran))
        for name in gone:
            yield from self._free(step.step, name)
        new = {name: tuple(step.tables[name][g] for g in self.kept) for name in mine}
        for name in mine:
            yield from self._nulls(step.step, name, new[name])
        counts = {ran.id: len(ran.ids) for ran in step.ran}
        hits = {arrived.id: arrived.hit for arrived in step.arrived}
        for name in mine:
            yield from self._given(step.step, name, new[name], hits.get(name, 0))
            yield Event(step.step, EventKind.APPEND, self.segments[name], value=counts[name])
            self.tables[name] = new[name]

    def _free(self, step: int, name: str) -> Iterator[Event]:
        for group, table in enumerate(self.tables[name]):
            for ordinal, block in enumerate(table):
                if block != NULL_BLOCK:
                    yield Event(step, EventKind.FREE, self.segments[name], group, block, ordinal)

    def _nulls(self, step: int, name: str, new: Tables) -> Iterator[Event]:
        for group, table in enumerate(self.tables.get(name, ())):
            for ordinal, (was, block) in enumerate(zip(table, new[group], strict=False)):
                if was != block and block != NULL_BLOCK:
                    raise RecordError(f"step {step}: block {was} of {name} became block {block}, which no event tells")
                if was != block:
                    yield Event(step, EventKind.NULL, self.segments[name], group, was, ordinal)

    def _given(self, step: int, name: str, new: Tables, hit: int) -> Iterator[Event]:
        segment = self.segments[name]
        for group, table in enumerate(new):
            held = len(self.tables[name][group]) if name in self.tables else 0
            shared = hit // self.groups[group].block_size
            for ordinal, block in enumerate(table[held:], start=held):
                fresh = ordinal >= shared and block != NULL_BLOCK
                self.given[block] += fresh
                if fresh and self.given[block] > 1:
                    yield Event(step, EventKind.GENERATION, block=block, value=self.given[block])
                yield Event(step, EventKind.ALLOC, segment, group, block, ordinal, int(not fresh))
        if hit:
            yield Event(step, EventKind.HIT, segment, value=hit)


def check_slots(capture: Capture, groups: Sequence[int]) -> None:
    """`RecordError` unless every row was written to the slot that the manager's tables give its position."""
    for step in capture.steps:
        for group in groups:
            size = capture.head.groups[group].block_size
            wanted = []
            for ran in step.ran:
                table = step.tables[ran.id][group]
                positions = range(ran.first, ran.first + len(ran.ids))
                wanted += [table[position // size] * size + position % size for position in positions]
            found = capture.rows(Run(step.step, 0, len(wanted)), f"slots.{group}")
            if not torch.equal(found, torch.tensor(wanted)):
                at = int((found != torch.tensor(wanted)).nonzero()[0])
                raise RecordError(
                    f"step {step.step}, group {group}: row {at} was written to slot {int(found[at])}, "
                    f"its block table says {wanted[at]}"
                )
