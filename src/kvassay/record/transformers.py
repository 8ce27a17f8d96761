"""The transformers recorder: one sample through one model, into one trace.

The context is prefilled in chunks through the base model (no logits are computed there), rows going to disk
chunk by chunk. Each branch then continues from a copy of the cache, teacher-forced, in chunks of the same
size. Batch 1, unpadded: some families anchor blocks to slots, and padding would shift them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvassay.errors import RecordError
from kvassay.record.blocks import block_tables
from kvassay.record.calling import cache_keyword, new_cache
from kvassay.record.capture import Capture, Rows, recording, refuse_unreplayable
from kvassay.record.entries import entry_taps
from kvassay.record.indexers import index_taps
from kvassay.record.load import LoadedModel
from kvassay.record.options import RecordOptions, bucket_size, make_header
from kvassay.record.quiet import quiet_transformers
from kvassay.record.taps import stream_taps
from kvassay.trace.reader import Trace
from kvassay.trace.schema import PREFIX, TraceHeader, branch_name
from kvassay.trace.shapes import LAYER_TENSORS
from kvassay.trace.writer import SegmentWriter, TraceWriter
from kvassay.workload.framing import frame
from kvassay.workload.sample import Sample

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) after each forward pass."""


def record_sample(
    loaded: LoadedModel,
    sample: Sample,
    out_dir: str | Path,
    options: RecordOptions | None = None,
    progress: Progress = lambda done, total: None,
    *,
    overwrite: bool = False,
) -> Trace:
    """Record `sample` under `loaded` into the new trace folder `out_dir`, and open it.

    Raises `RecordError` if the sample does not fit the model's native context, does not begin as the
    tokenizer begins every text, or the model has layers that this recorder cannot take; `TraceError` if the
    folder cannot be written. Nothing is left at `out_dir` unless the whole recording went well.
    """
    options = options or RecordOptions()
    refuse_unreplayable(loaded.layout)
    _check_sample(loaded, sample, options)
    header = make_header(loaded, sample, options)
    with TraceWriter(out_dir, header, overwrite=overwrite) as writer:
        _Recording(loaded, sample, header, writer, progress).run()
        writer.add_overlay(*block_tables(header))
    return Trace.open(out_dir)


class _Recording:
    """One recording under way."""

    def __init__(
        self,
        loaded: LoadedModel,
        sample: Sample,
        header: TraceHeader,
        writer: TraceWriter,
        progress: Progress,
    ) -> None:
        self.model, self.device = loaded.model, loaded.device
        self.sample, self.header, self.writer = sample, header, writer
        kinds: dict[int, set[str]] = {}
        for tap in header.taps:
            kinds.setdefault(tap.layer, set()).add(tap.kind)
        self.taps = {layer: frozenset(names) for layer, names in kinds.items()}
        self.capture = Capture(loaded.layout, getattr(torch, header.dtype), self.taps, bucket_size(header))
        self.progress = progress
        self.done = 0
        self.total = len(sample.context_ids) + sum(len(branch.token_ids) for branch in sample.branches)

    def run(self) -> None:
        """Prefill, then every branch."""
        with (
            quiet_transformers(),
            torch.inference_mode(),
            recording(self.model, self.capture),
            stream_taps(self.model, self.capture, self.taps),
            index_taps(self.model, self.capture.add_index),
            entry_taps(self.model, self.capture),
        ):
            cache = new_cache(self.model)
            self._segment(PREFIX, self.sample.context_ids, 0, cache, want_logits=False)
            for index, branch in enumerate(self.sample.branches):
                own = copy.deepcopy(cache)
                start = len(self.sample.context_ids)
                self._segment(branch_name(index), branch.token_ids, start, own, want_logits=True)
        if self.capture.sinks:
            self.writer.set_sinks({layer: logits.tolist() for layer, logits in self.capture.sinks.items()})

    def _segment(self, name: str, ids: Sequence[int], start: int, cache: Any, want_logits: bool) -> None:
        segment = self.writer.segment(name)
        segment.append_tokens(list(ids))
        for first, chunk in _chunks(ids, self.header.prefill_chunk):
            self.capture.begin(start + first, len(chunk), self.header.q_from, cache)
            logits = self._forward(chunk, cache, want_logits)
            self._write(segment, self.capture.finish())
            if logits is not None:
                segment.append_logits(logits.float().cpu())
            self.done += len(chunk)
            self.progress(self.done, self.total)

    def _forward(self, ids: Sequence[int], cache: Any, want_logits: bool) -> Tensor | None:
        """Run one chunk; return its logits [n, vocab] if wanted, else spare the head altogether.

        The head's `logits_to_keep` is left at 0 (all): any other value makes models with shared layers
        (Gemma 4) run those layers for the kept positions only.
        """
        module = self.model if want_logits else self.model.base_model
        tokens = torch.tensor([list(ids)], device=self.device)
        result = module(input_ids=tokens, use_cache=True, **{cache_keyword(module): cache})
        if not want_logits:
            return None
        logits: Tensor = result.logits[0]
        return logits

    def _write(self, segment: SegmentWriter, layers: dict[int, Rows]) -> None:
        for index, rows in layers.items():
            for name in LAYER_TENSORS:
                if name in rows and len(rows[name]):
                    segment.append(index, name, rows[name])
        for tap in self.header.taps:
            rows_of_tap = layers[tap.layer][tap.kind]
            if len(rows_of_tap):
                segment.append_tap(tap.name, rows_of_tap)


def _chunks(ids: Sequence[int], size: int) -> Iterator[tuple[int, Sequence[int]]]:
    for first in range(0, len(ids), size):
        yield first, ids[first : first + size]


def _check_sample(loaded: LoadedModel, sample: Sample, options: RecordOptions) -> None:
    context = len(sample.context_ids)
    longest = max(len(branch.token_ids) for branch in sample.branches)
    native = loaded.layout.native_context
    if context + longest > native and not options.allow_beyond_native:
        raise RecordError(
            f"{sample.workload}: {context} context + {longest} branch tokens exceed the native context of "
            f"{loaded.identity.name}, {native}; shorten the sample, or allow it (--beyond-native)"
        )
    opening = frame(loaded.tokenizer).prefix_ids if loaded.tokenizer is not None else ()
    if tuple(sample.context_ids[: len(opening)]) != opening:
        raise RecordError(
            f"{sample.workload}: the context begins with token {sample.context_ids[0]}, but the tokenizer of "
            f"{loaded.identity.name} begins every text with {list(opening)} and the model needs it"
        )
