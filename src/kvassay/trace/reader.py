"""Reading a trace: everything is checked before a tensor is handed out, and tensors are mapped, not loaded.

    trace = Trace.open(path)
    k = trace.prefix.k(3)                 # [tokens, kv_heads, k_dim]
    q = trace.branches[0].q(3)            # [tokens, q_heads, k_dim]

Mapped tensors are read from disk as they are touched; writing to one changes memory, never the file.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue, ValidationError

from kvassay.errors import EvidenceMissing, TraceError, did_you_mean
from kvassay.layout.model import Latent, Layer, Layout
from kvassay.trace.blocks import RECORDED, Overlay, load_overlay, overlay_names, save_overlay
from kvassay.trace.blocks import reblock as plan_overlay
from kvassay.trace.events import Event
from kvassay.trace.files import check_shard, map_shard, os_errors
from kvassay.trace.schema import HEADER_FILE, PREFIX, SCHEMA_VERSION, BranchEntry, TraceHeader, explain
from kvassay.trace.shapes import (
    CACHED,
    SELECTION,
    Shards,
    expected_shards,
    layer_shard,
    owner,
    segment_start,
    tap_shard,
)


class TopLogits(NamedTuple):
    """The largest logits of a branch's rows."""

    values: torch.Tensor
    """float32 [tokens, k], largest first."""
    ids: torch.Tensor
    """int32 [tokens, k]."""
    logsumexp: torch.Tensor
    """float32 [tokens], over the whole vocabulary: `values - logsumexp` are log probabilities."""


class Segment:
    """A run of tokens and what was recorded of them; row r of a tensor is position `start + r` (q, taps: see there)."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self.name = name
        self.start: int = segment_start(trace.header, name)
        """Position of the first token."""
        self.tokens: int = trace.header.segment_tokens(name)
        """Number of tokens."""

    @property
    def layout(self) -> Layout:
        """The recorded model's cache layout."""
        return self._trace.layout

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 [tokens]."""
        return self._trace.tensor(f"{self.name}/tokens.safetensors", "ids")

    def k(self, layer: int) -> torch.Tensor:
        """Keys as cached, after norm and RoPE, [tokens, kv_heads, k_dim]; of the owner if the layer has `cache_of`.

        Of a latent layer the whole cached vectors, one head.
        """
        return self.cache(layer, "latent" if self._latent(layer) else "k")

    def v(self, layer: int) -> torch.Tensor:
        """Values as cached, [tokens, kv_heads, v_dim]; of the owner if the layer has `cache_of`.

        Of a latent layer the beginning of its keys, a view.
        """
        latent = self._latent(layer)
        return self.cache(layer, "latent")[..., : latent.v_dim] if latent else self.cache(layer, "v")

    def _latent(self, layer: int) -> Latent | None:
        parts = owner(self._trace.layout, self._trace.layer(layer)).components
        return next((part.storage for part in parts if isinstance(part.storage, Latent)), None)

    def cache(self, layer: int, name: str) -> torch.Tensor:
        """Any cached tensor: "k", "v", "latent", "pooled", "index_keys"; EvidenceMissing if it keeps none such.

        Index keys are float32 [tokens, dim] (or [entries, dim]), post-norm and post-RoPE, as the model caches them.
        """
        source = owner(self._trace.layout, self._trace.layer(layer))
        path = layer_shard(self.name, source.index)
        if name not in CACHED or name not in self._trace.shapes.get(path, {}):
            raise EvidenceMissing(f"{self._trace.path}: layer {layer} ({source.kind}) keeps no '{name}'")
        return self._trace.tensor(path, name)

    def holds(self, layer: int, name: str) -> bool:
        """Whether there is any row of a layer's tensor here: a short segment may complete no compressed entry."""
        return name in self._trace.shapes.get(layer_shard(self.name, layer), {})

    @property
    def q_start(self) -> int:
        """Position of the first row of `q`; the end of the segment if none is stored."""
        return max(self.start, min(self._trace.header.q_from, self.start + self.tokens))

    def q(self, layer: int, first: int | None = None) -> torch.Tensor:
        """Queries after norm, RoPE and any query scale, [rows, q_heads, k_dim], from `first` on (None: `q_start`).

        EvidenceMissing if none is stored, or `first` lies before `q_start`.
        """
        return self._of_queries(self._trace.layer(layer).index, "q", first)

    def selection(self, layer: int, first: int | None = None) -> torch.Tensor | None:
        """What the index let each recorded query read, int32 [rows, sets, k], rows as of `q`: units (`TopK.unit`) by
        number, -1 for none. Of the layer that selected, where `layer` reads its choice; None where nothing is selected.

        EvidenceMissing as for `q`.
        """
        selector = self._trace.layout.selector(self._trace.layer(layer).index)
        return None if selector is None else self._of_queries(selector.index, SELECTION, first)

    def index_queries(self, layer: int) -> torch.Tensor:
        """Index queries of the recorded queries, float32 [rows, index_heads, dim]; EvidenceMissing without an index."""
        return self._of_queries(layer, "index_queries", None)

    def index_weights(self, layer: int) -> torch.Tensor:
        """Weight of each index head, as projected, float32 [rows, index_heads]; EvidenceMissing if there are none."""
        return self._of_queries(layer, "index_weights", None)

    def _of_queries(self, layer: int, name: str, first: int | None) -> torch.Tensor:
        path = layer_shard(self.name, layer)
        wanted = self.start if first is None else first
        stored = self._trace.shapes.get(path, {})
        if "q" in stored and name not in stored:
            raise EvidenceMissing(f"{self._trace.path}: layer {layer} has no index that makes '{name}'")
        if name not in stored or (first is not None and first < self.q_start):
            raise EvidenceMissing(
                f"{self._trace.path}: queries of {self.name} are stored from position {self.q_start} on, {wanted} was "
                f"asked; record with q_from={wanted} to have them"
            )
        rows = self._trace.tensor(path, name)
        return rows if first is None else rows[first - self.q_start :]

    def tap(self, name: str) -> torch.Tensor:
        """Rows of a tap (`Tap.name`, as `lse_007`), from its `first` position; EvidenceMissing if not recorded."""
        path = tap_shard(self.name, name)
        if path not in self._trace.shapes:
            known = [tap.name for tap in self._trace.header.taps]
            hint = did_you_mean(name, known) if known else " (none was)"
            raise EvidenceMissing(
                f"{self._trace.path}: tap '{name}' of {self.name} was not recorded{hint}; "
                "list it in the recorder's taps to have it"
            )
        return self._trace.tensor(path, "rows")


