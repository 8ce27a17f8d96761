"""The registry as a list: one entry per model, admitted or refused, and the page of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvassay.errors import UnsupportedModel
from kvassay.layout.bytes import bytes_at, bytes_per_token
from kvassay.layout.config import from_config
from kvassay.layout.registry import rows
from kvassay.layout.render import context_row, described, inspect_report, shipped_formats

CONTEXTS = {"128K": 131_072, "256K": 262_144, "500K": 500_000, "1M": 1_048_576}
"""Tokens behind the labels of the page."""

_GIB, _KIB = 2**30, 2**10
_KINDS = ("full", "sliding", "latent", "index", "pooled")

HEAD = """# Model registry

Generated from `src/kvassay/layout/registry/` by `kvassay inspect --markdown`; do not edit.

Each model is a raw configuration and the evidence for it; its layout comes from that configuration, as it would from
the published file. `kvassay inspect ID` and `kvassay cost ID` take the ids. Sizes are of one request in bfloat16, with
no block rounding, no replication over tensor-parallel ranks and no draft layers; `*` marks what lies beyond the native
context, a question of capacity only. `hybrid manager off` is what an engine holds that allocates sliding layers as
full ones.

Evidence, best first: `config_copy` the checkpoint's configuration; `test_assertion` a test that asserts it;
`derivative_config` a fine-tune's; `port` a third-party engine that quotes it; `class_default` the default of a class
whose documented checkpoint this is; `model_card`; `article`. `seen` in a configuration or code, or `reported`.
"""


def entries() -> list[dict[str, Any]]:
    """Return one dict per model: what it is, what it weighs per token in bytes, or why it is refused."""
    return [_entry(rows.row(name)) for name in rows.ids()]


def _entry(row: rows.Row) -> dict[str, Any]:
    common = {
        "id": row.id,
        "title": row.title,
        "repo": row.repo,
        "model_type": row.config["model_type"],
        "native_context": row.context.native,
        "advertised_context": row.context.advertised,
        "grade": row.evidence.grade,
        "confidence": row.evidence.confidence,
    }
    try:
        layout = from_config(row.id)
    except UnsupportedModel as refusal:
        return {**common, "refused": str(refusal)}
    growth = bytes_per_token(layout)
    cap = bytes_at(layout, layout.native_context).sliding
    return {
        **common,
        "refused": None,
        "layers": len(layout.layers),
        "storing_layers": len(layout.storing),
        "kinds": [kind for kind in _KINDS if getattr(growth, kind)],
        "growing_bytes_per_token": growth.growing,
        "sliding_bytes": cap,
    }


def entry_table(found: Sequence[dict[str, Any]]) -> Table:
    """Return the list for people."""
    table = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left")
    table.caption = (
        "layers that store a cache; † reported, not seen in a configuration or code\nkvassay inspect ID: all of it"
    )
    for column in ("id", "native", "layers", "state", "KiB/token"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("id", "state") else "right")
    for one in found:
        name = one["id"] + ("†" if one["confidence"] == "reported" else "")
        cells = ["", "[yellow]refused[/yellow]", ""]
        if not one["refused"]:
            layers = f"{one['storing_layers']}/{one['layers']}"
            cells = [layers, " ".join(one["kinds"]), f"{one['growing_bytes_per_token'] / _KIB:.2f}"]
        table.add_row(name, f"{one['native_context']:,}", *cells)
    return table


def markdown() -> str:
    """Return the page: a table of all models, then each with its facts and bytes."""
    found = entries()
    admitted = [one for one in found if not one["refused"]]
    refused = [one for one in found if one["refused"]]
    parts = [HEAD, *_summary(admitted), "", "# Models", ""]
    parts += [line for one in admitted for line in _admitted(one["id"])]
    parts += ["# Refused", "", "Part of their state is no KV cache; each is recognised by its raw configuration.", ""]
    parts += [line for one in refused for line in _refused(one)]
    return "\n".join(parts)


def _summary(admitted: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| id | layers | KiB per token | "
        + " | ".join(f"{label} GiB" for label in CONTEXTS)
        + " | 1M, hybrid manager off |",
        "|---|---|---|" + "---|" * (len(CONTEXTS) + 1),
    ]
    for one in admitted:
        layout = from_config(one["id"])
        held = [context_row(layout, tokens) for tokens in CONTEXTS.values()]
        totals = [f"{row['total'] / _GIB:.3f}{'*' if row['beyond_native_context'] else ''}" for row in held]
        off = f"{held[-1]['total_without_hybrid_manager'] / _GIB:.3f}"
        name, layers = one["id"], f"{one['storing_layers']} of {one['layers']}"
        link = f"[{name}](#{name.replace('.', '')})"
        lines.append(
            f"| {link} | {layers} | {one['growing_bytes_per_token'] / _KIB:.2f} | {' | '.join(totals)} | {off} |"
        )
    return lines


def _admitted(name: str) -> list[str]:
    row, layout = rows.row(name), from_config(name)
    report = inspect_report(layout, name, tuple(CONTEXTS.values()), row=row)
    kinds = [kind for kind in _KINDS if any(line[kind] for line in report["contexts"])]
    lines = [*_title(row), *_facts(row), ""]
    lines += ["| layers | kind | query heads | stores per token | rotary |", "|---|---|---|---|---|"]
    for shape in report["shapes"]:
        cells = [len(shape["layers"]), shape["kind"], shape["q_heads"], shape["stores"], shape["rope"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| GiB at | as | " + " | ".join(kinds) + " | total | hybrid manager off |"]
    lines.append("|---|---|" + "---|" * (len(kinds) + 2))
    for label, line in zip(CONTEXTS, report["contexts"], strict=True):
        mark = "*" if line["beyond_native_context"] else ""
        for form in (layout.kv_dtype, *shipped_formats(layout, row)):
            held = line if form == layout.kv_dtype else line["shipped"][form]
            cells = [held[kind] for kind in kinds] + [held["total"], held["total_without_hybrid_manager"]]
            lines.append(f"| {label}{mark} | {form} | " + " | ".join(f"{cell / _GIB:.3f}" for cell in cells) + " |")
    return [*lines, ""]


def _refused(one: dict[str, Any]) -> list[str]:
    row = rows.row(one["id"])
    return [*_title(row), f"- **refused**: {one['refused'].removeprefix(row.id + ': ')}", *_facts(row), ""]


def _title(row: rows.Row) -> list[str]:
    return [f"## {row.id}", "", f"{row.title}, model type `{row.config['model_type']}`.", ""]


def _facts(row: rows.Row) -> list[str]:
    return [f"- **{name}**: {value}" for name, value in described(asdict(row))]
