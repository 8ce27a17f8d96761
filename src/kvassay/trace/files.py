"""One safetensors file at a time: create it at full size, write rows into it, map it, hash it.

The format is safetensors' own (any reader of it opens a shard); it is written by hand because the library
writes whole tensors only, and a recording grows by rows. Rows go through `pwrite`, not through a writable
memory map, since a full disk under a map kills the process with SIGBUS instead of raising an error.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvassay.errors import TraceError
from kvassay.trace.shapes import TensorSpec

NUMPY_DTYPE: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I32": np.dtype("<i4")}
READ_CHUNK = 1 << 24
"""Bytes read at once when hashing."""
MAX_HEADER = 1 << 20
"""Bytes; a shard holds a handful of tensors, so a longer header is damage."""


@contextmanager
def os_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a one-line TraceError that names the file and, for a full disk, the free bytes."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += f" ({free_bytes(path)} bytes free)"
        raise TraceError(f"{where}: cannot {doing}: {reason}") from error


def free_bytes(path: Path) -> int | str:
    """Free bytes of the file system that holds `path` or its nearest existing parent; "unknown" if it won't say."""
    for folder in (path, *path.absolute().parents):
        if folder.exists():
            try:
                stat = os.statvfs(folder)
            except OSError:
                return "unknown"
            return stat.f_bavail * stat.f_frsize
    return "unknown"


def header_of(specs: Mapping[str, TensorSpec]) -> bytes:
    """The safetensors header (length word included) for tensors laid one after the other."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, spec in specs.items():
        end = offset + spec.nbytes
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def shard_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Size of a shard file."""
    return len(header_of(specs)) + sum(spec.nbytes for spec in specs.values())


class ShardFile:
    """A shard being written: full size on disk from the start, rows of each tensor filled in order."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Create the file and reserve its space; OSError (full disk, read-only folder) passes through."""
        self.path = path
        self.specs = dict(specs)
        self.rows = dict.fromkeys(specs, 0)
        head = header_of(specs)
        self._starts: dict[str, int] = {}
        start = len(head)
        for name, spec in specs.items():
            self._starts[name] = start
            start += spec.nbytes
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _reserve(descriptor, shard_bytes(specs))
            _write_all(descriptor, head, 0)
        finally:
            os.close(descriptor)

    def append(self, name: str, rows: np.ndarray[Any, Any]) -> None:
        """Write `rows` [n, ...] after those already written; dtype and row shape must be the tensor's."""
        spec, done = self.specs[name], self.rows[name]
        count = rows.shape[0]
        if rows.shape[1:] != spec.shape[1:] or rows.dtype != NUMPY_DTYPE[spec.dtype]:
            got = f"{list(rows.shape)} {rows.dtype}"
            raise TraceError(f"{self.path}: '{name}' takes rows {list(spec.shape[1:])} {spec.dtype}, got {got}")
        if done + count > spec.shape[0]:
            raise TraceError(
                f"{self.path}: '{name}' holds {spec.shape[0]} rows; {done} are written and {count} more came"
            )
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            _write_all(
                descriptor, np.ascontiguousarray(rows).data.cast("B"), self._starts[name] + done * spec.row_bytes
            )
        finally:
            os.close(descriptor)
        self.rows[name] = done + count

    def close(self) -> None:
        """Check that every row was written and force the file to disk."""
        for name, spec in self.specs.items():
            if self.rows[name] != spec.shape[0]:
                raise TraceError(f"{self.path}: '{name}' got {self.rows[name]} of {spec.shape[0]} rows")
        sync(self.path)


def map_shard(path: Path, specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Map a shard: tensors whose pages are read from disk when touched; writes to them stay in memory.

    TraceError if the file's own header does not say exactly `specs` or the size is another.
    """
    with os_errors(path, "read"):
        _check_header(path, specs)
        offset = len(header_of(specs))
        whole = np.memmap(path, dtype=np.uint8, mode="c")
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        flat = whole[offset : offset + spec.nbytes].view(NUMPY_DTYPE[spec.dtype])
        tensors[name] = torch.from_numpy(flat).reshape(spec.shape)
        offset += spec.nbytes
    return tensors


def check_shard(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """TraceError unless the shard's header says exactly `specs` and its size agrees."""
    with os_errors(path, "read"):
        _check_header(path, specs)


def _check_header(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    expected, size = header_of(specs), shard_bytes(specs)
    with path.open("rb") as file:
        if file.read(len(expected)) != expected:
            raise TraceError(f"{path}: {_header_fault(path, specs)}")
    if path.stat().st_size != size:
        raise TraceError(f"{path}: {path.stat().st_size} bytes, its tensors need {size}")


def _header_fault(path: Path, specs: Mapping[str, TensorSpec]) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER:
            return f"not a safetensors file: its header claims {length} bytes"
        try:
            found = json.loads(file.read(length))
            listed = {n: TensorSpec(str(e["dtype"]), tuple(e["shape"])) for n, e in found.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return "not a safetensors file: its header is not the JSON it should be"
    for name in [*specs, *listed]:
        if specs.get(name) != listed.get(name):
            return f"tensor '{name}' is {_say(listed.get(name))}; the layout and trace.json ask {_say(specs.get(name))}"
    return "its tensors are not laid out one after the other in the order kvassay writes"


def _say(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype} {list(spec.shape)}"


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """sha256 of a file; `advance(bytes)` is called as it is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    # Real blocks, not a sparse file: a full disk shows now, not hours into the recording.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
