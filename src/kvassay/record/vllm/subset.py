"""A part of a model: some of its layers, some of its KV heads with their query heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvassay.errors import RecordError
from kvassay.layout.model import KV, Component, Layer, Layout


def chosen_layers(layout: Layout, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers to record; `RecordError` for one that is not there, or whose cache's owner is left out."""
    if layers is None:
        return tuple(range(len(layout.layers)))
    for index in layers:
        if not 0 <= index < len(layout.layers):
            raise RecordError(f"layer {index}: the model has layers 0 to {len(layout.layers) - 1}")
        owner = layout.layers[index].cache_of
        if owner is not None and owner not in layers:
            raise RecordError(f"layer {index} reads the cache of layer {owner}: record that one, too")
    return tuple(layers)


def chosen_q_heads(layout: Layout, index: int, kv_heads: Sequence[int] | None) -> list[int] | None:
    """The query heads of a layer that read the chosen KV heads; None for all. `RecordError` for one not there."""
    if kv_heads is None:
        return None
    count = layout.source(index).kv.kv_heads
    if max(kv_heads) >= count:
        raise RecordError(f"KV head {max(kv_heads)}: layer {index} has heads 0 to {count - 1}")
    group = layout.layers[index].q_heads // count
    return [head * group + i for head in kv_heads for i in range(group)]


def part_of(layout: Layout, layers: Sequence[int], kv_heads: Sequence[int] | None) -> Layout:
    """The layout of the chosen part, its layers numbered from 0."""
    number = {index: i for i, index in enumerate(chosen_layers(layout, layers))}
    return replace(layout, layers=tuple(_part(layout, index, number, kv_heads) for index in number))


def _part(layout: Layout, index: int, number: dict[int, int], kv_heads: Sequence[int] | None) -> Layer:
    layer = layout.layers[index]
    heads = chosen_q_heads(layout, index, kv_heads)
    return replace(
        layer,
        index=number[index],
        q_heads=layer.q_heads if heads is None else len(heads),
        components=tuple(_narrow(part, kv_heads) for part in layer.components),
        cache_of=None if layer.cache_of is None else number[layer.cache_of],
    )


def _narrow(part: Component, kv_heads: Sequence[int] | None) -> Component:
    if kv_heads is None or not isinstance(part.storage, KV):
        return part
    return replace(part, storage=replace(part.storage, kv_heads=len(kv_heads)))
