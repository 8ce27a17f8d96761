"""Layouts as plain JSON dicts, for trace headers and registries; reading is strict.

A dataclass becomes an object with its fields; where several classes are possible, its `kind` says which.
Every mistake is a `LayoutError` naming the path inside the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from kvassay.errors import LayoutError, did_you_mean
from kvassay.layout.model import (
    KV,
    All,
    Component,
    IndexKeys,
    Latent,
    Layer,
    Layout,
    Pooled,
    Rope,
    TopK,
    Window,
)

_KINDS: dict[str, type] = {
    "kv": KV,
    "latent": Latent,
    "pooled": Pooled,
    "all": All,
    "window": Window,
    "topk": TopK,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}
_STORAGE = ("kv", "latent", "pooled")
_VISIBILITY = ("all", "window", "topk")

_SCALARS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """Return `layout` as dicts, lists, numbers and strings only."""
    return {**_object(layout, skip="layers"), "layers": [_layer(layer) for layer in layout.layers]}


def layout_from_dict(document: Mapping[str, Any]) -> Layout:
    """Return the layout of `layout_to_dict`; `LayoutError` for unknown, missing or wrong entries."""
    given = _checked(document, Layout, "layout")
    layers = _list(given.pop("layers"), "layout.layers")
    parsed = tuple(_read_layer(layer, f"layout.layers[{at}]") for at, layer in enumerate(layers))
    return Layout(**_scalars(given, Layout, "layout"), layers=parsed)


def _layer(layer: Layer) -> dict[str, Any]:
    own = _object(layer, skip="components")
    if layer.rope is not None:
        params = {key: list(value) if isinstance(value, tuple) else value for key, value in layer.rope.params}
        own["rope"] = {**_object(layer.rope), "params": params}
    return {**own, "components": [_component(component) for component in layer.components]}


def _component(component: Component) -> dict[str, Any]:
    return {
        "storage": {"kind": _NAMES[type(component.storage)], **_object(component.storage)},
        "visibility": {"kind": _NAMES[type(component.visibility)], **_object(component.visibility)},
        "index": _object(component.index) if component.index else None,
        "pending_elements": component.pending_elements,
    }


def _object(value: Any, skip: str = "") -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name != skip}


def _read_layer(document: Any, where: str) -> Layer:
    given = _checked(document, Layer, where)
    components = _list(given.pop("components"), f"{where}.components")
    rope = given.pop("rope", None)
    return Layer(
        **_scalars(given, Layer, where),
        components=tuple(_read_component(item, f"{where}.components[{at}]") for at, item in enumerate(components)),
        rope=None if rope is None else _read_rope(rope, f"{where}.rope"),
    )


def _read_component(document: Any, where: str) -> Component:
    given = _checked(document, Component, where)
    index = given.get("index")
    return Component(
        storage=_read_kind(given["storage"], _STORAGE, f"{where}.storage"),
        visibility=_read_kind(given.get("visibility", {"kind": "all"}), _VISIBILITY, f"{where}.visibility"),
        index=None if index is None else _read_plain(index, IndexKeys, f"{where}.index"),
        pending_elements=_scalar(given.get("pending_elements", 0), "int", f"{where}.pending_elements"),
    )


def _read_rope(document: Any, where: str) -> Rope:
    given = _checked(document, Rope, where)
    params = given.pop("params", {})
    if not isinstance(params, Mapping):
        raise LayoutError(f"{where}.params: must be an object, not {params!r}")
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    return Rope(**_scalars(given, Rope, where), params=tuple(sorted(frozen.items())))


def _read_kind(document: Any, allowed: tuple[str, ...], where: str) -> Any:
    kind = document.get("kind") if isinstance(document, Mapping) else None
    if kind not in allowed:
        raise LayoutError(f"{where}: kind {kind!r} is not allowed (allowed: {', '.join(allowed)})")
    rest = {key: value for key, value in document.items() if key != "kind"}
    return _read_plain(rest, _KINDS[str(kind)], where)


def _read_plain(document: Any, cls: type, where: str) -> Any:
    return cls(**_scalars(_checked(document, cls, where), cls, where))


def _checked(document: Any, cls: type, where: str) -> dict[str, Any]:
    """Return the entries of an object of class `cls`, refusing unknown ones and demanding required ones."""
    if not isinstance(document, Mapping):
        raise LayoutError(f"{where}: must be an object, not {document!r}")
    assert is_dataclass(cls)
    known = {field.name: field for field in fields(cls)}
    for key in document:
        if key not in known:
            raise LayoutError(f"{where}: unknown key '{key}'{did_you_mean(str(key), known)}")
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in document:
            raise LayoutError(f"{where}: missing key '{name}'")
    return dict(document)


def _scalars(given: Mapping[str, Any], cls: type, where: str) -> dict[str, Any]:
    assert is_dataclass(cls)
    types = {field.name: str(field.type) for field in fields(cls)}
    return {key: _scalar(value, types[key], f"{where}.{key}") for key, value in given.items()}


def _scalar(value: Any, annotation: str, where: str) -> Any:
    """Return `value` if it fits a field annotated `int`, `float`, `str` or `bool`, with or without `None`."""
    name, _, optional = annotation.partition(" | ")
    if value is None and optional == "None":
        return None
    flag = isinstance(value, bool)
    if not isinstance(value, _SCALARS[name]) or (flag and name != "bool"):
        raise LayoutError(f"{where}: must be {annotation}, not {value!r}")
    return float(value) if name == "float" and isinstance(value, int) else value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise LayoutError(f"{where}: must be a list, not {value!r}")
    return list(value)
