"""How near the CPU decode kernel comes to the two roofs of the machine it runs on.

    python benchmarks/kernels.py [--tokens 65536] [--groups 1,3,4,8] [--dims 64,128,256] [--rounds 9] [--threads N]

One KV head, batch 1, float32, one decoded token. Every time is preceded by a pass over 256 MB, which empties the
caches and measures the read bandwidth of that very moment, and by a call on the first few tokens, which brings the
program back. Variants take turns within a round, and medians with quartiles are shown. Plans are made beforehand. Under
each table stand the bars, judged on medians and, since whatever else runs only ever adds time, on the best rounds. With
one thread the clock is the processor's, which stands still while another program has it; with more it is the wall's.

Beside each block list stands `sum`: its elements added up, block after block. What runs that lie apart cost the memory
itself is in it, so that a list's time over that sum's says what the kernel adds.

`torch rows` is scaled_dot_product_attention with the KV head's query heads as query rows on contiguous keys and values:
the fastest plain torch there is.

These are milliseconds of this CPU. They are no evidence for a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvassay  # noqa: F401  sets OMP_WAIT_POLICY before torch
from kvassay.cache.codec import ChannelGroups, Code, Coefficients, Float8, TokenGroups
from kvassay.kernels.cpu import PER_THREAD, CpuKernel
from kvassay.kernels.device import CodeRead, PagedLayer, Read, SlotRead
from kvassay.kernels.packed import flatten
from kvassay.kernels.roofs import Clock, multiply_once, read_once
from kvassay.layout.model import Rope

BLOCK = 16
RUN = 16
"""Blocks of a contiguous run in a block list."""
FEW = 32
LINE = 16
"""Elements of a cache line."""


@dataclass
class Variant:
    name: str
    run: Callable[[], Tensor]
    few: Callable[[], Tensor]
    """The same on FEW tokens."""
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=numba.config.NUMBA_NUM_THREADS)
    parser.add_argument("--only", default="", help="comma-separated beginnings of variant names")
    options = parser.parse_args()
    numba.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}, {options.threads} threads, {options.tokens} tokens, {clock.__name__}; CPU only")
    for dim in map(int, options.dims.split(",")):
        for group in map(int, options.groups.split(",")):
            wanted = ("all blocks", *options.only.split(","))
            chosen = [
                v for v in variants(options.tokens, group, dim) if v.name.replace("sum", "list").startswith(wanted)
            ]
            measure(chosen, options.rounds, group, dim, clock)


def variants(tokens: int, group: int, dim: int) -> list[Variant]:
    kernel = CpuKernel()
    generator = torch.Generator().manual_seed(0)
    pool = huge(torch.randn(tokens // BLOCK, 2 * BLOCK * dim, generator=generator))
    keys, values = (side.unflatten(1, (1, BLOCK, dim)) for side in pool.split(BLOCK * dim, 1))
    layer = PagedLayer(keys, values, dim**-0.5)
    q = torch.randn(1, group, 1, dim, generator=generator)
    k, v = (huge(side.transpose(0, 1).flatten(1, 2)) for side in (keys, values))
    full = tokens * 2 * dim * 4

    def of(name: str, read: Read, few: Read, nbytes: float, count: int = tokens) -> Variant:
        plan, short = kernel.plan(layer, [[read]], 1), kernel.plan(layer, [[few]], 1)
        return Variant(name, lambda: plan.run(q), lambda: short.run(q), nbytes, count)

    def torch_rows(many: int) -> Tensor:
        rows = q.view(1, 1, group, dim)
        return torch.nn.functional.scaled_dot_product_attention(rows, k[None, :, :many], v[None, :, :many])

    table = torch.arange(tokens // BLOCK, dtype=torch.int32)[None]
    start = blocks(table[:, : FEW // BLOCK])
    made = [
        Variant("torch rows", lambda: torch_rows(tokens), lambda: torch_rows(FEW), full, tokens),
        of("all blocks", blocks(table), start, full),
    ]
    for share in (0.5, 0.25, 0.1):
        chosen = runs(tokens // BLOCK, share)
        nbytes, count = full * chosen.shape[1] / table.shape[1], chosen.shape[1] * BLOCK
        made.append(of(f"list {share:.0%}", blocks(chosen), start, nbytes, count))
        made.append(summed(f"sum {share:.0%}", pool, chosen, nbytes))
    bias = SlotRead(table, ints(tokens), unit=BLOCK, bias=torch.zeros(1, tokens))
    made.append(of("bias", bias, SlotRead(table, ints(FEW), unit=BLOCK, bias=bias.bias), full + 4 * tokens))
    for name in ("fp8", "8 bits", "4 bits", "2 bits", "low rank", "low rank+rope"):
        read, few = encoded(name, k, v), encoded(name, k[:, :FEW], v[:, :FEW])
        made.append(of(name, read, few, read.keys.nbytes + read.values.nbytes))
    return made


def summed(name: str, pool: Tensor, chosen: Tensor, nbytes: float) -> Variant:
    """All elements of the blocks of a list added up, in as many pieces as the kernel makes."""
    flat, starts = pool.numpy().ravel(), chosen[0, ::RUN].numpy() * np.int64(pool.shape[1])
    threads = numba.get_num_threads()
    parts = 1 if threads == 1 else PER_THREAD * threads

    def add(starts: NDArray[np.int64], size: int) -> Tensor:
        return torch.tensor(sum_of_runs(flat, starts, size, parts))

    return Variant(name, lambda: add(starts, RUN * pool.shape[1]), lambda: add(starts[:1], FEW), nbytes, 0)


@numba.njit(parallel=True, fastmath={"reassoc", "contract", "nsz"})
def sum_of_runs(x, starts, size, parts):  # type: ignore[no-untyped-def]
    """Sum of the elements x [start : start + size] of every start."""
    sums = np.zeros(parts, dtype=np.float32)
    for part in numba.prange(parts):
        total = np.float32(0)
        for run in range(part * len(starts) // parts, (part + 1) * len(starts) // parts):
            mine = x[starts[run] : starts[run] + size]
            for i in range(size):
                total += mine[i]
        sums[part] = total
    return sums.sum()


def encoded(name: str, k: Tensor, v: Tensor) -> CodeRead:
    dim, rope = k.shape[2], Rope(1e4, k.shape[2]) if name.endswith("rope") else None
    key: Code
    value: Code
    if name == "fp8":
        key, value = Float8.encode(k), Float8.encode(v)
    elif name.startswith("low rank"):
        key, value = low_rank(k, dim // 4), low_rank(v, dim // 4)
    else:
        bits = int(name[0])
        key = TokenGroups.encode(k, bits, 32) if bits == 8 else ChannelGroups.encode(k, bits, 32)
        value = TokenGroups.encode(v, bits, 32)
    positions = torch.arange(k.shape[1], dtype=torch.int32)[None]
    return CodeRead(flatten([key], rope), flatten([value]), positions)


def huge(x: Tensor) -> Tensor:
    """A copy in large pages."""
    return huge_empty(x.shape).copy_(x)


def huge_empty(shape: Sequence[int]) -> Tensor:
    """Float32 in large pages, where the system gives them, and at a cache line's edge, as torch's own are.

    numpy asks for large pages, torch does not; torch aligns, numpy does not.
    """
    size = math.prod(shape)
    room = np.empty(size + LINE, dtype=np.float32)
    start = -room.ctypes.data // room.itemsize % LINE
    return torch.from_numpy(room[start : start + size]).view(*shape)


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


def measure(made: list[Variant], rounds: int, group: int, dim: int, clock: Clock) -> None:
    matrix = []
    for number in range(rounds + 1):
        for variant in made:
            bandwidth = read_once(clock)
            variant.few()
            start = clock()
            variant.run()
            if number:
                variant.seconds.append(clock() - start)
                variant.bandwidth.append(bandwidth)
        matrix.append(multiply_once(clock))
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
        share, best_share = shares(one, max(found))
        flops = 4 * one.tokens * group * dim / seconds
        print(
            f"{one.name:>14s} {seconds * 1e3:8.2f} {low * 1e3:8.2f}-{high * 1e3:8.2f} {min(one.seconds) * 1e3:8.2f} "
            f"{one.nbytes / seconds / 1e9:6.1f} {share:8.0%} "
            f"{best_share:6.0%} {flops / rate:9.0%} {seconds / whole:7.2f}"
        )
    bars({one.name: one for one in made}, max(found), group, dim)


def bars(made: dict[str, Variant], bandwidth: float, group: int, dim: int) -> None:
    """Print what must hold, by medians and by best rounds."""
    dense = made["all blocks"]
    if torch_rows := made.get("torch rows"):
        faster = ratios(torch_rows, dense)
        if (torch_share := shares(torch_rows, bandwidth)[0]) > 0.5:
            print(
                f"    torch rows at {torch_share:.0%} of the read bandwidth: 2x is beyond it, "
                f"{1 / torch_share:.1f}x would reach it; median {faster[0]:.2f}x, best {faster[1]:.2f}x reached"
            )
        else:
            verdict("torch rows over all blocks", faster, 2, at_least=True)
    if group == 1 and dim in (128, 256):
        verdict("share of read bandwidth", shares(dense, bandwidth), 0.8, at_least=True)
    for one in made.values():
        if one.name.startswith("list"):
            shrunk, plain = dense.nbytes / one.nbytes, made[one.name.replace("list", "sum")]
            verdict(f"{one.name}: time over traffic", scaled(ratios(one, dense), shrunk), 1.25, at_least=False)
            added, memory = ratios(one, plain), scaled(ratios(plain, dense), shrunk)
            print(
                f"      {added[0]:.2f} and {added[1]:.2f} of its plain sum's, which itself is {memory[0]:.2f} and "
                f"{memory[1]:.2f} over traffic"
            )
        elif one.name.startswith("sum"):
            continue
        elif one.nbytes < dense.nbytes:
            verdict(f"{one.name} over all blocks", ratios(one, dense), 1, at_least=False)


def shares(one: Variant, bandwidth: float) -> tuple[float, float]:
    """What a variant read per second over what was read just before, median; its best round over the best bandwidth."""
    share = one.nbytes / np.array(one.seconds) / np.array(one.bandwidth)
    return float(np.median(share)), one.nbytes / min(one.seconds) / bandwidth


def ratios(one: Variant, other: Variant) -> tuple[float, float]:
    """One's time over the other's: medians, best rounds."""
    return float(np.median(one.seconds) / np.median(other.seconds)), min(one.seconds) / min(other.seconds)


def scaled(found: tuple[float, float], factor: float) -> tuple[float, float]:
    return found[0] * factor, found[1] * factor


def verdict(name: str, found: tuple[float, ...], limit: float, *, at_least: bool) -> None:
    words = ["pass" if (x >= limit if at_least else x <= limit) else "FAIL" for x in found]
    sign = ">=" if at_least else "<="
    shown = ", ".join(f"{kind} {x:.2f} {word}" for kind, x, word in zip(("median", "best"), found, words, strict=True))
    print(f"    {name} {sign} {limit:g}: {shown}")


if __name__ == "__main__":
    main()
