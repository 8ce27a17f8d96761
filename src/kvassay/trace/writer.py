"""Writing a trace while it is recorded: bounded memory, and nothing at the path until all of it is right.

    with TraceWriter(path, header) as writer:
        prefix = writer.segment("prefix")
        prefix.append_tokens(ids)
        prefix.append(layer, "k", rows)          # [n, kv_heads, k_dim], as often as the recorder likes

Everything goes into a hidden sibling folder that is renamed to `path` when the block ends well and removed
when it does not. Not safe for two threads; two writers for one path race for the rename, and one of them fails.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from kvassay.errors import TraceError, did_you_mean
from kvassay.trace.blocks import Overlay, save_overlay
from kvassay.trace.events import Event
from kvassay.trace.files import ShardFile, free_bytes, os_errors, sha256_file, shard_bytes, sync
from kvassay.trace.schema import HEADER_FILE, BranchEntry, LogitsSpec, ShardEntry, TraceHeader, branch_name, explain
from kvassay.trace.shapes import expected_shards, layer_shard, segment_shards, tap_shard

TORCH_DTYPE = {"F32": torch.float32, "F16": torch.float16, "I32": torch.int32}


class SegmentWriter:
    """The open shards of one segment. Rows come in order of position; each tensor has its own count."""

    def __init__(self, root: Path, header: TraceHeader, name: str) -> None:
        """Create the segment's shards under `root` at full size."""
        self.name = name
        self._root = root
        self._vocab = header.layout.vocab_size
        self._logits: LogitsSpec | None = header.logits
        self._taps = [tap.name for tap in header.taps]
        self.shards = {path: ShardFile(root / path, specs) for path, specs in segment_shards(header, name).items()}

    def append_tokens(self, ids: Sequence[int] | torch.Tensor) -> None:
        """Append token ids; TraceError for one outside the vocabulary."""
        rows = torch.as_tensor(ids).reshape(-1)
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self._vocab:
            worst = f"{int(rows.min())} to {int(rows.max())}"
            raise TraceError(f"{self.name}: token ids {worst} leave the vocabulary of {self._vocab}")
        self._write(f"{self.name}/tokens.safetensors", "ids", rows.to(torch.int32))

    def append(self, layer: int, name: str, rows: torch.Tensor) -> None:
        """Append rows [n, heads, dim] of tensor `name` ("k", "v", "q", ...) of a layer.

        `q` of the prefix begins at position `q_from`. float32 rows are rounded to a float16 trace.
        """
        self._write(layer_shard(self.name, layer), name, rows)

    def append_tap(self, name: str, rows: torch.Tensor) -> None:
        """Append rows of the tap `name` (`Tap.name`, as `lse_007`)."""
        if name not in self._taps:
            raise TraceError(f"{self.name}: the header lists no tap '{name}'{did_you_mean(name, self._taps)}")
        self._write(tap_shard(self.name, name), "rows", rows)

    def append_logits(self, rows: torch.Tensor) -> None:
        """Append full logits rows [n, vocab] of a branch; a top-k trace keeps the largest and the log-sum-exp."""
        path = f"{self.name}/logits.safetensors"
        if path not in self.shards:
            raise TraceError(f"{self.name}: the header asks for no logits here")
        rows = rows.detach().float()
        if self._logits is None or self._logits.k is None:
            self._write(path, "logits", rows)
            return
        top = rows.topk(self._logits.k, dim=-1)
        self.append_top_logits(top.values, top.indices, rows.logsumexp(dim=-1))

    def append_top_logits(self, values: torch.Tensor, ids: torch.Tensor, logsumexp: torch.Tensor) -> None:
        """Append what a top-k trace keeps of a branch's rows: values and ids [n, k], log-sum-exp [n]."""
        path = f"{self.name}/logits.safetensors"
        self._write(path, "values", values)
        self._write(path, "ids", ids.to(torch.int32))
        self._write(path, "logsumexp", logsumexp)

    def _write(self, path: str, name: str, rows: torch.Tensor) -> None:
        shard = self.shards.get(path)
        if shard is None or name not in shard.specs:
            known = [] if shard is None else list(shard.specs)
            raise TraceError(f"{path}: no tensor '{name}' is stored here{did_you_mean(name, known)}")
        with os_errors(shard.path, "write"):
            shard.append(name, _stored(rows, shard.specs[name].dtype, f"{path} '{name}'"))


def _stored(rows: torch.Tensor, code: str, where: str) -> np.ndarray[Any, Any]:
    wanted = TORCH_DTYPE[code]
    if rows.dtype == torch.bfloat16:
        raise TraceError(f"{where}: bfloat16 rows are refused; run the model in float32 or float16")
    if rows.dtype.is_floating_point != wanted.is_floating_point:
        raise TraceError(f"{where}: stored as {wanted}, got {rows.dtype}")
    rows = rows.detach().cpu()
    stored = rows.to(wanted)
    if stored.dtype != rows.dtype and bool((stored.isinf() & ~rows.isinf()).any()):
        raise TraceError(f"{where}: a value of {float(rows.abs().max()):g} does not fit into {wanted}")
    array: np.ndarray[Any, Any] = stored.numpy()
    return array


