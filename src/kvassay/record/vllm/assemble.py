"""A trace from a capture: one context and its continuations, their rows brought together from the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvassay.record.load import ModelFiles, ModelIdentity
from kvassay.record.options import StoredDtype, model_record
from kvassay.record.vllm.capture import Capture, Head
from kvassay.record.vllm.sequences import Conversation, Place, Sequences, runs
from kvassay.record.vllm.subset import part_of
from kvassay.record.vllm.tables import recorded_tables
from kvassay.trace.reader import Trace
from kvassay.trace.schema import (
    PREFIX,
    BranchEntry,
    LogitsSpec,
    PrefixEntry,
    Recipe,
    Sampling,
    Subset,
    Tap,
    TraceHeader,
    Versions,
    branch_name,
)
from kvassay.trace.writer import SegmentWriter, TraceWriter

LOGITS = ("logits.values", "logits.ids", "logits.logsumexp")


@dataclass(frozen=True)
class Account:
    """What a capture cannot know of itself: the model, the text, and how the answers came to be."""

    files: ModelFiles
    identity: ModelIdentity
    recipe: Recipe
    sampling: Sampling
    entries: tuple[BranchEntry, ...]
    """Of the conversation's branches, in order."""


def assemble(
    capture: Capture,
    sequences: Sequences,
    conversation: Conversation,
    account: Account,
    out: str | Path,
    *,
    dtype: StoredDtype | None = None,
    overwrite: bool = False,
) -> Trace:
    """Write the trace of a conversation to the new folder `out` and open it.

    `dtype` is that of stored rows, the engine's own unless given. `RecordError` if a row was not captured or the
    block tables contradict what was written; `TraceError` if the folder cannot be written.
    """
    head, requests = capture.head, sequences.requests
    context = requests[conversation.context or conversation.branches[0]]
    parts = {PREFIX: (context, 0, conversation.tokens)}
    for index, name in enumerate(conversation.branches):
        parts[branch_name(index)] = (requests[name], conversation.tokens, len(requests[name].tokens))
    segments = {} if conversation.context is None else {conversation.context: PREFIX}
    segments |= {name: branch_name(index) for index, name in enumerate(conversation.branches)}
    header = _header(head, conversation, account, dtype or head.dtype)
    with TraceWriter(out, header, overwrite=overwrite) as writer:
        for name, (request, first, end) in parts.items():
            places = sequences.places(request, first, end)
            writer.segment(name).append_tokens(request.tokens[first:end])
            _Filling(capture, header, writer.segment(name), places, first).run()
        if head.sinks:
            writer.set_sinks({i: head.sinks[layer] for i, layer in enumerate(head.layers) if layer in head.sinks})
        tokens = {name: len(requests[name].tokens) for name in segments}
        writer.add_overlay(*recorded_tables(capture, segments, tokens))
    return Trace.open(out)


def _header(head: Head, conversation: Conversation, account: Account, dtype: StoredDtype) -> TraceHeader:
    whole = account.files.layout
    layout = part_of(whole, head.layers, head.kv_heads)
    q_from = min(head.q_from, conversation.tokens)
    has_logits = head.logits_k > 0 and head.logits_from <= conversation.tokens
    return TraceHeader(
        layout=layout,
        model=model_record(account.identity),
        recipe=account.recipe,
        sampling=account.sampling,
        versions=Versions.current(vllm=head.vllm),
        dtype=dtype,
        prefill_chunk=head.prefill_chunk,
        attention="vllm",
        subset=None if layout == whole else Subset(layers=head.layers, kv_heads=head.kv_heads),
        q_from=q_from,
        taps=tuple(Tap(kind="output", layer=layer.index, first=q_from) for layer in layout.layers if head.output),
        logits=LogitsSpec(kind="topk", k=head.logits_k) if has_logits else None,
        created=datetime.now(UTC),
        prefix=PrefixEntry(tokens=conversation.tokens),
        branches=account.entries,
    )


class _Filling:
    """One segment being filled, from the places of its tokens; `first` is the position of the first."""

    def __init__(
        self, capture: Capture, header: TraceHeader, segment: SegmentWriter, places: Sequence[Place], first: int
    ) -> None:
        self.capture, self.header, self.segment, self.places = capture, header, segment, places
        self.with_q = places[max(header.q_from - first, 0) :]

    def run(self) -> None:
        """Copy every tensor, layer by layer."""
        rows, q_rows = runs(self.places, "row"), runs(self.with_q, "q_row")
        for layer, true_index in zip(self.header.layout.layers, self.capture.head.layers, strict=True):
            for name in () if layer.cache_of is not None else ("k", "v"):
                for run in rows:
                    self.segment.append(layer.index, name, self.capture.rows(run, f"{true_index}.{name}"))
            for run in q_rows:
                self.segment.append(layer.index, "q", self.capture.rows(run, f"{true_index}.q"))
                if self.header.taps:
                    tap = self.header.taps[layer.index].name
                    self.segment.append_tap(tap, self.capture.rows(run, f"{true_index}.output"))
        if self.header.logits is not None and self.segment.name != PREFIX:
            for run in runs(self.places, "logit_row"):
                self.segment.append_top_logits(*(self.capture.rows(run, name) for name in LOGITS))
