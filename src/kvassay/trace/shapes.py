"""Which shards a trace has and what tensors each holds: one function for writer, reader and verification.

Per layer and token: `k`, `v` for K/V storage; `latent` for MLA, the vector as cached, [latent | rotary part], which
is key and, in its beginning, value; `pooled` one row per completed entry; and `q`. Queries of a latent layer are
stored absorbed, [q_heads, dim + rope_dim], so that a score is one dot product with the cached vector. A layer with
`cache_of` stores only `q`.

A layer with a selection index also has `index_keys` per token (or entry) and, for every recorded query,
`index_queries`, `index_weights` (of weighted heads) and the `selection` the model made of them: units by number, -1
where fewer than k are visible. Layers that read another's selection have none of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kvassay.errors import LayoutError, TraceError
from kvassay.layout.model import KV, Component, Latent, Layer, Layout, Pooled
from kvassay.trace.schema import PREFIX, LogitsSpec, Tap, TraceHeader

ELEMENT_BYTES = {"F32": 4, "F16": 2, "I32": 4}
"""Bytes per element of the safetensors dtypes a trace may hold."""
FLOAT_CODE = {"float32": "F32", "float16": "F16"}
SCORES = ("lse", "bucket")
"""Taps that hold logarithms of attention: float32 in every trace."""
CACHED = ("k", "v", "latent", "pooled", "index_keys")
"""Tensors of a layer's shard that the model's cache holds."""
SELECTION = "selection"
"""What the model's index chose, int32 [queries, sets, k]."""
INDEX = ("index_keys", "index_queries", "index_weights")
"""What a selection re-derives from: float32 in every trace, for the choice is between scores that are close."""
LAYER_TENSORS = tuple(dict.fromkeys((*CACHED, "q", *INDEX, SELECTION)))
"""Everything that a layer's shard may hold."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype (safetensors code) and shape of one stored tensor; the first axis counts rows."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape[0] * self.row_bytes


Shards = dict[str, dict[str, TensorSpec]]
"""Relative path -> tensor name -> spec."""


def layer_shard(segment: str, layer: int) -> str:
    """Relative path of a layer's shard."""
    return f"{segment}/layer_{layer:03d}.safetensors"


def tap_shard(segment: str, name: str) -> str:
    """Relative path of a tap's shard."""
    return f"{segment}/tap_{name}.safetensors"


def segment_start(header: TraceHeader, segment: str) -> int:
    """Position of the segment's first token."""
    return 0 if segment == PREFIX else header.prefix.tokens


def segment_shards(header: TraceHeader, segment: str) -> Shards:
    """Every shard of one segment with its tensors; shards and tensors without rows are left out."""
    start = segment_start(header, segment)
    tokens = header.segment_tokens(segment)
    code = FLOAT_CODE[header.dtype]
    shards: Shards = {f"{segment}/tokens.safetensors": {"ids": TensorSpec("I32", (tokens,))}}
    q_rows = start + tokens - max(start, header.q_from)
    for layer in header.layout.layers:
        shapes = _cache_shapes(layer, start, tokens) | _index_shapes(layer, q_rows)
        shapes["q"] = (q_rows, layer.q_heads, query_dim(header.layout, layer))
        specs = {name: TensorSpec(_code(name, code), shape) for name, shape in shapes.items()}
        shards[layer_shard(segment, layer.index)] = specs
    for tap in header.taps:
        rows = start + tokens - max(start, tap.first)
        tap_code = "F32" if tap.kind in SCORES else code
        spec = TensorSpec(tap_code, (rows, *tap_row(header.layout, tap)))
        shards[tap_shard(segment, tap.name)] = {"rows": spec}
    if header.logits is not None and segment != PREFIX:
        shards[f"{segment}/logits.safetensors"] = _logits_specs(header.logits, header.layout.vocab_size, tokens)
    filled = {path: {n: s for n, s in specs.items() if s.nbytes} for path, specs in shards.items()}
    return {path: specs for path, specs in filled.items() if specs}