class TraceWriter:
    """Context manager that yields itself; see the module docstring.

    TraceError: the path exists (unless `overwrite=True`, and then only if it is a trace), the disk is too small, the
    folder is read-only, a row has the wrong shape or dtype, or at the end some rows are missing.
    """

    def __init__(self, path: str | Path, header: TraceHeader, *, overwrite: bool = False) -> None:
        self.path = Path(path).absolute()
        self.header = header
        self._overwrite = overwrite
        self._root = self.path.parent / f".{self.path.name}.partial-{secrets.token_hex(6)}"
        self._segments: dict[str, SegmentWriter] = {}
        self._overlays: list[tuple[Overlay, tuple[Event, ...]]] = []
        self._made: list[Path] = []
        """Folders above the trace that were not there, innermost first."""

    def __enter__(self) -> TraceWriter:
        if header_shards := self.header.shards:
            raise TraceError(f"{self.path}: a header to write lists no shards yet, this one has {len(header_shards)}")
        self._check_target()
        self._check_room()
        try:
            with os_errors(self.path, "create"):
                self._made = [folder for folder in self.path.parents if not folder.exists()]
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._root.mkdir()
                for name in self.header.segment_names:
                    self._segments[name] = SegmentWriter(self._root, self.header, name)
        except BaseException:
            self._discard()
            raise
        return self

    def segment(self, name: str) -> SegmentWriter:
        """The writer of a segment: `prefix`, `branch_000`, ..."""
        if name not in self._segments:
            raise TraceError(f"{self.path}: no segment '{name}'{did_you_mean(name, self._segments)}")
        return self._segments[name]

    def add_branch(self, entry: BranchEntry) -> SegmentWriter:
        """Declare one more branch, for answers whose length is known only once they are generated."""
        self.header = self.header.model_copy(update={"branches": (*self.header.branches, entry)})
        name = branch_name(len(self.header.branches) - 1)
        with os_errors(self.path, "create"):
            self._segments[name] = SegmentWriter(self._root, self.header, name)
        return self._segments[name]

    def set_sinks(self, sinks: Mapping[int, Sequence[float]]) -> None:
        """Store the logits of the layers' attention sinks, which a recorder sees once the model has run."""
        given = {index: tuple(logits) for index, logits in sinks.items()}
        try:
            self.header = TraceHeader.model_validate({**dict(self.header), "sinks": given})
        except ValidationError as error:
            raise TraceError(f"{self.path}: {explain(error)}") from error

    def add_overlay(self, overlay: Overlay, events: Sequence[Event] = ()) -> None:
        """Store block tables and their event log with the trace; checked against it when the block ends."""
        self._overlays.append((overlay, tuple(events)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with os_errors(self.path, "finish"):
                    self._commit()
        finally:
            self._discard()

    def _commit(self) -> None:
        if missing := self.header.missing_sinks:
            raise TraceError(f"{self.path}: the logits of layer {missing[0]}'s attention sinks were never given")
        entries: dict[str, ShardEntry] = {}
        for segment in self._segments.values():
            for name, shard in segment.shards.items():
                shard.close()
                size = shard.path.stat().st_size
                entries[name] = ShardEntry(sha256=sha256_file(shard.path), bytes=size)
            sync(self._root / segment.name)
        self.header = self.header.model_copy(update={"shards": entries})
        header_file = self._root / HEADER_FILE
        header_file.write_text(self.header.model_dump_json(indent=1) + "\n", encoding="utf-8")
        sync(header_file)
        for overlay, events in self._overlays:
            save_overlay(self._root, overlay, events, self.header, sha256_file(header_file))
        sync(self._root)
        with self._making_room():
            self._root.rename(self.path)
        sync(self.path.parent)

    def _check_target(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not self._overwrite:
            raise TraceError(f"{self.path}: exists already; --overwrite (overwrite=True) replaces a trace")
        if self.path.is_symlink() or not (self.path / HEADER_FILE).is_file():
            raise TraceError(f"{self.path}: exists and is not a trace folder; it is left alone")

    def _check_room(self) -> None:
        needed = sum(shard_bytes(specs) for specs in expected_shards(self.header).values())
        free = free_bytes(self.path)
        if isinstance(free, int) and needed > free:
            raise TraceError(
                f"{self.path}: the trace needs {needed} bytes and {free} are free there, so nothing was written; "
                "dtype float16 halves it, fewer queries, taps and logits shorten it"
            )

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        self._check_target()
        if not self.path.exists():
            yield
            return
        old = self._root.with_name(self._root.name + ".old")
        self.path.rename(old)
        try:
            yield
        except BaseException:
            old.rename(self.path)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _discard(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        with suppress(OSError):  # those that hold anything stay
            for folder in self._made:
                folder.rmdir()
