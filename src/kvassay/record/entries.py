"""DeepSeek-V4 while it is recorded: a window of raw vectors and compressed entries arrive as one list of keys.

Attention is called with [window | entries]. The window holds what is left of the past and then the new tokens; entries
only ever grow at the end. Which entries a query may read says an index inside the compressor, not an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from kvassay.errors import RecordError
from kvassay.layout.model import Latent, Layer, Layout
from kvassay.record.calling import decoder_layers
from kvassay.record.indexers import IndexRows

if TYPE_CHECKING:
    from kvassay.record.capture import Capture


class Raw(NamedTuple):
    """What one call of attention adds to a layer's cache."""

    window: Tensor
    """The window with the new tokens, [1, window tokens, dim]; the new ones come last."""
    fresh: Tensor | None
    """Entries completed in this pass, [n, dim]; None in a layer without entries."""


def keeps_raw(layer: Layer) -> bool:
    """Whether the layer keeps vectors that are key and value in one, by DeepSeek-V4."""
    storage = layer.components[0].storage if layer.components else None
    return isinstance(storage, Latent) and storage.rotary_value


def split(layer: Layer, key: Tensor, start: int, tokens: int) -> Raw:
    """Take apart keys [1, seen, dim] of a call with `tokens` new ones from position `start` on.

    `RecordError` if their number is not that of the layout's window and entries.
    """
    part, window = layer.pooled, layer.window
    assert window is not None
    local = min(start, window - 1) + tokens
    ratio = 0 if part is None else part.ratio
    expected = local + ((start + tokens) // ratio if ratio else 0)
    if key.shape[1] != expected:
        raise RecordError(f"layer {layer.index}: attends to {key.shape[1]} keys, the layout says {expected}")
    fresh = key[0, local + start // ratio :] if ratio else None
    return Raw(key[:, :local], fresh)


def entry_indexers(model: Any, layout: Layout) -> dict[int, Any]:
    """The module that chooses among a layer's entries, by layer that has an index over them."""
    layers = decoder_layers(model) if any(layer.pooled for layer in layout.layers) else ()
    attention: dict[int, Any] = {index: layer.self_attn for index, layer in enumerate(layers)}
    chosen = [layer.index for layer in layout.layers if layer.pooled and layer.index_keys is not None]
    return {index: attention[index].compressor.indexer for index in chosen}


@contextmanager
def entry_taps(model: Any, capture: Capture) -> Iterator[None]:
    """While inside, `capture` gets what the compressors' indexes work from, and what they choose."""
    handles = []
    for index, indexer in entry_indexers(model, capture.layout).items():
        layer = capture.layout.layers[index]
        handles.append(indexer.scorer.register_forward_pre_hook(_scored(capture, layer)))
        handles.append(indexer.register_forward_hook(_chosen(capture, layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scored(capture: Capture, layer: Layer) -> Any:
    part = layer.pooled
    assert part is not None

    def take(scorer: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        queries, keys, hidden = arguments  # [1, n, heads, dim], [1, entries, dim], [1, n, hidden]
        fresh = keys[:, keys.shape[1] - capture.completed(part.ratio) :]
        weights: Tensor = scorer.weights_proj(hidden)  # type: ignore[operator]
        capture.add_index(layer.index, IndexRows(queries.transpose(1, 2), weights, fresh))

    return take


def _chosen(capture: Capture, layer: Layer) -> Any:
    def take(indexer: nn.Module, arguments: Any, chosen: Tensor) -> None:
        capture.add_selection(layer, chosen[0][:, None])

    return take
