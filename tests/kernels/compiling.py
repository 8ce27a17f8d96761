"""Compile for a GPU that is not here every kernel launch of a few calls: a program of its own, without the interpreter.

    python -m tests.kernels.compiling CAPABILITY    # 80 (A100), 90 (H100, H200); prints a line per kernel

Nothing is run. What the interpreter takes and a compiler does not (types, shapes, globals) fails here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvassay.cache.codec import ChannelGroups, Code, Coefficients, Float8, Mixed, TokenGroups
from kvassay.kernels import triton_codes, triton_core, triton_slots
from kvassay.kernels.device import CodeRead, PagedLayer, Read, SlotRead
from kvassay.kernels.gpu import TritonKernel
from kvassay.kernels.packed import flatten
from kvassay.layout.model import Rope

TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "uint8": "u8"}
SHARED = 227 << 10
"""Bytes of shared memory that a program of an H100 may have; of an A100, 163 KiB."""


class Compiled:
    """Stands in for a kernel: a launch compiles it instead."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.target = kernel, GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **meta: Any) -> None:
        warps = meta.pop("num_warps")
        names = self.kernel.arg_names
        known = {(names.index(name),): value for name, value in meta.items()}
        attributes: dict[tuple[int, ...], Any] = {}
        signature = dict.fromkeys(meta, "constexpr")
        for at, (name, arg) in enumerate(zip(names, args, strict=False)):
            signature[name] = kind_of(arg, (at,), known, attributes)
        made = triton.compile(
            ASTSource(self.kernel, signature, known, attributes), target=self.target, options={"num_warps": warps}
        )
        found = made.metadata
        assert found.shared <= SHARED, f"{self.kernel.__name__}: {found.shared} bytes of shared memory"
        shown = ", ".join(f"{name}={value}" for name, value in meta.items())
        print(f"{self.kernel.__name__}: {len(made.asm['cubin'])} bytes, {found.shared} shared; {shown}")


def kind_of(
    arg: Any, path: tuple[int, ...], known: dict[tuple[int, ...], Any], attributes: dict[tuple[int, ...], Any]
) -> Any:
    """An argument's type; as in a launch, what is 1 is a constant, and what 16 divides is known to be so divided."""
    if isinstance(arg, tuple):
        return tuple(kind_of(one, (*path, at), known, attributes) for at, one in enumerate(arg))
    if isinstance(arg, float):
        return "fp32"
    if isinstance(arg, int) and arg == 1:
        known[path] = 1
        return "constexpr"
    if isinstance(arg, Tensor) or arg % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "*" + TYPES[str(arg.dtype).removeprefix("torch.")] if isinstance(arg, Tensor) else "i32"


def calls() -> Iterator[tuple[PagedLayer, int, list[Read]]]:
    """Layer, query heads and reads."""
    sinks = torch.zeros(8)
    for dtype, dim in ((torch.float32, 64), (torch.bfloat16, 128), (torch.float16, 256)):
        keys, values = torch.zeros(8, 2, 16, dim, dtype=dtype), torch.zeros(8, 2, 16, dim, dtype=dtype)
        last = torch.full((1, 2), 100, dtype=torch.int32)
        blocks = SlotRead(torch.arange(8)[None].int(), last, unit=16)
        slots = SlotRead(torch.arange(100)[None].int(), last, bias=torch.zeros(2, 100))
        yield PagedLayer(keys, values, 0.1, 30.0 if dim == 256 else None, sinks), 8, [blocks, slots]
    keys = torch.zeros(8, 1, 16, 576)  # a latent cache: 16 heads on one, values the beginning of keys, or whole rows
    for values in (keys[..., :512], keys):
        yield PagedLayer(keys, values, 0.1), 16, [SlotRead(blocks.entries, last[:, :1], unit=16)]
    keys, values = torch.zeros(8, 2, 16, 128), torch.zeros(8, 2, 16, 128)
    yield PagedLayer(keys, values, 0.1), 8, list(codes(torch.randn(2, 64, 128)))


def codes(x: Tensor) -> Iterator[Read]:
    positions = torch.arange(64, dtype=torch.int32).expand(2, -1)
    basis = torch.zeros(128, 32)
    low = Coefficients.encode(x, ((0,), (1,)), [basis] * 2, [basis.T] * 2)
    classes = torch.tensor([2, 4, 8, 16]).repeat(2, 16)
    mixed = Mixed.encode(x, classes, "token", torch.ones(2, 64).bool(), lambda y, bits: TokenGroups.encode(y, 4, 32))
    sides: list[tuple[Code, Code]] = [
        (Float8.encode(x), Float8.encode(x)),
        (ChannelGroups.encode(x, 4, 32), TokenGroups.encode(x, 2, 32)),
        (mixed, mixed),
    ]
    for key, value in sides:
        yield CodeRead(flatten([key]), flatten([value]), positions)
    for rope in (None, Rope(1e4, 128), Rope(1e4, 64, interleaved=True)):
        yield CodeRead(flatten([low], rope), flatten([low]), positions, seen=torch.ones(1, 2, 64).bool())


def main(capability: int) -> None:
    for module, name in (
        (triton_slots, "attend_slots"),
        (triton_codes, "attend_codes"),
        (triton_core, "merge_pieces"),
    ):
        setattr(module, name, Compiled(getattr(module, name), capability))
    kernel = TritonKernel(torch.device("cpu"), 132)
    for layer, q_heads, reads in calls():
        kernel.decode(layer, torch.zeros(1, q_heads, 1, layer.keys.shape[3]), [reads])


if __name__ == "__main__":
    main(int(sys.argv[1]))
