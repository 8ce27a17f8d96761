"""What `kvassay inspect` shows: a model's cache as one dict (for JSON) and as rich tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Group as Renderables
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvassay.errors import UnsupportedModel
from kvassay.layout.bytes import bytes_at, bytes_per_token
from kvassay.layout.groups import plan_groups
from kvassay.layout.model import KV, Component, Latent, Layer, Layout, TopK, Window
from kvassay.layout.refusals import spans
from kvassay.layout.registry.rows import Row

DEFAULT_CONTEXTS = (8192, 32_768, 131_072, 262_144, 500_000, 1_048_576)
_KINDS = ("full", "sliding", "latent", "index", "pooled")


def inspect_report(
    layout: Layout,
    name: str,
    contexts: Sequence[int] = DEFAULT_CONTEXTS,
    block_size: int = 16,
    row: Row | None = None,
) -> dict[str, Any]:
    """Return all that is known of the cache of `layout` as plain data.

    Each row of `contexts` says whether it lies beyond the native context, where it is a question of
    capacity only. `groups` is replaced by `groups_refused` if the model has no plan with equal pages. With a
    registry `row`, its facts are under `registry`, and each context has the bytes in the formats it is shipped in.
    """
    growth = bytes_per_token(layout)
    formats = shipped_formats(layout, row)
    return {
        "model": name,
        "model_type": layout.model_type,
        "kv_dtype": layout.kv_dtype,
        "native_context": layout.native_context,
        "layers": len(layout.layers),
        "storing_layers": len(layout.storing),
        "shapes": _shapes(layout),
        "bytes_per_token": {**asdict(growth), "growing": growth.growing},
        "shipped_bytes_per_token": {name: bytes_per_token(layout, name).growing for name in formats},
        **({"registry": _facts(row)} if row else {}),
        **_groups(layout, block_size),
        "contexts": [context_row(layout, context, formats) for context in contexts],
    }


def shipped_formats(layout: Layout, row: Row | None) -> list[str]:
    """Return the names of the formats a row is shipped in, other than the layout's own dtype."""
    return [shipped.name for shipped in row.formats if shipped.name != layout.kv_dtype] if row else []


def _facts(row: Row) -> dict[str, Any]:
    facts = {**asdict(row), "config": dict(row.config)}
    return {key: value for key, value in facts.items() if key not in ("id", "title")}


def context_row(layout: Layout, context: int, formats: Sequence[str] = ()) -> dict[str, Any]:
    """Return the bytes at one context by kind, at the layout's dtype and under `shipped` in each of `formats`."""
    return {
        "context": context,
        "beyond_native_context": context > layout.native_context,
        **_held(layout, context, layout.kv_dtype),
        "shipped": {name: _held(layout, context, name) for name in formats},
    }


def _held(layout: Layout, context: int, name: str) -> dict[str, int]:
    count = bytes_at(layout, context, name)
    without = bytes_at(layout, context, name, hybrid_manager=False).total
    return {**asdict(count), "total": count.total, "total_without_hybrid_manager": without}


def _groups(layout: Layout, block_size: int) -> dict[str, Any]:
    try:
        return {"groups": [asdict(group) for group in plan_groups(layout, block_size)]}
    except UnsupportedModel as error:
        return {"groups_refused": str(error)}


def _shapes(layout: Layout) -> list[dict[str, Any]]:
    """Return one row per distinct layer shape, in order of first appearance."""
    described = [(_describe(layout, layer), layer.index) for layer in layout.layers]
    order = {key: at for at, (key, _) in reversed(list(enumerate(described)))}
    described.sort(key=lambda item: (order[item[0]], item[1]))
    return [
        {**dict(key), "layers": [index for _, index in rows]}
        for key, rows in groupby(described, key=lambda item: item[0])
    ]


def _describe(layout: Layout, layer: Layer) -> tuple[tuple[str, Any], ...]:
    stored = "; ".join(_component(component) for component in layer.components)
    shape = {
        "kind": layer.kind,
        "q_heads": layer.q_heads,
        "stores": stored or f"nothing, reads layer {layer.cache_of}",
        "scale": layer.scale,
        "rope": f"{layer.rope.kind} {layer.rope.theta:g}, {layer.rope.dims} dims" if layer.rope else "none",
        "softcap": layer.softcap,
        "sinks": layer.sinks,
    }
    return tuple(shape.items())


def _component(component: Component) -> str:
    storage, visibility = component.storage, component.visibility
    if isinstance(storage, KV):
        text = f"{storage.kv_heads} heads x (K {storage.k_dim} + V {storage.v_dim})"
    elif isinstance(storage, Latent):
        text = f"latent {storage.dim} + {storage.rope_dim}"
    else:
        text = f"1 entry of {storage.dim} per {storage.ratio} tokens"
    if isinstance(visibility, Window):
        text += f", window {visibility.size}"
    elif isinstance(visibility, TopK):
        text += f", reads top {visibility.k}" + (f" of {visibility.unit} tokens" if visibility.unit > 1 else "")
    return text + (f", index keys {component.index.dim}" if component.index else "")


