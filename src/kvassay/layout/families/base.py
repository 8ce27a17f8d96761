"""What the family readers share: layer types, rotary parameters, the common layer shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvassay.errors import UnsupportedModel
from kvassay.layout.model import KV, All, Component, IndexKeys, Layer, Rope, TopK, Window
from kvassay.layout.raw import Raw

FULL = "full_attention"
SLIDING = "sliding_attention"

_ROPE_NAMES = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


@dataclass(frozen=True)
class Family:
    """How one model type is read.

    `defaults` holds only keys that published checkpoints leave to the class; every other key is required.
    `per_layer` names the keys that the reader takes from `per_layer_config`, where it may override any.
    """

    read: Callable[[Raw], tuple[Layer, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    per_layer: frozenset[str] = frozenset()


def overrides(raw: Raw) -> dict[int, Raw]:
    """Return `per_layer_config`: by layer, the keys that differ from the global ones.

    Its keys are layer indices, written as numbers or as zero-padded text.
    """
    name = f"{raw.name}: per_layer_config"
    layers = {}
    for key, value in raw.table("per_layer_config").items():
        if not str(key).isdecimal() or not isinstance(value, Mapping):
            raise raw.error(f"key 'per_layer_config' must map layer indices to objects, not {key!r} to {value!r}")
        layers[int(key)] = Raw(value, f"{name}: {key}", raw.model_type)
    return layers


def check_overrides(raw: Raw, known: frozenset[str]) -> None:
    """Raise `UnsupportedModel` if a layer overrides a key that the reader would not notice, or is not there."""
    for index, layer in overrides(raw).items():
        count = raw.integer("num_hidden_layers")
        if index >= count + raw.integer("num_nextn_predict_layers", 0, minimum=0):
            raise raw.error(f"key 'per_layer_config' names layer {index}, key 'num_hidden_layers' is {count}")
        for key in layer.data:
            if key not in known:
                allowed = ", ".join(sorted(known)) or "none"
                raise UnsupportedModel(f"{layer.name}: key '{key}' may not differ by layer here (allowed: {allowed})")


def layer_types(raw: Raw, allowed: Iterable[str], default: Callable[[int], str] | None = None) -> list[str]:
    """Return the type of every layer.

    An explicit `layer_types` wins; else `default(index)`. Entries for trailing multi-token-prediction
    layers (as many as `num_nextn_predict_layers`) are cut off: those layers are not part of the model body.
    """
    count = raw.integer("num_hidden_layers")
    derived = [default(index) for index in range(count)] if default else None
    types = trim(raw, "layer_types", raw.items("layer_types", derived) if derived else raw.items("layer_types"))
    unknown = sorted({str(name) for name in types} - set(allowed))
    if unknown:
        raise UnsupportedModel(
            f"{raw.name}: layer type '{unknown[0]}' is not one that model type '{raw.model_type}' may have "
            f"(allowed: {', '.join(sorted(allowed))})"
        )
    return types


def trim(raw: Raw, key: str, values: list[Any]) -> list[Any]:
    """Return one value per layer of the body, dropping declared multi-token-prediction entries."""
    count = raw.integer("num_hidden_layers")
    extra = raw.integer("num_nextn_predict_layers", 0, minimum=0)
    if len(values) == count + extra:
        return values[:count]
    if len(values) != count:
        raise raw.error(f"key '{key}' has {len(values)} entries for {count} layers (key 'num_hidden_layers')")
    return values


def spelt_types(
    raw: Raw, allowed: Iterable[str], key: str, spelt: Callable[[], list[str]], given: bool | None = None
) -> list[str]:
    """Return the layer types by `layer_types`, by another key's spelling of them, or by both if they agree.

    given: whether the file has `key`, where it is not simply one of its own
    """
    found = {"layer_types": layer_types(raw, allowed)} if raw.has("layer_types") else {}
    if not found or (raw.has(key) if given is None else given):
        found[key] = spelt()
    return agreeing(raw, found)


def said_once(raw: Raw, values: Mapping[str, Any]) -> Any:
    """Return the value that keys which mean the same give, None for an absent one; `LayoutError` if two differ."""
    (first, value), *others = [(key, value) for key, value in values.items() if value is not None] or [("", None)]
    for key, other in others:
        if other != value:
            raise raw.error(f"keys '{first}' and '{key}' contradict each other: {value} and {other}")
    return value


def agreeing(raw: Raw, spellings: Mapping[str, list[str]]) -> list[str]:
    """Return the layer types that all of the given keys spell; `LayoutError` at the first layer where two differ."""
    (first, types), *others = spellings.items()
    for key, values in others:
        for index, (kind, other) in enumerate(zip(types, values, strict=True)):
            if kind != other:
                raise raw.error(
                    f"keys '{first}' and '{key}' contradict each other: layer {index} is {kind} and {other}"
                )
    return types


def head_dim(raw: Raw) -> int:
    """Return `head_dim` as given; only where it is absent, hidden size over heads."""
    if raw.has("head_dim"):
        return raw.integer("head_dim")
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    if hidden % heads:
        raise raw.error(f"missing key 'head_dim', and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def kv_heads(raw: Raw) -> int:
    """Return the KV heads; a file without the key means as many as query heads (multi-head attention)."""
    return raw.integer("num_key_value_heads", raw.integer("num_attention_heads"))


def rope_params(raw: Raw, kind: str, scaled: bool = True) -> dict[str, Any]:
    """Return the rotary parameters of layers of type `kind`.

    They are nested by type, or one flat set, or the older `rope_scaling`; the latter two are left out
    where the family scales only some layers (`scaled=False`).
    """
    given = raw.table("rope_parameters")
    if any(isinstance(value, Mapping) for value in given.values()):
        return dict(given.get(kind) or {})
    if not scaled:
        return {}
    return raw.table("rope_scaling") or given


def rope(
    raw: Raw,
    dims: int,
    kind: str = FULL,
    *,
    scaled: bool = True,
    theta: float | None = None,
    partial: float | None = None,
    whole: bool = False,
    interleaved: bool = False,
) -> Rope:
    """Return the rotary embedding of layers of type `kind` over `dims` elements of a head.

    `theta` and `partial` are what the family says where the parameters of the type do not; without a
    `theta` the key `rope_theta` is required. `whole` means that `dims` is a rotary slice of its own, which
    a partial factor over the head (saying the same again) does not cut further.
    """
    params = rope_params(raw, kind, scaled)
    base = params.get("rope_theta") or theta or raw.number("rope_theta")
    share = params.get("partial_rotary_factor") or partial or raw.number("partial_rotary_factor", 1.0)
    share = 1.0 if whole else share
    if not 0 < share <= 1:
        raise raw.error(f"{share} of the head dimension {dims} cannot rotate (allowed: above 0, up to 1)")
    rest = {key: _frozen(value) for key, value in params.items() if key not in _ROPE_NAMES}
    return Rope(
        theta=float(base),
        dims=int(dims * share),
        kind=str(params.get("rope_type") or params.get("type") or "default"),
        params=tuple(sorted(rest.items())),
        interleaved=interleaved,
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def yarn_scale(raw: Raw, qk_dim: int) -> float:
    """Return the logit scale of an MLA layer: `qk_dim ** -0.5`, times YaRN's mscale squared if declared."""
    params = rope_params(raw, FULL)
    kind = params.get("rope_type") or params.get("type") or "default"
    mscale = params.get("mscale_all_dim") or 0
    scale = float(qk_dim**-0.5)
    if kind == "default" or not mscale:
        return scale
    factor = float(params.get("factor") or 1.0)
    stretch = 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * stretch * stretch


def kv_component(
    raw: Raw,
    q_heads: int,
    storage: KV,
    *,
    window: int | None = None,
    top: TopK | None = None,
    index: IndexKeys | None = None,
) -> Component:
    """Return the K/V component of a layer; `LayoutError` if the query heads do not divide over the KV heads."""
    if q_heads % storage.kv_heads:
        raise raw.error(f"{q_heads} query heads do not divide over {storage.kv_heads} KV heads")
    visibility = Window(window) if window is not None else top or All()
    return Component(storage, visibility, index)
