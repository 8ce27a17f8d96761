"""One layer of a trace in a paged cache of its own: what the open loop holds at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvassay.cache.data import Stored
from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.policy.readset import ReadSet
from kvassay.replay.compressors import Beside, beside
from kvassay.replay.evidence import recorded_choice
from kvassay.replay.indexing import Asked
from kvassay.trace.reader import Branch, Segment, Trace


class BranchQueries(NamedTuple):
    """Queries that a branch recorded of one layer, and what the model's own index chose for them."""

    branch: Branch
    reader: int
    first: int
    q: Tensor
    """[q_heads, n, k_dim], of the branch's tokens from `first` on."""
    by_model: ReadSet | None

    @classmethod
    def of(cls, branch: Branch, reader: int, first: int, count: int) -> BranchQueries:
        """Of the branch's tokens `first` to `first + count - 1`."""
        q = branch.q(reader)[first : first + count].transpose(0, 1).float()
        chosen = recorded_choice(branch, reader, branch.start + first)
        return cls(branch, reader, first, q, chosen and chosen.part(slice(count)))

    @property
    def positions(self) -> Tensor:
        """True positions [n]."""
        start = self.branch.start + self.first
        return torch.arange(start, start + self.q.shape[1])


class Stage:
    """The context's keys and values of one storing layer, in blocks, with room for one lane and its branch."""

    def __init__(self, trace: Trace, group: GroupSpec, layer: int, *, fill: bool = True) -> None:
        """`group` is the one that holds `layer`. Without `fill` no key or value is read: geometry alone."""
        self.layer = layer
        self.readers = tuple(x.index for x in trace.layout.layers if layer in (x.index, x.cache_of))
        """The layer itself and those that only read its cache."""
        context = trace.prefix.tokens
        longest = max((branch.tokens for branch in trace.branches), default=0)
        per_copy = -(-(context + longest) // group.block_size) + 2
        spec = GroupSpec(0, (layer,), (group.heads(layer),), group.block_size, group.window)
        # The dense context, a copy that an arm writes into, and what compaction or their branches take.
        self.cache = PagedCache(trace.layout, [spec], 1 + 4 * per_copy, device="cpu" if fill else "meta")
        self._index: dict[str, Tensor] = {}
        self._entries: dict[str, Tensor] = {}
        self._context = trace.prefix
        self.dense, _ = self.cache.create([])
        self.cache.extend(self.dense, [0] * context)
        if fill:
            self._write(self.dense, trace.prefix, 0, context)

    def append(self, seq: int, branch: Branch, first: int, count: int, reuse: int | None = None) -> None:
        """Give a sequence the branch's tokens `first` to `first + count - 1`, with their recorded keys and values."""
        self.cache.extend(seq, [0] * count, reuse=reuse)
        self._write(seq, branch, first, count)

    def asked(self, asks: BranchQueries) -> Asked | None:
        """What the layer's own index is asked with by some queries; None if the layer has no index."""
        branch, own = asks.branch, asks.branch.layout.layers[self.layer].index_keys
        if own is None:
            return None
        if branch.name not in self._index:
            parts = [segment.cache(self.layer, "index_keys").float() for segment in (self._context, branch)]
            self._index = {branch.name: torch.cat(parts)}
        end = asks.first + asks.q.shape[1]
        rows = slice(asks.first, end)
        weights = branch.index_weights(self.layer)[rows].float() if own.weighted else None
        queries = branch.index_queries(self.layer)[rows].transpose(0, 1).float()
        return Asked(queries, weights, self._index[branch.name][: branch.start + end])

    def beside(self, data: Stored, seen: Tensor, segment: Segment, positions: Tensor, chosen: ReadSet | None) -> Beside:
        """The window as it is held, and the entries recorded beside it that queries of a segment read."""
        layer = segment.layout.layers[self.layer]
        if layer.pooled is None:
            return Beside(data, seen)
        if segment.name not in self._entries:
            parts = [self._context] if segment is self._context else [self._context, segment]
            found = [part.cache(self.layer, "pooled").float() for part in parts if part.holds(self.layer, "pooled")]
            self._entries = {segment.name: torch.cat(found) if found else torch.empty(0, layer.kv.k_dim)}
        units = None if chosen is None else chosen.index[:, 0]
        return beside(layer, data, seen, self._entries[segment.name], positions, units)

    def _write(self, seq: int, segment: Segment, first: int, count: int) -> None:
        rows = slice(first, first + count)
        k, v = (side(self.layer)[rows].transpose(0, 1)[None] for side in (segment.k, segment.v))
        self.cache.write(self.layer, [seq], k, v)
