"""Time the CPU decode kernel on the layer shapes of published models, at 64K to 1M tokens.

    python benchmarks/kernel_rows.py [--rows hy3,mimo-v2.5] [--tokens 65536,1048576] [--memory 2] [--threads N]

One decoded token of one layer, float32, blocks of 16 in the order of a fresh table; a row's layers of equal shape are
timed once. `all` reads every block a layer of that kind may read, a sliding layer its window; `list 10%` reads a tenth
in random runs of 16 blocks. As many of the layer's KV heads are held as fit in `--memory` GiB: the table says how many,
and nothing is scaled up to the rest. Times are preceded by a pass over 256 MB, which empties the caches and measures
the read bandwidth; the best of the rounds counts, since whatever else runs only ever adds time.

These are milliseconds of this CPU. They are no evidence for a GPU.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numba
import numpy as np
import torch

from kernels import BLOCK, Variant, huge_empty, runs
from kvassay.kernels.cpu import CpuKernel
from kvassay.kernels.device import PagedLayer, SlotRead
from kvassay.kernels.roofs import Clock, read_once
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, Layer, Window

ROWS = "hy3,granite-4.1-8b,step-3.7-flash,north-mini-code-1.0,mimo-v2.5"
GIB = 2**30
HEADER = (
    f"{'row, layers':34s} {'heads':>7s} {'K/V':>8s} {'group':>5s} {'tokens':>9s} {'reads':>9s} "
    f"{'MiB':>8s} {'ms':>9s} {'GB/s':>6s} {'of roof':>7s}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--tokens", default="65536,1048576")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=float, default=2.0, help="GiB of keys and values held at once")
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    options = parser.parse_args()
    numba.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print(f"{options.threads} threads, float32, {clock.__name__}; CPU only\n{HEADER}")
    for name in options.rows.split(","):
        for layer, count in shapes(name):
            for tokens in map(int, options.tokens.split(",")):
                kv = layer.kv
                head_bytes = tokens * kv.row * 4
                heads = min(kv.kv_heads, int(options.memory * GIB // head_bytes))
                if heads == 0:
                    print(
                        f"{name}: one KV head takes {head_bytes / GIB:.1f} GiB at {tokens:,} tokens; --memory is less"
                    )
                    continue
                label = f"{name}, {count} {layer.kind}"
                for variant in variants(layer, heads, tokens):
                    show(f"{label:34s} {heads:3d}/{kv.kv_heads:<3d}", layer, tokens, variant, options.rounds, clock)


def shapes(name: str) -> list[tuple[Layer, int]]:
    """The distinct shapes of a registry row's layers that hold plain keys and values, and how many layers have each."""
    found: dict[object, tuple[Layer, int]] = {}
    for layer in from_config(name).layers:
        if layer.cache_of is None and isinstance(layer.kv, KV):
            key = (layer.kind, layer.q_heads, layer.kv, layer.window)
            found[key] = (found[key][0] if key in found else layer, found.get(key, (layer, 0))[1] + 1)
    return list(found.values())


def variants(layer: Layer, heads: int, tokens: int) -> list[Variant]:
    """Reads of all blocks, or of the window's, and of a tenth of them."""
    kv, kernel = layer.kv, CpuKernel()
    group = layer.group_size
    pool = huge_empty((tokens // BLOCK, heads * BLOCK * kv.row)).uniform_(
        -1, 1, generator=torch.Generator().manual_seed(0)
    )
    keys, values = pool.split([heads * BLOCK * kv.k_dim, heads * BLOCK * kv.v_dim], 1)
    paged = PagedLayer(
        keys.unflatten(1, (heads, BLOCK, kv.k_dim)), values.unflatten(1, (heads, BLOCK, kv.v_dim)), layer.scale
    )
    q = torch.randn(1, heads * group, 1, kv.k_dim, generator=torch.Generator().manual_seed(1))
    window = layer.components[0].visibility
    seen = min(tokens, window.size) if isinstance(window, Window) else tokens
    table = torch.arange(tokens // BLOCK, dtype=torch.int32)[None]
    few = partial(kernel.plan(paged, [[read(table[:, :2], 0, 2 * BLOCK, heads)]], 1).run, q)
    kinds = [("all" if seen == tokens else f"last {seen}", read(table, tokens - seen, tokens, heads), seen)]
    if seen == tokens:
        chosen = runs(tokens // BLOCK, 0.1)
        kinds.append(("list 10%", read(chosen, 0, chosen.shape[1] * BLOCK, heads), chosen.shape[1] * BLOCK))
    return [
        Variant(name, partial(kernel.plan(paged, [[asked]], 1).run, q), few, count * heads * kv.row * 4, count)
        for name, asked, count in kinds
    ]


def read(entries: torch.Tensor, first: int, last: int, heads: int) -> SlotRead:
    """Blocks of a list that all heads share, from token `first` to `last`."""
    begin, end = (torch.full((1, heads), at, dtype=torch.int32) for at in (first, last))
    return SlotRead(entries, end, begin, unit=BLOCK)


def show(label: str, layer: Layer, tokens: int, one: Variant, rounds: int, clock: Clock) -> None:
    """Time a variant and print its line."""
    for _ in range(rounds):
        one.bandwidth.append(read_once(clock))
        one.few()
        start = clock()
        one.run()
        one.seconds.append(clock() - start)
    best, roof = min(one.seconds), float(np.max(one.bandwidth))
    dims = f"{layer.kv.k_dim}/{layer.kv.v_dim}"
    print(
        f"{label} {dims:>8s} {layer.group_size:5d} {tokens:9,d} {one.name:>9s} {one.nbytes / 2**20:8.1f} "
        f"{best * 1e3:9.3f} {one.nbytes / best / 1e9:6.1f} {one.nbytes / best / roof:7.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
