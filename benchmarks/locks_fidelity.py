"""How well LOCKS' page summaries predict attention mass on our traces, beside what its paper reports.

    python benchmarks/locks_fidelity.py [--traces FOLDER] [--context 4096]

Recorded keys and queries of SmolLM2-135M (all layers) and Gemma 3 270M (its full-attention layers). Pages of 16
tokens of the context; the queries are those of the questions and answers. Errors are |predicted - exact| of a page's
log mass, in nats, pooled over pages, query heads, queries and layers. Captured energy is the share of a page's centred
key energy in its 8 leading directions, the mean over pages; a random page of the same shape shows what rank 8 of 15
would hold of noise. The paper's models are larger and its contexts longer: its figures are a neighbour, not a target.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from selector_traces import pairs
from torch import Tensor

from kvassay.cache.rope import unrotate
from kvassay.layout.model import Layer
from kvassay.policy.spectral import RAW, Widths, decompose, log_mass, summarize
from kvassay.trace.reader import Trace

PAGE = 16
VARIANTS = {
    "int4 basis, int8 rest": Widths(8, 4, 8),
    "rank 8, not coded": Widths(8, RAW, RAW),
    "rank 15, not coded": Widths(15, RAW, RAW),
    "centroid": Widths(0, 8, 8),
}
PAPER = {
    ("int4 basis, int8 rest", "Llama-3.1-8B"): (0.12, 0.51, None, 10.9),
    ("int4 basis, int8 rest", "Qwen3-4B"): (0.18, 0.92, None, 16.7),
}
PAPER_ENERGY = {"Llama-3.1-8B as cached": 0.890, "Llama-3.1-8B un-rotated": 0.919, "noise, 128 channels": 0.678}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="keep the traces here, or find them")
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for pair in pairs(options.traces or Path(scratch), options.context):
            report(pair.model, pair.test)
    print("\npaper (arXiv 2607.24555), |error| in nats")
    for (variant, model), row in PAPER.items():
        show(f"{model}, {variant}", row)
    for name, energy in PAPER_ENERGY.items():
        print(f"  captured energy, {name:32} {energy:.3f}")


def report(model: str, trace: Trace) -> None:
    layers = [layer for layer in trace.layout.layers if layer.window is None]
    print(f"\n{model}: {trace.prefix.tokens} tokens, {len(layers)} layers, |error| in nats")
    errors: dict[str, list[Tensor]] = {}
    energy: dict[str, list[float]] = {"as cached": [], "un-rotated": []}
    for layer in layers:
        for variant, error in layer_errors(trace, layer):
            errors.setdefault(variant, []).append(error)
        pages, raw = pages_of(trace, layer)
        energy["as cached"].append(captured(pages))
        energy["un-rotated"].append(captured(raw))
    for variant, parts in errors.items():
        every = torch.cat(parts)
        quantiles = [float(every.kthvalue(max(1, round(q * len(every)))).values) for q in (0.5, 0.95, 0.999)]
        show(variant, (*quantiles, float(every.max())))
    dim = trace.layout.layers[layers[0].index].kv.k_dim
    energy[f"noise, {dim} channels"] = [
        captured(torch.randn(400, 1, PAGE, dim, generator=torch.Generator().manual_seed(0)))
    ]
    for name, parts in energy.items():
        print(f"  captured energy, {name:32} {sum(parts) / len(parts):.3f}")


def layer_errors(trace: Trace, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    pages, _ = pages_of(trace, layer)
    q = torch.cat([branch.q(layer.index) for branch in trace.branches]).transpose(0, 1).float()
    query = q.unflatten(0, (layer.kv.kv_heads, -1))
    logits = torch.einsum("kgqd,pktd->kgqpt", query, pages) * layer.scale
    exact = logits.logsumexp(-1)
    for variant, widths in VARIANTS.items():
        side = summarize(pages, widths)
        found = log_mass(side, widths, query, PAGE, scale=layer.scale, softcap=layer.softcap)
        yield variant, (found - exact).abs().flatten()


def pages_of(trace: Trace, layer: Layer) -> tuple[Tensor, Tensor]:
    """Keys of whole pages [pages, kv_heads, tokens, dim], as cached and with their rotation taken back."""
    k = trace.prefix.k(layer.index).transpose(0, 1).float()
    raw = unrotate(k, torch.arange(k.shape[1]).expand(len(k), -1), layer.rope)
    whole = k.shape[1] // PAGE
    return tuple(x[:, : whole * PAGE].unflatten(1, (whole, PAGE)).transpose(0, 1) for x in (k, raw))


def captured(pages: Tensor, rank: int = 8) -> float:
    """Mean share of a page's centred energy in its leading directions."""
    kept = decompose(pages, rank)[2].square().sum((-2, -1))
    return float((kept / (pages - pages.mean(-2, keepdim=True)).square().sum((-2, -1))).mean())


def show(name: str, row: tuple[float | None, ...]) -> None:
    cells = (
        f"{title} {'-' if x is None else f'{x:.2f}'}"
        for title, x in zip(("p50", "p95", "p99.9", "max"), row, strict=True)
    )
    print(f"  {name:38} " + "   ".join(f"{cell:12}" for cell in cells))


if __name__ == "__main__":
    main()
