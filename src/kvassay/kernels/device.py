"""What decode attention is asked for, on whatever device: the data of a call, the kernel's contract, the lookup.

A lane's layer is a list of reads, each a set of tokens in one form: slots of the block pool (all of them by block
table, or a list per KV head), rows that lie elsewhere, or packed codes. Softmax runs over all of them together,
with each query head's sink. A kernel for another device takes the same data on that device and gives the same
numbers; it is found by the device's name, and installed as an entry point of the group `kvassay.kernels`.

Time measured on one device is no evidence for another: CPU milliseconds say nothing of a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

import torch
from torch import Tensor

from kvassay.errors import KernelError, did_you_mean
from kvassay.kernels.packed import PackedSide

GROUP = "kvassay.kernels"


@dataclass(frozen=True)
class PagedLayer:
    """One layer's block pool and constants, the same for every lane.

    keys, values: float32 [blocks, kv_heads, block_size, k_dim or v_dim], any strides but a contiguous last dimension
    scale: factor of the logits; softcap: `c * tanh(logit / c)`, None for none
    sinks: float32 [q_heads], a learned logit per head that takes mass and has no value
    """

    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class SlotRead:
    """Tokens in place in a pool: an ordered list of units per KV head, and from where to where each query reads.

    entries: int32 [kv_heads or 1 (the same for all heads), units]. With `unit` 1 physical slots
        (`block_id * block_size + offset`); else block ids, and `unit` is the pool's `block_size`
    last: int32 [queries, kv_heads], a query reads the list's tokens `first` up to, not including, `last`
    first: the same, None for 0
    bias, inner_bias: float32 [kv_heads, tokens of the list], added to the logits after or before the soft-cap
    keys, values: the pool, if it is not the layer's: rows decoded earlier are a pool of one block
    """

    entries: Tensor
    last: Tensor
    first: Tensor | None = None
    unit: int = 1
    bias: Tensor | None = None
    inner_bias: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class CodeRead:
    """Tokens of one encoded segment, dequantised or rebuilt inside the kernel.

    keys, values: the codes of both sides, with equally many rows for every KV head
    positions: int32 [kv_heads, rows], true positions, for keys stored before rotation
    seen: bool [queries or 1 (the same for all queries), kv_heads, rows], None if every row is read
    bias, inner_bias: float32 [kv_heads, rows], as in `SlotRead`
    """

    keys: PackedSide
    values: PackedSide
    positions: Tensor
    seen: Tensor | None = None
    bias: Tensor | None = None
    inner_bias: Tensor | None = None


Read = SlotRead | CodeRead
LaneRead = Sequence[Read]
"""All that the queries of one lane read of one layer."""


class Plan(Protocol):
    """Reads in the form in which a kernel takes them; good as long as the lanes read the same rows."""

    def run(self, q: Tensor) -> Tensor:
        """Attention of q, float32 [lanes, q_heads, queries, k_dim], over what the lanes read.

        Returns float32 [lanes, q_heads, queries, v_dim]; zeros for a query that reads nothing.
        """


class DecodeKernel(ABC):
    """Decode attention on one device."""

    place: torch.device = torch.device("cpu")
    """Where pools and queries lie; lists, biases and codes are taken from main memory."""
    longest_chunk: int = 8
    """Queries of a lane up to which attending in place pays; a longer chunk is worth gathering for matrix products."""

    def finish(self) -> None:  # noqa: B027  most devices answer when they are done
        """Wait until everything that was asked for is computed."""

    @abstractmethod
    def plan(self, layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> Plan:
        """Bring what `queries` queries of each lane read into the kernel's form. Nothing is computed."""

    def decode(self, layer: PagedLayer, q: Tensor, lanes: Sequence[LaneRead]) -> Tensor:
        """Plan and run at once."""
        return self.plan(layer, lanes, q.shape[2]).run(q)


def kernel(device: str) -> DecodeKernel:
    """The decode kernel of a device, `cuda:1` for the second of its kind; `KernelError` if there is none or it cannot
    be loaded."""
    name, _, number = device.partition(":")
    plugins = {point.name: point for point in entry_points(group=GROUP)}
    if name not in BUILT_IN and name not in plugins:
        known = sorted({*BUILT_IN, *plugins})
        raise KernelError(f"no decode kernel for device '{name}'{did_you_mean(name, known)}")
    try:
        made: Callable[..., DecodeKernel] = plugins[name].load() if name in plugins else BUILT_IN[name]
        return made(int(number)) if number else made()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise KernelError(f"the decode kernel for device '{device}' cannot be loaded: {error}") from error


# Each is imported when it is asked for: another would compile, or look for what is not there.


def _cpu() -> DecodeKernel:
    from kvassay.kernels.cpu import CpuKernel

    return CpuKernel()


def _cuda(number: int | None = None) -> DecodeKernel:
    from kvassay.kernels.gpu import cuda_kernel

    return cuda_kernel(number)


def _interpreted() -> DecodeKernel:
    from kvassay.kernels.gpu import interpreted_kernel

    return interpreted_kernel()


def _reference() -> DecodeKernel:
    from kvassay.kernels.gather import ReferenceKernel

    return ReferenceKernel()


BUILT_IN: dict[str, Callable[..., DecodeKernel]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "interpreted": _interpreted,
    "reference": _reference,
}
