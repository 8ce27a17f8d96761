"""Ways to break a trace, each with what must be said about it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHARD = "prefix/layer_000.safetensors"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((path / "trace.json").read_text())
    change(data)
    (path / "trace.json").write_text(json.dumps(data))


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: edit(path, lambda data: (change(data), None)[1])


def _truncate(path: Path) -> None:
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 1)


def _link_out(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    shutil.move(path / SHARD, outside)
    (path / SHARD).symlink_to(outside)


def _rename_shard(name: str) -> Callable[[Path], None]:
    def change(data: dict[str, Any]) -> None:
        data["shards"][name] = data["shards"].pop(SHARD)

    return _header(change)


def _replace(tensors: dict[str, torch.Tensor]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        save_file(tensors, path / SHARD)
        size = (path / SHARD).stat().st_size
        edit(path, lambda data: data["shards"][SHARD].update(bytes=size))

    return change


def _overwrite_start(data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with (path / SHARD).open("r+b") as file:
            file.write(data)

    return change


def _tensors(dtype: torch.dtype, k: tuple[int, ...] = (11, 2, 4)) -> dict[str, torch.Tensor]:
    return {
        "k": torch.zeros(k, dtype=dtype),
        "v": torch.zeros(11, 2, 3, dtype=dtype),
        "q": torch.zeros(4, 4, 4, dtype=dtype),
    }


# name -> (how to break it, what the message must match)
STRUCTURE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no_folder": (shutil.rmtree, r"no such trace folder"),
    "no_header": (lambda p: (p / "trace.json").unlink(), r"no trace.json in it"),
    "not_json": (lambda p: (p / "trace.json").write_text('{"schema'), r"trace.json: not JSON: .*char"),
    "list": (lambda p: (p / "trace.json").write_text("[1]"), r"schema_version None, this kvassay reads 1"),
    "version": (_header(lambda d: d.update(schema_version=7, x=1)), r"schema_version 7, this kvassay reads 1$"),
    "no_version": (_header(lambda d: d.pop("schema_version")), r"schema_version None, this kvassay reads 1$"),
    "unknown_key": (_header(lambda d: d.update(promt=1)), r"trace.json: unknown key 'promt'"),
    "deep_key": (_header(lambda d: d["prefix"].update(toknes=1)), r"'prefix.toknes' \(did you mean 'tokens'\?\)"),
    "missing_key": (_header(lambda d: d.pop("recipe")), r"trace.json: recipe: Field required"),
    "bfloat16": (_header(lambda d: d.update(dtype="bfloat16")), r"dtype: bfloat16 traces are refused"),
    "layout": (_header(lambda d: d["layout"].pop("layers")), r"trace.json: layout: "),
    "truncated": (_truncate, r"layer_000.safetensors: 1063 bytes, trace.json says 1064: truncated"),
    "gone": (lambda p: (p / SHARD).unlink(), r"prefix/layer_000.safetensors: missing$"),
    "unlisted": (_header(lambda d: d["shards"].pop(SHARD)), rf"lists no '{SHARD}' \(1 of 23 missing\)"),
    "absolute": (_rename_shard("/etc/passwd"), r"shard path '/etc/passwd' leaves the folder"),
    "parent": (_rename_shard("prefix/../../x.safetensors"), r"shard path 'prefix/../../x.safetensors' leaves"),
    "odd_name": (_rename_shard("prefix/extra.safetensors"), rf"lists no '{SHARD}'"),
    "extra": (
        _header(lambda d: d["shards"].update({"prefix/x.safetensors": {"sha256": "0" * 64, "bytes": 1}})),
        r"lists 'prefix/x.safetensors', which the layout has no place for",
    ),
    "link_out": (_link_out, r"layer_000.safetensors: a link that leaves the trace folder"),
    "folder_for_file": (lambda p: ((p / SHARD).unlink(), (p / SHARD).mkdir())[1], r"layer_000.safetensors: missing$"),
    "wrong_dtype": (_replace(_tensors(torch.float64)), r"tensor 'k' is F64 \[11, 2, 4\]; .* ask F32 \[11, 2, 4\]"),
    "wrong_shape": (_replace(_tensors(torch.float32, (11, 4, 2))), r"tensor 'k' is F32 \[11, 4, 2\]; .*\[11, 2, 4\]"),
    "fewer_rows": (
        _header(lambda d: d["branches"][0].update(tokens=5)),
        r"branch_000/tokens.safetensors: tensor 'ids' is I32 \[6\]; .* I32 \[5\]",
    ),
    "missing_tensor": (_replace({"k": torch.zeros(11, 2, 4)}), r"tensor 'v' is absent"),
    "huge_header": (_overwrite_start(b"\xff" * 8), r"its header claims 18446744073709551615 bytes"),
    "binary_header": (_overwrite_start(b"\x10" + b"\x00" * 7 + b"\xff" * 16), r"header is not the JSON"),
}


def flip_byte(path: Path) -> None:
    with (path / SHARD).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
