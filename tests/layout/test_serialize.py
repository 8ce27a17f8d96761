"""Layouts survive JSON exactly; documents with mistakes do not survive reading."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import LayoutError
from kvassay.layout.config import from_config
from kvassay.layout.model import (
    DTYPE_BYTES,
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
from kvassay.layout.serialize import layout_from_dict, layout_to_dict
from tests.layout.configs import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_round_trip(name: str) -> None:
    layout = from_config(PUBLISHED[name])
    assert layout_from_dict(json.loads(json.dumps(layout_to_dict(layout)))) == layout


sizes = st.integers(1, 4096)
positive = st.floats(1e-3, 1e7)
storages = st.one_of(
    st.builds(KV, sizes, sizes, sizes), st.builds(Latent, sizes, sizes, st.booleans()), st.builds(Pooled, sizes, sizes)
)
components = st.builds(
    Component,
    storages,
    st.one_of(st.just(All()), st.builds(Window, sizes), st.builds(TopK, *[sizes] * 5)),
    st.none() | st.builds(IndexKeys, sizes, sizes, sizes, st.booleans()),
    st.integers(0, 10**6),
)
params = st.dictionaries(st.text(max_size=5), st.one_of(positive, sizes, st.booleans(), st.tuples(positive, positive)))
ropes = st.builds(
    Rope,
    positive,
    sizes,
    st.sampled_from(["default", "yarn"]),
    params.map(lambda given: tuple(sorted(given.items(), key=lambda item: item[0]))),
    st.booleans(),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    count = draw(st.integers(1, 4))
    layers = []
    for index in range(count):
        storing = [layer.index for layer in layers if layer.cache_of is None]
        source = draw(st.none() | st.sampled_from(storing)) if storing else None
        held = () if source is not None else tuple(draw(st.lists(components, min_size=1, max_size=2)))
        flags = [draw(st.booleans()) for _ in range(3)]
        cap = draw(st.none() | positive)
        rope = draw(st.none() | ropes)
        layers.append(Layer(index, draw(sizes), held, draw(positive), rope, flags[0], flags[1], cap, flags[2], source))
    return Layout(
        "made", tuple(layers), draw(sizes), draw(sizes), draw(sizes), draw(st.sampled_from(list(DTYPE_BYTES)))
    )


@given(layouts())
def test_any_layout_round_trips(layout: Layout) -> None:
    assert layout_from_dict(json.loads(json.dumps(layout_to_dict(layout)))) == layout


def test_the_document_is_plain_and_tagged() -> None:
    document = layout_to_dict(from_config("gemma-3-270m"))
    first = document["layers"][0]
    assert first["components"] == [
        {
            "storage": {"kind": "kv", "kv_heads": 1, "k_dim": 256, "v_dim": 256},
            "visibility": {"kind": "window", "size": 512},
            "index": None,
            "pending_elements": 0,
        }
    ]
    plain = {"kind": "default", "params": {}, "interleaved": False, "first": 0}
    assert first["rope"] == {"theta": 10_000.0, "dims": 256, **plain}


def changed(path: list[Any], value: object) -> dict[str, Any]:
    document = copy.deepcopy(layout_to_dict(from_config("gemma-3-270m")))
    at: Any = document
    for key in path[:-1]:
        at = at[key]
    if value is DELETE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return document


DELETE = object()
LAYER = ["layers", 3]
STORAGE = [*LAYER, "components", 0, "storage"]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["kv_dtyp"], "bfloat16", r"layout: unknown key 'kv_dtyp' \(did you mean 'kv_dtype'\?\)"),
        (["vocab_size"], DELETE, "layout: missing key 'vocab_size'"),
        (["vocab_size"], "many", "layout.vocab_size: must be int, not 'many'"),
        (["vocab_size"], True, "layout.vocab_size: must be int, not True"),
        (["layers"], {}, "layout.layers: must be a list"),
        (["layers", 3], 7, r"layout.layers\[3\]: must be an object"),
        ([*LAYER, "scale"], None, r"layers\[3\].scale: must be float, not None"),
        ([*LAYER, "windw"], 5, r"layers\[3\]: unknown key 'windw'"),
        ([*LAYER, "sinks"], 1, r"layers\[3\].sinks: must be bool, not 1"),
        ([*STORAGE, "kind"], "ring", r"storage: kind 'ring' is not allowed \(allowed: kv, latent, pooled\)"),
        ([*STORAGE, "kind"], "window", "storage: kind 'window' is not allowed"),
        ([*STORAGE, "k_dim"], DELETE, "storage: missing key 'k_dim'"),
        ([*STORAGE, "dim"], 3, "storage: unknown key 'dim'"),
        ([*LAYER, "rope", "params"], [], "rope.params: must be an object"),
        ([*LAYER, "components", 0, "index"], {"dims": 3}, "index: unknown key 'dims'"),
        ([*LAYER, "index"], 4, "layer 4 stands at position 3"),
        (["kv_dtype"], "int3", "unknown cache dtype 'int3'"),
    ],
)
def test_mistakes_are_named_by_their_path(path: list[Any], value: object, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        layout_from_dict(changed(path, value))