def inspect_table(report: dict[str, Any]) -> RenderableType:
    """Return the tables of a report: shapes, groups, bytes by context."""
    rate = report["bytes_per_token"]
    head = Text(
        f"{report['model']} ({report['model_type']}): {report['storing_layers']} of {report['layers']} layers "
        f"store a cache, {report['kv_dtype']}, native context {report['native_context']:,}\n"
        f"per token {rate['growing'] / 1024:.2f} KiB growing, "
        f"{rate['sliding'] / 1024:.2f} KiB more inside the windows"
    )
    for name, growing in report["shipped_bytes_per_token"].items():
        head.append(f"; as {name} {growing / 1024:.2f} KiB growing")
    facts = [_fact_table(report["registry"])] if "registry" in report else []
    return Renderables(head, *facts, _shape_table(report), _group_table(report), _byte_table(report))


def _fact_table(facts: dict[str, Any]) -> Table:
    """Return what the registry says of a model beside its layout."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in described(facts):
        table.add_row(name, escape(value))
    return table


def described(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a registry row in words, without its configuration."""
    context, evidence, weights = facts["context"], facts["evidence"], facts["parameters"]
    claimed = f", advertised {context['advertised']:,}" if context["advertised"] else ""
    noted = f" ({evidence['note']})" if evidence["note"] else ""
    lines = [
        ("repository", facts["repo"]),
        ("context", f"native {context['native']:,}{claimed}" + (f" ({context['note']})" if context["note"] else "")),
        *(("shipped as", f"{shipped['name']}: {shipped['where']}") for shipped in facts["formats"]),
        ("parameters", _parameters(weights) if weights else ""),
        ("window", facts["window"] or ""),
        ("draft layers", facts["drafter"] or ""),
        *(("note", note) for note in facts["notes"]),
        ("evidence", f"{evidence['grade']}, {evidence['confidence']}{noted}"),
        *(("source", source) for source in evidence["sources"]),
    ]
    return [(name, value) for name, value in lines if value]


def _parameters(weights: dict[str, Any]) -> str:
    counts = [f"{weights[key] / 1e9:g}B {key}" for key in ("active", "total") if weights[key]]
    if weights["active"] == weights["total"]:
        counts = [f"{weights['total'] / 1e9:g}B"]
    return f"{', '.join(counts)} ({weights['source']})"


def _shape_table(report: dict[str, Any]) -> Table:
    table = Table("layers", "kind", "q heads", "stores per token", "rope", title="Layers", title_justify="left")
    for row in report["shapes"]:
        layers = f"{len(row['layers'])}: {spans(row['layers'])}"
        table.add_row(layers, row["kind"], str(row["q_heads"]), row["stores"], row["rope"])
    return table


def _group_table(report: dict[str, Any]) -> RenderableType:
    if "groups_refused" in report:
        return Text(f"KV cache groups: {report['groups_refused']}")
    title = "KV cache groups (as vLLM plans them with equal pages)"
    table = Table("group", "layers", "padding", "block tokens", "window", "page KiB", title=title, title_justify="left")
    for group in report["groups"]:
        readers = f" (read by {spans(group['readers'])})" if group["readers"] else ""
        table.add_row(
            str(group["index"]),
            spans(group["layers"]) + readers,
            str(group["padding"]),
            str(group["block_size"]),
            str(group["window"] or "all"),
            f"{group['page_bytes'] / 1024:g}",
        )
    return table


def _byte_table(report: dict[str, Any]) -> Table:
    """Return the byte rows in MiB, only the kinds that the model has, one row per context and format."""
    rows = report["contexts"]
    kinds = [kind for kind in _KINDS if any(row[kind] for row in rows)]
    title = "MiB of one request (* beyond the native context: capacity only)"
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("as", no_wrap=True)
    for column in (*kinds, "total", "without hybrid manager"):
        table.add_column(column, justify="right")
    for row in rows:
        mark = "*" if row["beyond_native_context"] else ""
        for name, held in {report["kv_dtype"]: row, **row["shipped"]}.items():
            cells = [held[kind] for kind in kinds] + [held["total"], held["total_without_hybrid_manager"]]
            table.add_row(f"{row['context']:,}{mark}", name, *(f"{cell / 2**20:,.2f}" for cell in cells))
    if pending := max((row["pending"] for row in rows), default=0):
        table.caption = f"and {pending / 2**20:,.2f} MiB of float32 state of open compressor windows, in no total"
    return table


__all__ = ["DEFAULT_CONTEXTS", "context_row", "described", "inspect_report", "inspect_table", "shipped_formats"]
