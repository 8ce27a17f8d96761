"""A hand-made trace: three layers (full, sliding, one that reads another's cache), random rows, two branches."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvassay.layout.model import KV, Component, Layer, Layout, Window
from kvassay.trace.schema import (
    BranchEntry,
    LogitsSpec,
    ModelIdentity,
    PrefixEntry,
    Recipe,
    Tap,
    TraceHeader,
    Versions,
)
from kvassay.trace.writer import TraceWriter

VOCAB = 50
HIDDEN = 16
LAYOUT = Layout(
    model_type="tiny",
    layers=(
        Layer(0, 4, (Component(KV(2, 4, 3)),), 0.5),
        Layer(1, 3, (Component(KV(1, 8, 6), Window(5)),), 0.25),
        Layer(2, 8, (), 0.5, cache_of=0),
    ),
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    native_context=64,
)
TAPS = (
    Tap(kind="hidden", layer=1),
    Tap(kind="lse", layer=0, first=7),
    Tap(kind="output", layer=2, first=7),
)


def header(**changes: Any) -> TraceHeader:
    fields: dict[str, Any] = {
        "layout": LAYOUT,
        "model": ModelIdentity(name="tiny", weights_sha256="a" * 64, tokenizer_sha256=None, licence="apache-2.0"),
        "recipe": Recipe(name="copy", seed=3, index=1, length=11, params={"words": 4}),
        "versions": Versions(kvassay="0.1", torch="2.13", transformers="5.24", python="3.11"),
        "dtype": "float32",
        "prefill_chunk": 4,
        "q_from": 7,
        "taps": TAPS,
        "logits": LogitsSpec(kind="full"),
        "created": datetime(2026, 11, 29, tzinfo=UTC),
        "prefix": PrefixEntry(tokens=11),
        "branches": (
            BranchEntry(tokens=6, question_tokens=4, answer_text="blue\nsky", meta={"depth": 0.5}),
            BranchEntry(tokens=3, question_tokens=3),
        ),
    }
    return TraceHeader(**{**fields, **changes})


# (segment, layer or tap or "ids" or "logits", name) -> rows by hand: shapes written out, not asked of kvassay
SHAPES: dict[tuple[str, int | str, str], tuple[int, ...]] = {
    ("prefix", 0, "k"): (11, 2, 4),
    ("prefix", 0, "v"): (11, 2, 3),
    ("prefix", 0, "q"): (4, 4, 4),
    ("prefix", 1, "k"): (11, 1, 8),
    ("prefix", 1, "v"): (11, 1, 6),
    ("prefix", 1, "q"): (4, 3, 8),
    ("prefix", 2, "q"): (4, 8, 4),
    ("prefix", "hidden_001", "tap"): (11, 16),
    ("prefix", "lse_000", "tap"): (4, 4),
    ("prefix", "output_002", "tap"): (4, 8, 3),
}
for _name, _tokens in (("branch_000", 6), ("branch_001", 3)):
    SHAPES |= {(_name, *key[1:]): (_tokens, *shape[1:]) for key, shape in list(SHAPES.items()) if key[0] == "prefix"}
    SHAPES[_name, "logits", "logits"] = (_tokens, VOCAB)
IDS = {"prefix": list(range(10, 21)), "branch_000": [1, 2, 3, 4, 5, 49], "branch_001": [7, 0, 7]}


@dataclass
class Made:
    """A written trace and the rows that went into it."""

    path: Path
    header: TraceHeader
    rows: dict[tuple[str, int | str, str], torch.Tensor] = field(default_factory=dict, repr=False)


def rows_for(dtype: torch.dtype, seed: int = 0) -> dict[tuple[str, int | str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = ("lse_000", "logits")
    return {
        key: torch.randn(shape, generator=generator).to(torch.float32 if key[1] in wide else dtype)
        for key, shape in SHAPES.items()
    }


def write_rows(writer: TraceWriter, rows: dict[tuple[str, int | str, str], torch.Tensor], chunk: int = 4) -> None:
    for segment, ids in IDS.items():
        writer.segment(segment).append_tokens(ids)
    for (segment, where, name), tensor in rows.items():
        to = writer.segment(segment)
        for part in tensor.split(chunk):
            if isinstance(where, int):
                to.append(where, name, part)
            elif where == "logits":
                to.append_logits(part)
            else:
                to.append_tap(where, part)


def make(path: Path, *, seed: int = 0, overwrite: bool = False, **changes: Any) -> Made:
    made = Made(path, header(**changes))
    made.rows = rows_for(getattr(torch, made.header.dtype), seed)
    with TraceWriter(path, made.header, overwrite=overwrite) as writer:
        write_rows(writer, made.rows)
    return made
