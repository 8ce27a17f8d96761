"""A paged cache with known contents, and a model of it that has neither blocks nor ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.layout.model import KV, All, Component, Layer, Layout, Rope, Window

Row = tuple[Tensor, Tensor]
Content = list[dict[int, Row]]
"""Per head, key and value by position."""


def layer(
    index: int, kv_heads: int = 2, k_dim: int = 8, v_dim: int = 8, window: int | None = None, **more: object
) -> Layer:
    kv = KV(kv_heads, k_dim, v_dim)
    visibility = All() if window is None else Window(window)
    return Layer(index, 2 * kv_heads, (Component(kv, visibility),), scale=0.5, **more)  # type: ignore[arg-type]


def layout(*layers: Layer) -> Layout:
    return Layout("tiny", tuple(layers), 8, 8, 4096)


@dataclass
class World:
    """A poisoned cache and, by (sequence, layer), what it should hold."""

    cache: PagedCache
    seed: int = 0
    truth: dict[tuple[int, int], Content] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        return [index for group in self.cache.ledger.groups for index in group.layers]

    def create(self, tokens: int) -> int:
        seq, _ = self.cache.create([])
        for index in self.layers:
            self.truth[seq, index] = [{} for _ in range(self.cache.layout.layers[index].kv.kv_heads)]
        if tokens:
            self.extend(seq, tokens)
        return seq

    def extend(self, seq: int, tokens: int, *, committed: bool = True, reuse: int | None = None) -> None:
        first = self.cache.ledger.length(seq)
        self.cache.extend(seq, list(range(first, first + tokens)), committed=committed, reuse=reuse)
        for index in self.layers:
            kv = self.cache.layout.layers[index].kv
            k, v = self.random(kv.kv_heads, tokens, kv.k_dim), self.random(kv.kv_heads, tokens, kv.v_dim)
            self.cache.write(index, [seq], k[None], v[None])
            for head, content in enumerate(self.truth[seq, index]):
                content.update({first + at: (k[head, at], v[head, at]) for at in range(tokens)})

    def fork(self, seq: int) -> int:
        child = self.cache.fork(seq)
        for index in self.layers:
            self.truth[child, index] = [dict(content) for content in self.truth[seq, index]]
        return child

    def random(self, *shape: int) -> Tensor:
        self.seed += 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(self.seed))

    def keep(self, seq: int, index: int, rows: Sequence[Sequence[int]]) -> None:
        """Make the model forget all positions but these, per head."""
        old = self.truth[seq, index]
        self.truth[seq, index] = [{p: c[p] for p in sorted(row)} for c, row in zip(old, rows, strict=True)]

    def check(self, *seqs: int, queries: int = 1, atol: float = 0.0) -> None:
        """The cache's own laws, and every layer of these sequences read back both ways."""
        self.cache.check()
        for seq in seqs:
            for index in self.layers:
                low = self.low(seq, index, queries)
                expected = [{p: row for p, row in head.items() if p >= low} for head in self.truth[seq, index]]
                compare(read(self.cache, seq, index, queries), expected, atol)
                compare(as_stored(self.cache, seq, index, queries), expected, atol)

    def low(self, seq: int, index: int, queries: int) -> int:
        window = self.cache.layout.layers[index].window
        return 0 if window is None else max(0, self.cache.ledger.length(seq) - queries - window + 1)


def world(groups: Sequence[GroupSpec], layers: Sequence[Layer], blocks: int = 64) -> World:
    return World(PagedCache(layout(*layers), groups, blocks, poison=True))


def one_layer(tokens: int, blocks: int = 64, block_size: int = 4, **more: object) -> tuple[World, int]:
    """A world of one layer and its first sequence."""
    only = layer(0, **more)  # type: ignore[arg-type]
    made = world([GroupSpec(0, (0,), (only.kv.kv_heads,), block_size, only.window)], [only], blocks)
    return made, made.create(tokens)


def read(cache: PagedCache, seq: int, index: int, queries: int = 1) -> Content:
    """What the view by position holds; positions must ascend, padding come last."""
    data = cache.layer(seq, index, queries)
    content: Content = []
    for head, row in enumerate(data.positions.tolist()):
        live = [p for p in row if p >= 0]
        assert row == sorted(live) + [-1] * (len(row) - len(live))
        content.append({p: (data.k[head, at], data.v[head, at]) for at, p in enumerate(live)})
    return content


def as_stored(cache: PagedCache, seq: int, index: int, queries: int = 1) -> Content:
    """What the runs hold, token by token."""
    stored = cache.stored(seq, index, queries)
    k, v = (torch.cat([getattr(run, side) for run in stored.runs], 1) for side in ("k", "v"))
    assert k.shape[1] == v.shape[1] == stored.positions.shape[1] == sum(run.tokens for run in stored.runs)
    assert stored.complete is not bool((stored.positions < 0).any())
    return [
        {p: (k[head, at], v[head, at]) for at, p in enumerate(row) if p >= 0}
        for head, row in enumerate(stored.positions.tolist())
    ]


def compare(found: Content, expected: Content, atol: float = 0.0) -> None:
    for head, (mine, true) in enumerate(zip(found, expected, strict=True)):
        assert sorted(mine) == sorted(true), f"head {head}"
        for position, (k, v) in true.items():
            torch.testing.assert_close(mine[position][0], k, rtol=0, atol=atol)
            torch.testing.assert_close(mine[position][1], v, rtol=0, atol=atol)


def bits_of(cache: PagedCache, seq: int) -> list[list[object]]:
    """Everything one can read of a sequence, as plain values to compare."""
    everything = []
    for group in cache.ledger.groups:
        for index in group.layers:
            data = cache.layer(seq, index)
            k, v = (side.masked_fill(~data.alive[..., None], 0).tolist() for side in (data.k, data.v))
            biases = [None if bias is None else bias.tolist() for bias in (data.bias, data.inner_bias)]
            encoded = None if data.encoded is None else data.encoded.tolist()
            everything.append([data.positions.tolist(), data.slots.tolist(), k, v, *biases, encoded])
        everything.append([cache.ledger.table(seq, group.index)])
    return everything


ROPE = Rope(10000.0, 8)
