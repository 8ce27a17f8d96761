"""What a model's KV cache looks like: layers as lists of components, with geometry and bytes.

No torch here. A layer is a list of *components*, each with a storage (what is kept per token), a
visibility (which of it a query may read) and optional index keys. The kinds people say ("full",
"sliding", "MLA", "block-sparse") are names for common lists; see `Layer.kind`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvassay.errors import LayoutError, did_you_mean

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}


def dtype_bytes(name: str) -> float:
    """Return the bytes of one cache element of dtype `name`; `LayoutError` names the known ones."""
    if name not in DTYPE_BYTES:
        raise LayoutError(f"unknown cache dtype '{name}'{did_you_mean(name, DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


@dataclass(frozen=True)
class KV:
    """Separate keys and values per KV head; `k_dim` and `v_dim` may differ (MiMo: 192 and 128)."""

    kv_heads: int
    k_dim: int
    v_dim: int

    @property
    def row(self) -> int:
        """Stored elements per token and KV head."""
        return self.k_dim + self.v_dim

    @property
    def elements(self) -> int:
        """Stored elements per token."""
        return self.kv_heads * self.row


@dataclass(frozen=True)
class Latent:
    """One MLA vector per token, shared by all heads: `dim` latent plus `rope_dim` rotary elements.

    To attention (absorbed) it is one KV head: the whole vector is the key, its first `v_dim` elements are the value.
    rotary_value: the rotary part is of the value too, so that key and value are one (DeepSeek-V4)
    """

    dim: int
    rope_dim: int
    rotary_value: bool = False

    @property
    def kv_heads(self) -> int:
        """One, for all query heads."""
        return 1

    @property
    def k_dim(self) -> int:
        """Elements of the key: all that is stored."""
        return self.dim + self.rope_dim

    @property
    def v_dim(self) -> int:
        """Elements of the value: the latent, which is the beginning of the key and not stored again; or all of it."""
        return self.k_dim if self.rotary_value else self.dim

    @property
    def row(self) -> int:
        """Stored elements per token, of its one head."""
        return self.k_dim

    @property
    def elements(self) -> int:
        """Stored elements per token."""
        return self.row


@dataclass(frozen=True)
class Pooled:
    """One vector of `dim` elements per `ratio` tokens (DeepSeek-V4's compressed entries)."""

    ratio: int
    dim: int

    @property
    def elements(self) -> int:
        """Stored elements per entry, that is per `ratio` tokens."""
        return self.dim


Storage = KV | Latent | Pooled


@dataclass(frozen=True)
class Window:
    """Only the last `size` tokens are visible, the query's own included: `0 <= i - j < size`."""

    size: int


@dataclass(frozen=True)
class TopK:
    """Only `k` units of `unit` tokens are visible per query, chosen by an index.

    sets: lists per query; the query heads share them out in order (MiniMax-M3: one list per KV head)
    first, last: units at the start, and at the end up to the query's own, that are always chosen, inside `k`
    """

    k: int
    unit: int = 1
    sets: int = 1
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class All:
    """Every earlier token and the query's own are visible."""


Visibility = All | Window | TopK


@dataclass(frozen=True)
class IndexKeys:
    """Keys of a selection index kept beside the cache: `heads` vectors of `dim` per token (or entry).

    q_heads: index queries per token that score them; they are not kept
    weighted: the heads' scores are summed by weights that come with each query (DeepSeek)
    """

    dim: int
    heads: int = 1
    q_heads: int = 1
    weighted: bool = False


@dataclass(frozen=True)
class Component:
    """One kind of state a layer keeps."""

    storage: Storage
    visibility: Visibility = field(default_factory=All)
    index: IndexKeys | None = None
    pending_elements: int = 0
    """Elements of bounded state not yet folded into an entry (V4's open compressor window)."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a layer: `dims` of the head dimension rotate; `params` are the HF parameters.

    It says how cached keys are laid out, which may be otherwise than what the projections put out.
    """

    theta: float
    dims: int
    kind: str = "default"
    params: tuple[tuple[str, Any], ...] = ()
    interleaved: bool = False
    """Pairs are neighbours (x0, x1) instead of halves (x0, x[dims / 2])."""
    first: int = 0
    """First element that rotates."""


@dataclass(frozen=True)
class Layer:
    """One attention layer; `components` is empty exactly when it only reads another layer's cache."""

    index: int
    q_heads: int
    components: tuple[Component, ...]
    scale: float
    rope: Rope | None = None
    qk_norm: bool = False
    v_norm: bool = False
    softcap: float | None = None
    sinks: bool = False
    cache_of: int | None = None

    @property
    def kind(self) -> str:
        """The common name of this layer's component list."""
        if self.cache_of is not None:
            return "shared"
        first = self.components[0]
        if len(self.components) > 1 or isinstance(first.storage, Pooled):
            return "pooled"
        if isinstance(first.visibility, Window):
            return "sliding"
        if isinstance(first.storage, Latent):
            return "latent"
        return "block_sparse" if isinstance(first.visibility, TopK) else "full"

    @property
    def kv(self) -> KV | Latent:
        """Geometry of the layer's keys and values by KV head; `LayoutError` if it holds none of its own."""
        for component in self.components:
            if isinstance(component.storage, KV | Latent):
                return component.storage
        raise LayoutError(f"layer {self.index} ({self.kind}) holds no K/V component of its own")

    @property
    def pooled(self) -> Pooled | None:
        """The layer's compressed entries, None if it keeps none."""
        return next((part.storage for part in self.components if isinstance(part.storage, Pooled)), None)

    @property
    def index_keys(self) -> IndexKeys | None:
        """The layer's own selection index, None without one."""
        return next((component.index for component in self.components if component.index is not None), None)

    @property
    def topk(self) -> TopK | None:
        """What an index lets a query read of the layer; None if none restricts it."""
        return next((part.visibility for part in self.components if isinstance(part.visibility, TopK)), None)

    @property
    def window(self) -> int | None:
        """Window size in tokens (the query's own included) if the first component is windowed."""
        first = self.components[0].visibility if self.components else None
        return first.size if isinstance(first, Window) else None

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv.kv_heads


@dataclass(frozen=True)
class Layout:
    """A whole model's cache: what the recorder stores, the cache holds and the byte counts rest on."""

    model_type: str
    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    native_context: int
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Raise `LayoutError` if layers are out of order, share wrongly, or the dtype is unknown."""
        dtype_bytes(self.kv_dtype)
        if not self.layers:
            raise LayoutError(f"{self.model_type}: a layout needs at least one layer")
        for position, layer in enumerate(self.layers):
            if layer.index != position:
                raise LayoutError(f"{self.model_type}: layer {layer.index} stands at position {position}")
            self._check_sharing(layer)

    def _check_sharing(self, layer: Layer) -> None:
        if (layer.cache_of is None) != bool(layer.components):
            raise LayoutError(
                f"{self.model_type}: layer {layer.index} must either store components or name a cache_of layer"
            )
        if layer.cache_of is None:
            return
        earlier = 0 <= layer.cache_of < layer.index
        if not earlier or self.layers[layer.cache_of].cache_of is not None:
            raise LayoutError(
                f"{self.model_type}: layer {layer.index} reads layer {layer.cache_of}, "
                "which is not an earlier layer that stores its own cache"
            )

    @property
    def element_bytes(self) -> float:
        """Bytes of one unencoded cache element at `kv_dtype`."""
        return dtype_bytes(self.kv_dtype)

    @property
    def storing(self) -> tuple[Layer, ...]:
        """The layers that hold a cache of their own, in order."""
        return tuple(layer for layer in self.layers if layer.cache_of is None)

    def source(self, index: int) -> Layer:
        """Return the layer whose cache layer `index` reads: itself, or the one it shares (`cache_of`)."""
        layer = self.layers[index]
        return layer if layer.cache_of is None else self.layers[layer.cache_of]

    def selector(self, index: int) -> Layer | None:
        """Return the layer whose index selects what layer `index` reads: itself, or the last one before it that has
        an index (GLM-5.2's shared selections); None where nothing is selected."""
        if self.layers[index].topk is None:
            return None
        return next((layer for layer in reversed(self.layers[: index + 1]) if layer.index_keys is not None), None)
