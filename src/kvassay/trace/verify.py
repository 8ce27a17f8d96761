"""Full verification of a trace: hashes, finite values, token ids, block tables. Reads every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvassay.errors import TraceError
from kvassay.trace.blocks import FOLDER, check_overlay
from kvassay.trace.buckets import bucket_visible
from kvassay.trace.files import sha256_file
from kvassay.trace.reader import Trace
from kvassay.trace.schema import HEADER_FILE
from kvassay.trace.shapes import owner, segment_start

CHUNK_ELEMENTS = 1 << 22
"""Elements looked at together when searching for values that are not finite."""

Advance = Callable[[int], None]
Proof = Callable[[Trace], Iterable[str]]
"""Yields one line per fault, each naming its file."""


@dataclass
class Report:
    """Outcome of `verify`."""

    path: Path
    shards: int = 0
    """Shards read."""
    bytes: int = 0
    """Bytes read."""
    overlays: tuple[str, ...] = ()
    """Block-table overlays checked."""
    slots: int = 0
    """Slots proved to hold one position each, over all overlays."""
    problems: list[str] = field(default_factory=list)
    """One line per fault, each naming its file; empty if the trace is sound."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.problems


def verify(path: str | Path, advance: Advance | None = None, proofs: Sequence[Proof] = ()) -> Report:
    """Check a trace to the last byte; `advance(bytes)` is called as shards are read.

    proofs: what more is to be shown of a trace whose shards are sound
    What `Trace.open` refuses is raised as TraceError; everything after that is collected in the report.
    """
    trace = Trace.open(path)
    report = Report(trace.path)
    for name, entry in trace.header.shards.items():
        found = sha256_file(trace.path / name, advance)
        report.shards, report.bytes = report.shards + 1, report.bytes + entry.bytes
        if found != entry.sha256:
            report.problems.append(f"{trace.path / name}: sha256 is {found}, {HEADER_FILE} says {entry.sha256}")
        report.problems.extend(f"{trace.path / name}: {fault}" for fault in _value_faults(trace, name))
    for proof in proofs if report.ok else ():
        report.problems.extend(proof(trace))
    _verify_overlays(trace, report)
    report.problems.extend(f"{path}: not part of the trace" for path in _strangers(trace))
    return report


def _value_faults(trace: Trace, shard: str) -> Iterator[str]:
    for name in trace.shapes[shard]:
        tensor = trace.tensor(shard, name)
        if name == "ids":
            low, high = int(tensor.min()), int(tensor.max())
            if low < 0 or high >= trace.layout.vocab_size:
                yield f"token ids {low} to {high} leave the vocabulary of {trace.layout.vocab_size}"
        elif count := _not_finite(_meant(trace, shard, tensor)):
            yield f"'{name}' has {count} of {tensor.numel()} values that are not finite"


def _meant(trace: Trace, shard: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values that must be finite: all, but of a bucket only the scores of keys that the query sees."""
    segment, file = shard.split("/")
    name = file.removesuffix(".safetensors").removeprefix("tap_")
    tap = next((tap for tap in trace.header.taps if tap.name == name), None)
    if tap is None or tap.size is None:
        return tensor
    first = max(segment_start(trace.header, segment), tap.first)
    layer = owner(trace.layout, trace.layer(tap.layer))
    seen = torch.from_numpy(bucket_visible(first, len(tensor), tap.size, layer.window))
    return tensor.transpose(0, 1)[:, seen].contiguous()


def _not_finite(tensor: torch.Tensor) -> int:
    flat = tensor.numpy().reshape(-1)
    chunks = (flat[at : at + CHUNK_ELEMENTS] for at in range(0, flat.size, CHUNK_ELEMENTS))
    return sum(chunk.size - int(np.isfinite(chunk).sum()) for chunk in chunks)


def _verify_overlays(trace: Trace, report: Report) -> None:
    for name in trace.overlays:
        try:
            overlay, events = trace.overlay(name)
            report.slots += check_overlay(overlay, trace.header, events)
        except TraceError as error:
            report.problems.append(str(error))
        report.overlays = (*report.overlays, name)


def _strangers(trace: Trace) -> list[Path]:
    known = {trace.path / HEADER_FILE, *(trace.path / name for name in trace.header.shards)}
    for name in trace.overlays:
        known |= {trace.path / FOLDER / f"{name}.json", trace.path / FOLDER / f"{name}.events.parquet"}
    return sorted(path for path in trace.path.rglob("*") if not path.is_dir() and path not in known)
