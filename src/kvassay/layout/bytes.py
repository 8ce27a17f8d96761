"""The one function for the bytes of an unencoded cache, by kind of state, never one sum alone.

Totals are of one request: no block rounding, no replication over tensor-parallel ranks, no layers for
multi-token prediction. A windowed component holds `min(context, W)` tokens, a pooled one
`context // ratio` entries, everything else one state per token. Elements and index keys are counted at one
dtype, or as the records of a packed format (`layout.formats`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kvassay.errors import LayoutError
from kvassay.layout.formats import index_bytes, state_bytes
from kvassay.layout.model import KV, Component, Latent, Layout, Pooled, Window

PENDING_BYTES = 4
"""Bytes per element of pending compressor state, which engines keep in float32."""


@dataclass(frozen=True)
class ByteCount:
    """Bytes held by one request, kinds apart."""

    full: int = 0
    """K/V of layers that keep every token."""
    sliding: int = 0
    """Window-bounded state, K/V or raw vectors."""
    latent: int = 0
    """MLA latents."""
    index: int = 0
    """Keys of selection indices."""
    pooled: int = 0
    """Compressed entries, one per several tokens."""
    pending: int = 0
    """Bounded float32 state of open compressor windows. Not in `total`: it is not cache, and short-lived."""

    @property
    def total(self) -> int:
        """Bytes of cache; `pending` is not in it."""
        return self.full + self.sliding + self.latent + self.index + self.pooled


@dataclass(frozen=True)
class Growth:
    """Bytes that one more token costs, kinds apart; fractions of a byte come from pooled state."""

    full: float = 0.0
    latent: float = 0.0
    index: float = 0.0
    pooled: float = 0.0
    sliding: float = 0.0
    """Bytes per token while the context is still inside the windows; not in `growing`."""

    @property
    def growing(self) -> float:
        """Bytes per token once every window is full."""
        return self.full + self.latent + self.index + self.pooled


def bytes_at(layout: Layout, context: int, kv_dtype: str | None = None, *, hybrid_manager: bool = True) -> ByteCount:
    """Return the bytes one request of `context` tokens holds.

    Args:
        layout: the model's cache.
        context: tokens in the cache, at least 0.
        kv_dtype: element dtype or packed format; the layout's own dtype if not given.
        hybrid_manager: with `False`, sliding layers keep every token, as an engine without a hybrid
            cache manager allocates them (they stay under `sliding`).

    Raises:
        LayoutError: negative context, or a dtype or format that is unknown or does not fit.
    """
    if context < 0:
        raise LayoutError(f"context is {context} tokens, must be at least 0")
    held = {field.name: 0.0 for field in fields(ByteCount)}
    for component in _components(layout):
        states = states_of(component, context, hybrid_manager)
        held[kind_of(component)] += states * state_bytes(component.storage, kv_dtype or layout.kv_dtype)
        held["index"] += states * index_bytes(component.index, kv_dtype or layout.kv_dtype)
        held["pending"] += component.pending_elements * PENDING_BYTES
    return ByteCount(**{kind: math.ceil(count) for kind, count in held.items()})


def bytes_per_token(layout: Layout, kv_dtype: str | None = None) -> Growth:
    """Return the bytes one more token adds, by kind, at an element dtype or in a packed format."""
    rates = {field.name: 0.0 for field in fields(Growth)}
    for component in _components(layout):
        storage = component.storage
        tokens = storage.ratio if isinstance(storage, Pooled) else 1
        rates[kind_of(component)] += state_bytes(storage, kv_dtype or layout.kv_dtype) / tokens
        rates["index"] += index_bytes(component.index, kv_dtype or layout.kv_dtype) / tokens
    return Growth(**rates)


def _components(layout: Layout) -> Iterator[Component]:
    for layer in layout.layers:
        yield from layer.components


def kind_of(component: Component) -> str:
    """Return under which kind of `ByteCount` a component is counted: its index keys are counted apart."""
    if isinstance(component.visibility, Window):
        return "sliding"
    kinds = {KV: "full", Latent: "latent", Pooled: "pooled"}
    return kinds[type(component.storage)]


def states_of(component: Component, context: int, hybrid_manager: bool = True) -> int:
    """Return how many states (tokens, or entries of several tokens) the component holds."""
    visibility, storage = component.visibility, component.storage
    tokens = min(context, visibility.size) if isinstance(visibility, Window) and hybrid_manager else context
    return tokens // storage.ratio if isinstance(storage, Pooled) else tokens


def index_elements(component: Component) -> int:
    """Return the index-key elements per state; 0 without an index."""
    return component.index.dim * component.index.heads if component.index else 0
