"""Bytes a lane holds and reads, always at the layout's `kv_dtype`: one place for every count.

Unencoded elements are billed at `kv_dtype` however this machine holds them; encoded data, scales, padding,
per-slot bias, side data and policy state are billed as held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvassay.cache.data import Stored
from kvassay.cache.paged import PagedCache
from kvassay.replay.indexing import alive_in, index_elements
from kvassay.replay.lane import Lane

BIAS_BYTES = 4


@dataclass(frozen=True)
class Held:
    """Bytes of one lane, by layer, and of the policy's state.

    index, pooled: those of the layers' bytes that are keys of the model's own index, or compressed entries
    """

    layers: Mapping[int, float]
    state: float
    index: float = 0.0
    pooled: float = 0.0

    @property
    def total(self) -> float:
        """The whole model's, with the policy's state."""
        return sum(self.layers.values()) + self.state

    def within(self, scope: Iterable[int]) -> float:
        """Of some layers, with the policy's state."""
        return sum(self.layers[layer] for layer in scope) + self.state


def held(lane: Lane) -> Held:
    """What a lane holds now."""
    state = sum(t.numel() * t.element_size() for t in lane.memory.state.values())
    index = {layer: held_index(lane, layer) for layer in lane.layers}
    pooled = {layer: held_entries(lane, layer) for layer in lane.layers}
    layers = {layer: held_layer(lane, layer) + index[layer] + pooled[layer] for layer in lane.layers}
    return Held(layers, state + _query_ring(lane), sum(index.values()), sum(pooled.values()))


def held_index(lane: Lane, layer: int) -> float:
    """Bytes of a layer's index keys: of entries, or of the tokens that some KV head still holds; 0 without an index."""
    layout = lane.cache.layout
    if layout.layers[layer].index_keys is None:
        return 0.0
    if lane.compressors is not None:
        return lane.compressors.index_keys(layer).numel() * layout.element_bytes
    alive = alive_in(lane.cache, lane.seq, layer)
    return index_elements(layout, layer, lane.length, alive) * layout.element_bytes


def _query_ring(lane: Lane) -> float:
    """Bytes of the newest queries that a policy which decides while decoding has an engine keep, full or not."""
    layout = lane.cache.layout
    elements = sum(layout.layers[index].q_heads * layout.layers[index].kv.k_dim for index in lane.scope)
    return lane.policy.query_ring * elements * layout.element_bytes


def held_entries(lane: Lane, layer: int) -> float:
    """Bytes of a layer's compressed entries."""
    return (
        0.0 if lane.compressors is None else lane.compressors.entries(layer).numel() * lane.cache.layout.element_bytes
    )


def held_layer(lane: Lane, layer: int) -> float:
    """Bytes of one layer without its index and entries: live slots, encoded segments, bias and side data."""
    cache, kv = lane.cache, lane.cache.layout.layers[layer].kv
    slots = float(cache.ledger.slots(lane.seq, layer).counts.sum())
    encoded = sum(segment.nbytes for segment in cache.ledger.segments(lane.seq, layer))
    side = sum(t.numel() * t.element_size() for t in lane.side.get(layer, {}).values())
    bias = BIAS_BYTES * cache.bias_elements(lane.seq, layer)
    return slots * kv.row * cache.layout.element_bytes + encoded + side + bias


def read_bytes(cache: PagedCache, seq: int, layer: int, data: Stored, read: Tensor) -> tuple[float, float]:
    """Bytes and tokens per head that queries read: `read` is bool [kv_heads, queries, tokens].

    A token in an encoded segment is billed its share of the segment; both are summed over the queries.
    """
    kv = cache.layout.layers[layer].kv
    total = float(read.sum())
    raw = total if data.encoded is None else float((read & ~data.encoded[:, None]).sum())
    bytes_read = raw * kv.row * cache.layout.element_bytes
    segments = cache.ledger.segments(seq, layer)
    if segments and data.encoded is not None:
        held_tokens = float(data.encoded.sum())
        bytes_read += (total - raw) / held_tokens * sum(s.nbytes for s in segments)
    biases = sum(bias is not None for bias in (data.bias, data.inner_bias))
    bytes_read += biases * BIAS_BYTES * total
    return bytes_read, total / read.shape[0]
