"""One layer of a recorded trace as `replay_heads` takes it: the context and one of its questions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvassay.layout.model import Layer
from kvassay.trace.reader import Branch, Segment, Trace


class TracedLayer:
    """Rows of one layer; queries from the first one stored on. No target is known in recorded rows."""

    def __init__(self, trace: Trace, layer: int, branch: Branch) -> None:
        self.layer: Layer = trace.layout.layers[layer]
        self.context = trace.prefix.tokens
        self.question = self.natural = branch.tokens
        self._prefix, self._branch = trace.prefix, branch

    def keys(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, k_dim] of a KV head from position `first` on, all before the question or all in it."""
        segment, at = self._at(first)
        return segment.k(self.layer.index)[at : at + count, head].float()

    def values(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, v_dim], as `keys`."""
        segment, at = self._at(first)
        return segment.v(self.layer.index)[at : at + count, head].float()

    def queries(self, head: int, first: int, count: int) -> Tensor:
        """float32 [count, k_dim] of a query head; `EvidenceMissing` before the first that is stored."""
        segment, _ = self._at(first)
        return segment.q(self.layer.index, first)[:count, head].float()

    def aimed(self, head: int, first: int, count: int) -> Mapping[int, int]:
        """None known."""
        return {}

    def _at(self, first: int) -> tuple[Segment, int]:
        return (self._branch, first - self.context) if first >= self.context else (self._prefix, first)
