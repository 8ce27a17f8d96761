"""How near the CPU decode kernel comes to the two roofs of the machine it runs on.

    python benchmarks/kernels.py [--tokens 65536] [--groups 1,3,4,8] [--dims 64,128,256] [--rounds 7]

One KV head, batch 1, float32, one decoded token. Every time is preceded by a pass over 256 MB, which empties the
caches and measures the read bandwidth of that very moment; variants take turns within a round, and medians with
quartiles are shown. `torch rows` is scaled_dot_product_attention with the KV head's query heads as query rows on
contiguous keys and values: the fastest plain torch there is.

These are milliseconds of this CPU. They are no evidence for a GPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import kvassay  # noqa: F401  sets OMP_WAIT_POLICY before torch
from kvassay.cache.codec import ChannelGroups, Coefficients, Float8, TokenGroups
from kvassay.kernels.cpu import CpuKernel
from kvassay.kernels.device import CodeRead, LaneRead, PagedLayer, SlotRead
from kvassay.kernels.packed import flatten
from kvassay.kernels.roofs import multiply_once, read_once
from kvassay.layout.model import Rope

BLOCK = 16
RUN = 16
"""Blocks of a contiguous run in a block list."""


@dataclass
class Variant:
    name: str
    run: Callable[[], Tensor]
    nbytes: float
    """Bytes the kernel must read."""
    tokens: int
    seconds: list[float] = field(default_factory=list)
    bandwidth: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--groups", default="1,3,4,8")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="comma-separated beginnings of variant names")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {options.tokens} tokens; CPU only")
    for dim in map(int, options.dims.split(",")):
        for group in map(int, options.groups.split(",")):
            chosen = [
                v for v in variants(options.tokens, group, dim) if v.name.startswith(tuple(options.only.split(",")))
            ]
            measure(chosen, options.rounds, group, dim)


def variants(tokens: int, group: int, dim: int) -> list[Variant]:
    kernel = CpuKernel()
    generator = torch.Generator().manual_seed(0)
    pool = huge(torch.randn(tokens // BLOCK, 2 * BLOCK * dim, generator=generator))
    keys, values = (side.unflatten(1, (1, BLOCK, dim)) for side in pool.split(BLOCK * dim, 1))
    layer = PagedLayer(keys, values, dim**-0.5)
    q = torch.randn(1, group, 1, dim, generator=generator)
    k, v = (huge(side.transpose(0, 1).flatten(1, 2)) for side in (keys, values))
    full = tokens * 2 * dim * 4

    def of(name: str, read: LaneRead, nbytes: float, count: int = tokens) -> Variant:
        return Variant(name, lambda: kernel.decode(layer, q, [read]), nbytes, count)

    table = torch.arange(tokens // BLOCK, dtype=torch.int32)[None]
    made = [
        Variant(
            "torch rows",
            lambda: torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2).transpose(1, 2).view(1, 1, group, dim), k[None], v[None]
            ),
            full,
            tokens,
        ),
        of("all blocks", [blocks(table)], full),
    ]
    for share in (0.5, 0.25, 0.1):
        chosen = runs(tokens // BLOCK, share)
        made.append(
            of(f"list {share:.0%}", [blocks(chosen)], chosen.shape[1] * BLOCK * 2 * dim * 4, chosen.shape[1] * BLOCK)
        )
    bias = SlotRead(table, ints(tokens), unit=BLOCK, bias=torch.zeros(1, tokens))
    made.append(of("bias", [bias], full + 4 * tokens))
    positions = torch.arange(tokens, dtype=torch.int32)[None]
    encoders = {
        "fp8": (Float8.encode(k), Float8.encode(v), None),
        "8 bits": (TokenGroups.encode(k, 8, 32), TokenGroups.encode(v, 8, 32), None),
        "4 bits": (ChannelGroups.encode(k, 4, 32), TokenGroups.encode(v, 4, 32), None),
        "2 bits": (ChannelGroups.encode(k, 2, 32), TokenGroups.encode(v, 2, 32), None),
        "low rank": (low_rank(k, dim // 4), low_rank(v, dim // 4), None),
        "low rank+rope": (low_rank(k, dim // 4), low_rank(v, dim // 4), Rope(1e4, dim)),
    }
    for name, (key, value, rope) in encoders.items():
        read = CodeRead(flatten([key], rope), flatten([value]), positions)
        made.append(of(name, [read], read.keys.nbytes + read.values.nbytes))
    return made


def huge(x: Tensor) -> Tensor:
    """A copy in large pages, where the system gives them: numpy asks for them, torch does not."""
    copy = torch.from_numpy(np.empty(x.shape, dtype=np.float32))
    return copy.copy_(x)


def blocks(entries: Tensor) -> SlotRead:
    return SlotRead(entries, ints(entries.shape[1] * BLOCK), unit=BLOCK)


def ints(x: int) -> Tensor:
    return torch.tensor([[x]], dtype=torch.int32)


def runs(count: int, share: float) -> Tensor:
    """int32 [1, share * count]: random runs of RUN blocks, in order."""
    rng = np.random.default_rng(0)
    starts = np.sort(rng.choice(count // RUN, int(count * share) // RUN, replace=False)) * RUN
    return torch.from_numpy((starts[:, None] + np.arange(RUN)).reshape(1, -1).astype(np.int32))


def low_rank(x: Tensor, rank: int) -> Coefficients:
    basis = torch.linalg.qr(torch.randn(x.shape[2], rank, generator=torch.Generator().manual_seed(1)))[0]
    return Coefficients.encode(x, ((0,),), [basis], [basis.T.contiguous()])


def measure(made: list[Variant], rounds: int, group: int, dim: int) -> None:
    matrix = []
    for number in range(rounds + 1):
        for variant in made:
            bandwidth = read_once()
            start = time.perf_counter()
            variant.run()
            if number:
                variant.seconds.append(time.perf_counter() - start)
                variant.bandwidth.append(bandwidth)
        matrix.append(multiply_once())
    rate = float(np.median(matrix))
    found = [read for variant in made for read in variant.bandwidth]
    print(
        f"\ngroup {group}, head_dim {dim}: read {np.median(found) / 1e9:.1f} GB/s (best {max(found) / 1e9:.1f}), "
        f"sgemm {rate / 1e9:.0f} GFLOP/s, load {os.getloadavg()[0]:.1f}"
    )
    columns = ("variant", 14), ("ms", 8), ("quartiles", 17), ("best", 8), ("GB/s", 6), ("of read", 8), ("best", 6)
    print(" ".join(f"{name:>{width}s}" for name, width in (*columns, ("of sgemm", 9), ("of all", 7))))
    whole = next((np.median(v.seconds) for v in made if v.name == "all blocks"), float("nan"))
    for one in made:
        seconds, (low, high) = float(np.median(one.seconds)), np.percentile(one.seconds, [25, 75])
        share = one.nbytes / np.array(one.seconds) / np.array(one.bandwidth)
        flops = 4 * one.tokens * group * dim / seconds
        print(
            f"{one.name:>14s} {seconds * 1e3:8.2f} {low * 1e3:8.2f}-{high * 1e3:8.2f} {min(one.seconds) * 1e3:8.2f} "
            f"{one.nbytes / seconds / 1e9:6.1f} {np.median(share):8.0%} "
            f"{one.nbytes / min(one.seconds) / max(found):6.0%} {flops / rate:9.0%} {seconds / whole:7.2f}"
        )


if __name__ == "__main__":
    main()