class Branch(Segment):
    """Question and answer after the prefix."""

    def __init__(self, trace: Trace, name: str, entry: BranchEntry) -> None:
        super().__init__(trace, name)
        self._entry = entry

    @property
    def question_tokens(self) -> int:
        """How many of the tokens are the question; the rest is the answer."""
        return self._entry.question_tokens

    @property
    def answer_text(self) -> str:
        """The answer as text."""
        return self._entry.answer_text

    @property
    def meta(self) -> dict[str, JsonValue]:
        """What the workload's scorer needs besides."""
        return self._entry.meta

    @property
    def logits(self) -> torch.Tensor:
        """float32 [tokens, vocab]; row t is the distribution after token t. EvidenceMissing unless stored in full."""
        return self._logits("logits", "full")

    @property
    def top_logits(self) -> TopLogits:
        """The largest logits per row; EvidenceMissing unless the trace stored a top-k."""
        return TopLogits(*(self._logits(name, "topk") for name in TopLogits._fields))

    def top_two(self) -> torch.Tensor:
        """float32 [tokens, 2]: the two largest logits per row (1 column of a top-1 trace)."""
        spec = self._trace.header.logits
        if spec is not None and spec.kind == "topk":
            return self.top_logits.values[:, :2]
        return self.logits.topk(2, dim=-1).values

    @property
    def greedy_ids(self) -> torch.Tensor:
        """int64 [tokens]: the model's first choice after each token; EvidenceMissing if no logits are stored."""
        spec = self._trace.header.logits
        if spec is not None and spec.kind == "topk":
            return self.top_logits.ids[:, 0].long()
        return self.logits.argmax(dim=-1)

    def _logits(self, name: str, kind: str) -> torch.Tensor:
        path = f"{self.name}/logits.safetensors"
        if name not in self._trace.shapes.get(path, {}):
            spec = self._trace.header.logits
            stored = "no logits" if spec is None else f"{spec.kind} logits"
            raise EvidenceMissing(
                f"{self._trace.path}: {stored} of {self.name} are stored; record with logits kind '{kind}' for these"
            )
        return self._trace.tensor(path, name)