def expected_shards(header: TraceHeader) -> Shards:
    """Every shard of the trace with its tensors."""
    found: Shards = {}
    for segment in header.segment_names:
        found |= segment_shards(header, segment)
    return found


def owner(layout: Layout, layer: Layer) -> Layer:
    """The layer whose cache `layer` reads: itself, or the one `cache_of` names."""
    return layer if layer.cache_of is None else layout.layers[layer.cache_of]


def query_dim(layout: Layout, layer: Layer) -> int:
    """Elements of one stored query head."""
    return _heads(layout, layer, "queries").k_dim


def value_dim(layout: Layout, layer: Layer) -> int:
    """Elements of one attention output head (a latent layer's output is absorbed: `dim`)."""
    return _heads(layout, layer, "outputs").v_dim


def _heads(layout: Layout, layer: Layer, what: str) -> KV | Latent:
    try:
        return owner(layout, layer).kv
    except LayoutError:
        raise TraceError(
            f"layer {layer.index} ({layer.kind}) keeps neither K/V nor a latent: {what} have no shape"
        ) from None


def _code(name: str, code: str) -> str:
    """The dtype of a layer's tensor in a trace whose elements are `code`."""
    return "I32" if name == SELECTION else "F32" if name in INDEX else code


def tap_row(layout: Layout, tap: Tap) -> tuple[int, ...]:
    """Shape of one row of a tap."""
    layer = layout.layers[tap.layer]
    if tap.kind in ("hidden", "layer_input"):
        return (layout.hidden_size,)
    if tap.kind == "lse":
        return (layer.q_heads,)
    if tap.size is not None:
        return (layer.q_heads, tap.size)
    if tap.kind == "output":
        return (layer.q_heads, value_dim(layout, layer))
    kv = owner(layout, layer).kv
    return (kv.kv_heads, kv.k_dim)


def _cache_shapes(layer: Layer, start: int, tokens: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for component in layer.components:
        for name, shape in _component_shapes(component, start, tokens).items():
            if name in shapes:
                raise TraceError(f"layer {layer.index} has two components that store '{name}'")
            shapes[name] = shape
    return shapes


def _component_shapes(component: Component, start: int, tokens: int) -> dict[str, tuple[int, ...]]:
    storage, rows = component.storage, tokens
    shapes: dict[str, tuple[int, ...]]
    if isinstance(storage, KV):
        shapes = {
            "k": (tokens, storage.kv_heads, storage.k_dim),
            "v": (tokens, storage.kv_heads, storage.v_dim),
        }
    elif isinstance(storage, Latent):
        shapes = {"latent": (tokens, 1, storage.row)}
    else:
        rows = _entries(storage, start, tokens)
        shapes = {"pooled": (rows, storage.dim)}
    if component.index is not None:
        shapes["index_keys"] = (rows, component.index.heads * component.index.dim)
    return shapes


def _index_shapes(layer: Layer, queries: int) -> dict[str, tuple[int, ...]]:
    """What is kept of each recorded query's selection, in a layer that makes one."""
    index, top = layer.index_keys, layer.topk
    if index is None or top is None:
        return {}
    weights = {"index_weights": (queries, index.q_heads)} if index.weighted else {}
    return {
        "index_queries": (queries, index.q_heads, index.dim),
        **weights,
        SELECTION: (queries, top.sets, top.k),
    }


def _entries(storage: Pooled, start: int, tokens: int) -> int:
    return (start + tokens) // storage.ratio - start // storage.ratio


def _logits_specs(logits: LogitsSpec, vocab: int, tokens: int) -> dict[str, TensorSpec]:
    if logits.k is None:
        return {"logits": TensorSpec("F32", (tokens, vocab))}
    return {
        "values": TensorSpec("F32", (tokens, logits.k)),
        "ids": TensorSpec("I32", (tokens, logits.k)),
        "logsumexp": TensorSpec("F32", (tokens,)),
    }
