"""KV cache groups as vLLM plans them where every layer's page has the same bytes.

All groups draw blocks from one pool, so a block must weigh the same in each: the layer type with fewer
bytes per token gets a larger block, or padding where the sizes do not divide; and every group has the
same number of layers, padded if need be. Read from `vllm.v1.core.kv_cache_utils` of vLLM 0.32
(`unify_kv_cache_spec_page_size`, `_get_kv_cache_groups_uniform_page_size`). Layouts whose blocks are
strided over all layers take vLLM's packed path, which is not planned here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvassay.errors import LayoutError, UnsupportedModel
from kvassay.layout.model import Latent, Layer, Layout, Pooled, Storage, dtype_bytes

# vLLM's heuristic: up to this ratio of layer counts, pad the rarer type up instead of splitting the other.
_PAD_UP_TO = 1.5


@dataclass(frozen=True)
class Group:
    """Layers that share one block table per sequence."""

    index: int
    layers: tuple[int, ...]
    """Layers that store their cache in this group's blocks."""
    padding: int
    """Layers' worth of unused bytes in every block."""
    block_size: int
    """Tokens per block."""
    window: int | None
    """Window of every layer in the group, the query's own token included; `None` keeps every token."""
    page_bytes: int
    """Bytes of one block of one layer, the widest if the layers of a sole group differ."""
    page_padding: int = 0
    """Unused bytes in each page, where pages could not be made equal by block size."""
    block_bytes: int = 0
    """Bytes of one block over all layers of the group, padding and index keys included."""
    readers: tuple[int, ...] = ()
    """Layers that store nothing and read a layer of this group through the same table."""


@dataclass(frozen=True)
class _Page:
    """What one layer asks of a block."""

    layer: int
    storage: Storage
    window: int | None
    block_size: int
    bytes: int
    index_bytes: int = 0
    padding: int = 0

    @property
    def type(self) -> tuple[object, ...]:
        """Layers of equal type may share a group."""
        return self.storage, self.window, self.block_size, self.padding


def paged_part(layout: Layout) -> Layout:
    """Return the layout without compressed entries and what indexes them: what a cache of equal pages can hold.

    Of DeepSeek-V4 that is the windows of raw vectors. Any other layout is returned as it is.
    """
    layers = [
        replace(layer, components=tuple(part for part in layer.components if not isinstance(part.storage, Pooled)))
        for layer in layout.layers
    ]
    return replace(layout, layers=tuple(layers))


def plan_groups(layout: Layout, block_size: int = 16, kv_dtype: str | None = None) -> tuple[Group, ...]:
    """Return the groups of a model in vLLM's order, by first layer of each type.

    Args:
        layout: the model's cache.
        block_size: tokens per block of the layer type with the most bytes per token.
        kv_dtype: element dtype; the layout's own if not given.

    Raises:
        UnsupportedModel: the model cannot be planned on this path (compressed entries, latents that would
            need padding, index keys beside windows), with the reason.
        LayoutError: a block of no tokens, or of a broken number of bytes.
    """
    if block_size < 1:
        raise LayoutError(f"block_size is {block_size}, must be at least 1")
    width = dtype_bytes(kv_dtype or layout.kv_dtype)
    pages = [_page(layout, layer, block_size, width) for layer in layout.storing]
    if len({page.window for page in pages}) == 1:
        groups = [_sole_group(pages)]
    else:
        groups = _equal_groups(_equal_pages(layout, pages))
    return tuple(_with_readers(layout, group) for group in groups)


def _page(layout: Layout, layer: Layer, block_size: int, width: float) -> _Page:
    if len(layer.components) > 1 or isinstance(layer.components[0].storage, Pooled):
        raise UnsupportedModel(
            f"{layout.model_type}: layer {layer.index} keeps compressed entries beside its window; vLLM plans "
            "such models on its packed path, not with equal pages"
        )
    component = layer.components[0]
    size = block_size * component.storage.elements * width
    index = block_size * component.index.dim * component.index.heads * width if component.index else 0
    if size != int(size) or index != int(index):
        raise LayoutError(f"{layout.model_type}: a block of {block_size} tokens is not a whole number of bytes")
    return _Page(layer.index, component.storage, layer.window, block_size, int(size), int(index))


def _sole_group(pages: list[_Page]) -> Group:
    """Return one group for layers that all need the same token slots, whatever their shapes."""
    return Group(
        index=0,
        layers=tuple(page.layer for page in pages),
        padding=0,
        block_size=pages[0].block_size,
        window=pages[0].window,
        page_bytes=max(page.bytes for page in pages),
        block_bytes=sum(page.bytes + page.index_bytes for page in pages),
    )


def _equal_pages(layout: Layout, pages: list[_Page]) -> list[_Page]:
    """Return the pages grown to the largest: by block size where it divides, else by padding."""
    widest = max(page.bytes for page in pages)
    grown = []
    for page in pages:
        if page.index_bytes:
            raise UnsupportedModel(
                f"{layout.model_type}: layer {page.layer} keeps index keys in a model with window layers; "
                "vLLM has no plan with equal pages for that"
            )
        ratio, rest = divmod(widest, page.bytes)
        if not rest:
            grown.append(replace(page, block_size=page.block_size * ratio, bytes=widest))
        elif isinstance(page.storage, Latent) and page.window is None:
            raise UnsupportedModel(
                f"{layout.model_type}: layer {page.layer} has latent pages of {page.bytes} B, which do not divide "
                f"{widest} B, and MLA pages cannot be padded: they are indexed in whole token rows"
            )
        else:
            grown.append(replace(page, bytes=widest, padding=widest - page.bytes))
    return grown


def _equal_groups(pages: list[_Page]) -> list[Group]:
    """Return groups of equal layer counts, layers of a type dealt out in turn as vLLM deals them."""
    types: dict[tuple[object, ...], list[_Page]] = {}
    for page in pages:
        types.setdefault(page.type, []).append(page)
    counts = [len(members) for members in types.values()]
    size = max(counts) if max(counts) < min(counts) * _PAD_UP_TO else min(counts)
    groups: list[Group] = []
    for members in types.values():
        parts = -(-len(members) // size)
        groups += [_group(len(groups) + part, members[part::parts], size) for part in range(parts)]
    return groups


def _group(index: int, pages: list[_Page], size: int) -> Group:
    first = pages[0]
    return Group(
        index=index,
        layers=tuple(page.layer for page in pages),
        padding=size - len(pages),
        block_size=first.block_size,
        window=first.window,
        page_bytes=first.bytes,
        page_padding=first.padding,
        block_bytes=size * first.bytes,
    )


def _with_readers(layout: Layout, group: Group) -> Group:
    readers = tuple(layer.index for layer in layout.layers if layer.cache_of in group.layers)
    return replace(group, readers=readers) if readers else group