class Trace:
    """An opened trace folder; make one with `Trace.open`. Cheap to open, safe to share between threads for reading."""

    def __init__(self, path: Path, header: TraceHeader, digest: str) -> None:
        self.path = path
        self.header = header
        self.digest = digest
        """sha256 of `trace.json`, which holds every shard's hash: the identity of the trace."""
        self.shapes: Shards = expected_shards(header)
        self._mapped: dict[str, dict[str, torch.Tensor]] = {}

    @classmethod
    def open(cls, path: str | Path) -> Trace:
        """Open and check a trace without reading its tensors.

        TraceError: no `trace.json`, another schema version, an unknown key, a shard that is missing, truncated, of
        another dtype or shape than the layout asks, unlisted, or outside the folder. Hashes are `verify`'s work.
        """
        root = Path(path)
        header, digest = read_header(root)
        try:
            trace = cls(root, header, digest)
        except TraceError as error:
            raise TraceError(f"{root / HEADER_FILE}: {error}") from error
        _check_listing(root, header, trace.shapes)
        for name, specs in trace.shapes.items():
            _check_file(root, name, header.shards[name].bytes)
            check_shard(root / name, specs)
        return trace

    @property
    def layout(self) -> Layout:
        """The recorded model's cache layout."""
        return self.header.layout

    @cached_property
    def prefix(self) -> Segment:
        """The shared context."""
        return Segment(self, PREFIX)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """Its continuations."""
        names = self.header.segment_names[1:]
        return tuple(Branch(self, n, entry) for n, entry in zip(names, self.header.branches, strict=True))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The prefix, then the branches."""
        return (self.prefix, *self.branches)

    def layer(self, index: int) -> Layer:
        """A layer of the layout; TraceError if there is none of that index."""
        if not 0 <= index < len(self.layout.layers):
            raise TraceError(f"{self.path}: layer {index}; the layout has layers 0 to {len(self.layout.layers) - 1}")
        return self.layout.layers[index]

    def tensor(self, path: str, name: str) -> torch.Tensor:
        """A stored tensor by shard path and name, mapped on first use."""
        if path not in self._mapped:
            self._mapped[path] = map_shard(self.path / path, self.shapes[path])
        return self._mapped[path][name]

    def overlay(self, name: str = RECORDED) -> tuple[Overlay, tuple[Event, ...]]:
        """Block tables stored under `name` and their events (none: empty)."""
        return load_overlay(self.path, name, self.digest)

    @property
    def overlays(self) -> tuple[str, ...]:
        """Names of the stored overlays."""
        return overlay_names(self.path)

    def reblock(self, block_size: int, name: str | None = None, *, overwrite: bool = False) -> Path:
        """Store plain contiguous block tables for another block size, K and V untouched; returns the new file."""
        overlay, events = plan_overlay(self.header, block_size, name)
        return save_overlay(self.path, overlay, events, self.header, self.digest, overwrite=overwrite)


def read_header(root: Path) -> tuple[TraceHeader, str]:
    """`trace.json` as a typed header, and its sha256; TraceError if missing or wrong."""
    file = root / HEADER_FILE
    if not root.is_dir():
        raise TraceError(f"{root}: no such trace folder")
    if not file.is_file():
        raise TraceError(f"{root}: no {HEADER_FILE} in it: not a trace, or a recording that did not finish")
    with os_errors(file, "read"):
        text = file.read_bytes()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}: not JSON: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise TraceError(f"{file}: schema_version {version}, this kvassay reads {SCHEMA_VERSION}")
    try:
        header = TraceHeader.model_validate_json(text)
    except ValidationError as error:
        raise TraceError(f"{file}: {explain(error)}") from error
    if missing := header.missing_sinks:
        raise TraceError(f"{file}: sinks: layer {missing[0]} has attention sinks, their logits are not there")
    return header, hashlib.sha256(text).hexdigest()


def _check_listing(root: Path, header: TraceHeader, shapes: Shards) -> None:
    for name in header.shards:
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts or "\\" in name:
            raise TraceError(f"{root / HEADER_FILE}: shard path '{name}' leaves the folder")
    if missing := sorted(set(shapes) - set(header.shards)):
        raise TraceError(f"{root / HEADER_FILE}: lists no '{missing[0]}' ({len(missing)} of {len(shapes)} missing)")
    if unknown := sorted(set(header.shards) - set(shapes)):
        raise TraceError(f"{root / HEADER_FILE}: lists '{unknown[0]}', which the layout has no place for")


def _check_file(root: Path, name: str, size: int) -> None:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise TraceError(f"{path}: a link that leaves the trace folder")
    if not path.is_file():
        raise TraceError(f"{path}: missing")
    found = path.stat().st_size
    if found != size:
        raise TraceError(f"{path}: {found} bytes, {HEADER_FILE} says {size}: truncated or overwritten")
