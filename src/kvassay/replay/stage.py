"""One layer of a trace in a paged cache of its own: what the open loop holds at a time."""

from __future__ import annotations

from kvassay.cache.ops import GroupSpec
from kvassay.cache.paged import PagedCache
from kvassay.trace.reader import Branch, Segment, Trace


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
        self.cache = PagedCache(trace.layout, [spec], 1 + 4 * per_copy)
        self.dense, _ = self.cache.create([])
        self.cache.extend(self.dense, [0] * context)
        if fill:
            self._write(self.dense, trace.prefix, 0, context)

    def append(self, seq: int, branch: Branch, first: int, count: int, reuse: int | None = None) -> None:
        """Give a sequence the branch's tokens `first` to `first + count - 1`, with their recorded keys and values."""
        self.cache.extend(seq, [0] * count, reuse=reuse)
        self._write(seq, branch, first, count)

    def _write(self, seq: int, segment: Segment, first: int, count: int) -> None:
        rows = slice(first, first + count)
        k, v = (side(self.layer)[rows].transpose(0, 1)[None] for side in (segment.k, segment.v))
        self.cache.write(self.layer, [seq], k, v)
