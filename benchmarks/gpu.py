"""The GPU's decode kernel: parity of every variant with the float64 reference, then times beside a library's kernel.

    python benchmarks/gpu.py [--lengths 4096,16384,65536] [--rounds 30]     # on one CUDA device, under three minutes
    python benchmarks/gpu.py --interpret                                    # parity alone, by Triton's interpreter

Timed is one decoded token, batch 1, bfloat16, blocks of 16 tokens in random order, for SmolLM2's heads (9 query and 3
KV heads of 64) and for 64 and 8 heads of 128; median of rounds by the device's own clock. Before each, a GiB is
written: that empties its caches, and takes longer than Python takes to launch. The library is FlashInfer's paged decode
if it is installed, else FlashAttention's (pages of 256), else torch's SDPA on keys and values laid out in a row: the
table says which. Shares are of what the card reads and writes while it copies a GiB, measured in the same run. Plans
are made beforehand, of all alike.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvassay.cache.codec import ChannelGroups, Code, Coefficients, Float8, TokenGroups
from kvassay.kernels.device import CodeRead, DecodeKernel, PagedLayer, Read, SlotRead, kernel
from kvassay.kernels.gather import ReferenceKernel
from kvassay.kernels.packed import flatten
from kvassay.layout.model import Rope

BLOCK, LIBRARY_PAGE = 16, 256
FORMATS = ("fp8", "8 bits", "4 bits", "2 bits", "low rank", "low rank, rotated")
CODED_TOKENS = 16_384
"""Length at which codes are timed: they are made on the CPU."""
EXACT = 2e-5
"""Largest difference of float32 sums, for outputs of about 1."""


@dataclass(frozen=True)
class Shape:
    name: str
    q_heads: int
    kv_heads: int
    dim: int


SHAPES = (Shape("SmolLM2: 9 / 3 heads of 64", 9, 3, 64), Shape("64 / 8 heads of 128", 64, 8, 128))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="parity by Triton's interpreter, no GPU")
    parser.add_argument("--lengths", default="4096,16384,65536", help=f"multiples of {LIBRARY_PAGE}")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    if any(length % LIBRARY_PAGE for length in lengths):
        parser.error(f"lengths must be multiples of {LIBRARY_PAGE}")
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, as the kernels are looked up
    decode = kernel("interpreted" if options.interpret else "cuda")
    wrong = parity(decode, 200 if options.interpret else 5000)
    print(f"parity: {wrong} variants differ" if wrong else "parity: every variant agrees")
    if options.interpret:
        print("no time was measured: the interpreter runs on the CPU")
    else:
        times(decode, lengths, options.rounds)
    return 1 if wrong else 0


# -- parity ---------------------------------------------------------------------------------------------


def parity(decode: DecodeKernel, tokens: int) -> int:
    """Print the largest difference of each variant; returns how many are too large."""
    half = torch.float16 if decode.place.type == "cpu" else torch.bfloat16
    wrong = 0
    for shape in SHAPES:
        print(f"\n{shape.name}, {tokens} tokens, {decode.place}")
        for name, layer, q, reads in variants(shape, tokens, half):
            moved = PagedLayer(
                layer.keys.to(decode.place), layer.values.to(decode.place), layer.scale, layer.softcap, layer.sinks
            )
            found = decode.decode(moved, q.to(decode.place), [reads]).cpu()
            worst = float((found - ReferenceKernel().decode(layer, q, [reads])).abs().max())
            # In 16 bits each weight is rounded, by half of one in its last place.
            limit = EXACT if layer.keys.dtype == torch.float32 else torch.finfo(half).eps
            wrong += not worst <= limit
            print(f"  {name:36s} {worst:8.1e} <= {limit:.1e}  {'agrees' if worst <= limit else 'DIFFERS'}")
    return wrong


def variants(shape: Shape, tokens: int, half: torch.dtype) -> Iterator[tuple[str, PagedLayer, Tensor, list[Read]]]:
    """Name, pool, queries [1, q_heads, 2, dim] and reads: every form and option that there is."""
    keys, values = pool(shape, tokens, torch.float32)
    scale, sinks = shape.dim**-0.5, torch.linspace(-2, 2, shape.q_heads)
    plain = PagedLayer(keys, values, scale)
    q = random(1, shape.q_heads, 2, shape.dim, seed=9)
    heads, blocks = shape.kv_heads, -(-tokens // BLOCK)
    last = torch.full((2, heads), tokens, dtype=torch.int32) - torch.tensor([[1], [0]], dtype=torch.int32)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(3))[None].int()
    bias = random(heads, blocks * BLOCK, seed=4)
    whole = SlotRead(table, last, unit=BLOCK)
    per_head = torch.stack([torch.randperm(blocks)[: blocks // 4 + 1] for _ in range(heads)]).int()
    few = SlotRead(per_head, torch.full((2, heads), (blocks // 4) * BLOCK, dtype=torch.int32), unit=BLOCK)
    slots = torch.stack([torch.randperm(blocks * BLOCK)[:tokens] for _ in range(heads)]).int()
    yield "all blocks", plain, q, [whole]
    yield "block list per KV head", plain, q, [few]
    yield "slot list per KV head", plain, q, [SlotRead(slots, last)]
    yield "bias", plain, q, [SlotRead(table, last, unit=BLOCK, bias=bias)]
    yield "window", plain, q, [SlotRead(table, last, first=last - 100, unit=BLOCK)]
    yield "soft-cap, inner bias", PagedLayer(keys, values, scale, 2.0), q, [
        SlotRead(table, last, unit=BLOCK, inner_bias=bias)
    ]  # fmt: skip
    yield "sinks", PagedLayer(keys, values, scale, sinks=sinks), q, [whole]
    yield f"all blocks, {half}", PagedLayer(keys.to(half), values.to(half), scale), q.to(half).float(), [whole]
    k, v = (random(heads, tokens, shape.dim, seed=seed) for seed in (5, 6))
    for name in FORMATS:
        yield f"{name}, fused, and blocks", plain, q, [coded(name, k, v), few]


def pool(shape: Shape, tokens: int, dtype: torch.dtype, place: str | torch.device = "cpu") -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, kv_heads, BLOCK, dim], standard normal."""
    size = (-(-tokens // BLOCK), shape.kv_heads, BLOCK, shape.dim)
    rng = torch.Generator(place).manual_seed(0)
    return tuple(torch.randn(size, generator=rng, device=place).to(dtype) for _ in range(2))  # type: ignore[return-value]


def coded(name: str, k: Tensor, v: Tensor) -> CodeRead:
    """Keys and values [kv_heads, tokens, dim] encoded."""
    key: Code
    value: Code
    rope = None
    if name == "fp8":
        key, value = Float8.encode(k), Float8.encode(v)
    elif name.startswith("low rank"):
        key, value = (low_rank(side) for side in (k, v))
        rope = Rope(1e4, k.shape[2]) if name.endswith("rotated") else None
    else:
        bits = int(name[0])
        key = TokenGroups.encode(k, bits, 32) if bits == 8 else ChannelGroups.encode(k, bits, 32)
        value = TokenGroups.encode(v, bits, 32)
    positions = torch.arange(k.shape[1], dtype=torch.int32).expand(k.shape[0], -1)
    return CodeRead(flatten([key], rope), flatten([value]), positions)


def low_rank(x: Tensor) -> Coefficients:
    heads, _, dim = x.shape
    basis = torch.linalg.qr(random(dim, dim // 4, seed=7))[0]
    groups = tuple((head,) for head in range(heads))
    return Coefficients.encode(x, groups, [basis] * heads, [basis.T.contiguous()] * heads)


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# -- time -----------------------------------------------------------------------------------------------


def times(decode: DecodeKernel, lengths: list[int], rounds: int) -> None:
    clock = Clock(decode.place, rounds)
    copied = clock.copy_bandwidth()
    print(f"\n{torch.cuda.get_device_name(decode.place)}: copies at {copied / 1e9:.0f} GB/s, read and written")
    for shape in SHAPES:
        print(f"\n{shape.name}, bfloat16, one token, batch 1")
        print(f"{'tokens':>8s} {'kernel':34s} {'us':>9s} {'GB/s':>7s} {'of copy':>8s} {'of library':>11s}")
        for tokens in lengths:
            rows(decode, clock, shape, tokens, copied)


def rows(decode: DecodeKernel, clock: Clock, shape: Shape, tokens: int, copied: float) -> None:
    place, dtype = decode.place, torch.bfloat16
    keys, values = pool(shape, tokens, dtype, place)
    q = random(1, shape.q_heads, 1, shape.dim, seed=1).to(place, dtype)
    table = torch.randperm(len(keys), generator=torch.Generator().manual_seed(2)).int()
    layer, wide = PagedLayer(keys, values, shape.dim**-0.5), q.float()
    last = torch.full((1, shape.kv_heads), tokens, dtype=torch.int32)
    read = SlotRead(table[None], last, unit=BLOCK)
    name, library = library_decode(shape, q, keys, values, table)
    full = 2 * tokens * shape.kv_heads * shape.dim * 2
    reference = decode.decode(layer, wide, [[read]])
    apart = float((library().float().flatten() - reference.flatten()).abs().max())
    theirs = clock.seconds(library)

    def show(what: str, seconds: float, nbytes: float) -> None:
        rate = nbytes / seconds
        line = f"{tokens:8d} {what:34s} {seconds * 1e6:9.1f} {rate / 1e9:7.0f} {rate / copied:8.0%}"
        print(f"{line} {seconds / theirs:11.2f}")

    def ours(what: str, read: Read, nbytes: float) -> None:
        plan = decode.plan(layer, [[read]], 1)
        show(what, clock.seconds(lambda: plan.run(wide)), nbytes)

    show(f"{name} (apart by {apart:.0e})", theirs, full)
    ours("all blocks", read, full)
    quarter = torch.stack([table[torch.randperm(len(table))[: len(table) // 4]] for _ in range(shape.kv_heads)])
    ours("a quarter, listed per KV head", SlotRead(quarter, last // 4, unit=BLOCK), full / 4)
    bias = torch.zeros(shape.kv_heads, len(table) * BLOCK)
    ours("bias", SlotRead(read.entries, last, unit=BLOCK, bias=bias), full + 4 * shape.kv_heads * tokens)
    for kind in FORMATS if tokens == CODED_TOKENS else ():
        k, v = (random(shape.kv_heads, tokens, shape.dim, seed=seed) for seed in (5, 6))
        codes = coded(kind, k, v)
        ours(kind, codes, codes.keys.nbytes + codes.values.nbytes)


def library_decode(
    shape: Shape, q: Tensor, keys: Tensor, values: Tensor, table: Tensor
) -> tuple[str, Callable[[], Tensor]]:
    """The kernel users have, by name, ready to run over the same tokens."""
    for find in (flashinfer_decode, flash_attention_decode):
        try:
            return find(shape, q, keys, values, table)
        except ImportError:
            continue
    k, v = (in_a_row(side, table)[None] for side in (keys, values))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return f"torch {torch.__version__} SDPA, in a row", lambda: sdpa(q, k, v, enable_gqa=True)


def flashinfer_decode(
    shape: Shape, q: Tensor, keys: Tensor, values: Tensor, table: Tensor
) -> tuple[str, Callable[[], Tensor]]:
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    counts = torch.tensor([0, len(table)], dtype=torch.int32, device=q.device)
    full = torch.tensor([BLOCK], dtype=torch.int32, device=q.device)
    wrapper.plan(
        counts, table.to(q.device), full, shape.q_heads, shape.kv_heads, shape.dim, BLOCK,
        q_data_type=q.dtype, kv_data_type=keys.dtype,
    )  # fmt: skip
    rows = q[:, :, 0]
    return f"FlashInfer {flashinfer.__version__}", lambda: wrapper.run(rows, (keys, values))


def flash_attention_decode(
    shape: Shape, q: Tensor, keys: Tensor, values: Tensor, table: Tensor
) -> tuple[str, Callable[[], Tensor]]:
    flash = importlib.import_module("flash_attn")
    tokens = len(table) * BLOCK
    k, v = (
        in_a_row(side, table).transpose(0, 1).unflatten(0, (-1, LIBRARY_PAGE)).contiguous() for side in (keys, values)
    )
    pages = torch.arange(len(k), dtype=torch.int32, device=q.device)[None]
    lengths = torch.tensor([tokens], dtype=torch.int32, device=q.device)
    rows = q.transpose(1, 2)
    return f"FlashAttention {flash.__version__}", lambda: flash.flash_attn_with_kvcache(
        rows, k, v, cache_seqlens=lengths, block_table=pages
    )


def in_a_row(side: Tensor, table: Tensor) -> Tensor:
    """[kv_heads, tokens, dim], a copy."""
    return side[table.to(side.device).long()].transpose(0, 1).flatten(1, 2).contiguous()


class Clock:
    """The device's own clock, its caches emptied before every look."""

    def __init__(self, place: torch.device, rounds: int) -> None:
        self.rounds = rounds
        self.large, self.other = (torch.zeros(1 << 28, device=place) for _ in range(2))

    def seconds(self, work: Callable[[], object]) -> float:
        """Median over rounds, after three to warm up."""
        marks = []
        for _ in range(self.rounds + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.large.zero_()
            start.record()
            work()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in marks[3:]) / 1e3

    def copy_bandwidth(self) -> float:
        """Bytes read and written per second while a GiB is copied."""
        return 2 * self.large.nbytes / self.seconds(lambda: self.other.copy_(self.large))


if __name__ == "__main__":
    sys.exit(main())
