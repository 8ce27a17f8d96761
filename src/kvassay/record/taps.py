"""Taps on the residual stream: what enters a decoder layer, and what its attention projections read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvassay.errors import RecordError
from kvassay.record.calling import decoder_layers
from kvassay.record.capture import Capture

STREAM_TAPS = ("hidden", "layer_input")


@contextmanager
def stream_taps(model: nn.Module, capture: Capture, wanted: Mapping[int, frozenset[str]]) -> Iterator[None]:
    """Hook the decoder layers named in `wanted` (layer -> tap kinds) so that `capture` gets their inputs.

    `hidden` is the residual stream as it enters the layer; `layer_input` what its attention module is called
    with, that is, after the input norm in all pre-norm families. Both are [tokens, hidden_size].
    """
    kinds = {index: kinds & frozenset(STREAM_TAPS) for index, kinds in wanted.items()}
    handles = []
    try:
        for index, layer in enumerate(decoder_layers(model) if any(kinds.values()) else ()):
            for kind in kinds.get(index, ()):
                module = layer if kind == "hidden" else _attention_of(layer, index)
                hook = _hook(capture, index, kind)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attention_of(layer: nn.Module, index: int) -> nn.Module:
    for module in layer.modules():
        if module is not layer and getattr(module, "layer_idx", None) == index:
            return module
    raise RecordError(f"layer {index}: no attention module to tap for 'layer_input'")


def _hook(capture: Capture, index: int, kind: str) -> Any:
    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        capture.add_stream(index, kind, states)

    return take
