"""A trace at a glance: the facts as one dictionary, and the same as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group
from rich.table import Table

from kvassay.trace.reader import Trace
from kvassay.trace.schema import TraceHeader
from kvassay.trace.shapes import layer_shard

Facts = dict[str, Any]


def summary(trace: Trace) -> Facts:
    """What `kvassay trace show --json` prints; byte counts are bytes on disk of tensor data, headers left out."""
    header = trace.header
    return {
        "path": str(trace.path),
        "digest": trace.digest,
        "model": header.model.model_dump(mode="json"),
        "model_type": header.layout.model_type,
        "recipe": header.recipe.model_dump(mode="json"),
        "versions": header.versions.model_dump(mode="json"),
        "created": header.created.isoformat(),
        "dtype": header.dtype,
        "prefix_tokens": header.prefix.tokens,
        "branch_tokens": sum(branch.tokens for branch in header.branches),
        "layers": dict(Counter(layer.kind for layer in header.layout.layers)),
        "bytes": bytes_by_kind(trace),
        "evidence": evidence(header),
        "branches": [branch.model_dump(mode="json") for branch in header.branches],
        "overlays": list(trace.overlays),
    }


def bytes_by_kind(trace: Trace) -> dict[str, int]:
    """Bytes of tensor data by what they are: `k`, `v`, `q`, `tokens`, `taps`, `logits`, ...; `sliding` are vectors of
    windows that are key and value in one."""
    windows = {layer_shard("", layer.index) for layer in trace.layout.layers if layer.window is not None}
    found: Counter[str] = Counter()
    for path, specs in trace.shapes.items():
        file = path.split("/")[1].removesuffix(".safetensors")
        for name, spec in specs.items():
            kind = name if file.startswith("layer_") else "taps" if file.startswith("tap_") else file
            if kind == "latent" and path[path.index("/") :] in windows:
                kind = "sliding"
            found[kind] += spec.nbytes
    return dict(found)


def evidence(header: TraceHeader) -> dict[str, str]:
    """What was recorded beyond the cache itself, each as a short phrase."""
    tokens, logits = header.prefix.tokens, header.logits
    queries = "branches only" if header.q_from == tokens else f"prefix from position {header.q_from}, branches"
    found = {"queries": queries}
    if (part := header.subset) is not None:
        found["part"] = f"layers {', '.join(map(str, part.layers))} of the model"
        if part.kv_heads is not None:
            found["part"] += f"; KV heads {', '.join(map(str, part.kv_heads))}"
    if logits is not None:
        found["logits"] = "full, branches" if logits.kind == "full" else f"top {logits.k}, branches"
    indexed = [layer for layer in header.layout.layers if layer.index_keys is not None and layer.topk is not None]
    if indexed:
        most = max(layer.topk.k for layer in indexed if layer.topk is not None)
        found["selections"] = f"top {most} by the index of layers {', '.join(str(layer.index) for layer in indexed)}"
    taps: dict[str, list[int]] = {}
    for tap in header.taps:
        taps.setdefault(tap.kind, []).append(tap.layer)
    found |= {f"tap {kind}": f"layers {', '.join(map(str, layers))}" for kind, layers in taps.items()}
    return found


def tables(trace: Trace) -> Group:
    """The summary as rich tables."""
    facts = summary(trace)
    head = Table(show_header=False, box=None, pad_edge=False)
    for label, value in _lines(facts):
        head.add_row(label, value)
    sizes = Table("stored", "MB", title_justify="left")
    sizes.columns[1].justify = "right"
    for kind, count in facts["bytes"].items():
        sizes.add_row(kind, f"{count / 1e6:.3f}")
    branches = Table("branch", "question", "answer", "answer text")
    for i, branch in enumerate(facts["branches"]):
        asked = branch["question_tokens"]
        text = branch["answer_text"].replace("\n", " ")
        branches.add_row(str(i), str(asked), str(branch["tokens"] - asked), _shorten(text, 48))
    return Group(head, sizes, branches)


def _lines(facts: Facts) -> list[tuple[str, str]]:
    recipe, model = facts["recipe"], facts["model"]
    aware = "question in the prefix" if recipe["query_aware"] else "question after the prefix"
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    return [
        ("trace", facts["path"]),
        ("model", f"{model['name']} ({facts['model_type']}, {model['licence']})"),
        ("workload", f"{recipe['name']} seed {recipe['seed']} index {recipe['index']}, {aware}"),
        ("tokens", f"{facts['prefix_tokens']} prefix, {facts['branch_tokens']} in {len(facts['branches'])} branches"),
        ("layers", kinds),
        ("dtype", facts["dtype"]),
        *facts["evidence"].items(),
        ("block tables", ", ".join(facts["overlays"]) or "none"),
        ("recorded", f"{facts['created']} with {', '.join(f'{k} {v}' for k, v in facts['versions'].items() if v)}"),
        ("digest", facts["digest"]),
    ]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
