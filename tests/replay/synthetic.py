"""Random tokens for a model to record, and traces of random rows, of any shape, that no model made."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import torch

from kvassay.layout.model import KV, Component, Layer, Layout, Window
from kvassay.trace.reader import Trace
from kvassay.trace.schema import BranchEntry, ModelIdentity, PrefixEntry, Recipe, TraceHeader, Versions
from kvassay.trace.writer import TraceWriter
from kvassay.workload.sample import Branch, Sample
from tests.record import tiny


def sample(context: int, answer: int) -> Sample:
    """Random tokens: a context and two branches."""
    branches = [
        Branch(
            tuple(tiny.token_ids(6, seed=i)),
            tuple(tiny.token_ids(answer, seed=9 + i)),
            "q",
            "a",
            tuple(range(answer)),
            0.5,
        )
        for i in (1, 2)
    ]
    return Sample("needle_multikey", 0, 0, tuple(tiny.token_ids(context)), tuple(branches), False)


def make(
    path: Path,
    *,
    tokens: int,
    branches: tuple[int, ...] = (1,),
    q_heads: int = 2,
    kv_heads: int = 2,
    dim: int = 8,
    windows: tuple[int | None, ...] = (None, None),
    q_tail: int = 8,
    seed: int = 0,
) -> Trace:
    """Random normal rows; `branches` are their lengths, `windows` one entry per layer."""
    layers = tuple(
        Layer(
            i, q_heads, (Component(KV(kv_heads, dim, dim), Window(w)) if w else Component(KV(kv_heads, dim, dim)),), 0.5
        )
        for i, w in enumerate(windows)
    )
    header = TraceHeader(
        layout=Layout("random", layers, dim, 50, 1 << 20),
        model=ModelIdentity(name="random", weights_sha256=None, tokenizer_sha256=None, licence="none"),
        recipe=Recipe(name="random", seed=seed, index=0, length=tokens),
        versions=Versions.current(),
        dtype="float32",
        prefill_chunk=tokens,
        q_from=max(tokens - q_tail, 0),
        created=datetime.now(UTC),
        prefix=PrefixEntry(tokens=tokens),
        branches=tuple(BranchEntry(tokens=n, question_tokens=1) for n in branches),
    )
    generator = torch.Generator().manual_seed(seed)
    with TraceWriter(path, header) as writer:
        for name in header.segment_names:
            count, to = header.segment_tokens(name), writer.segment(name)
            to.append_tokens([1] * count)
            for layer in layers:
                for side, heads in (("k", kv_heads), ("v", kv_heads), ("q", q_heads)):
                    n = min(q_tail, tokens) if side == "q" and name == "prefix" else count
                    if n:
                        to.append(layer.index, side, torch.randn(n, heads, dim, generator=generator))
    return Trace.open(path)
