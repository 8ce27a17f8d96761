"""Decode attention on a GPU by Triton, and the same kernels run by Triton's interpreter where there is none.

As on the CPU, work is cut into pieces and partial results are merged (FlashDecoding, Dao et al. 2023); a program has
all query heads of a KV head as its rows. A plan brings lists, biases and codes to the device; a pool must lie there.
What these kernels cannot do they refuse. Nothing here has been timed: `docs/gpu.md` says what was checked, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvassay.cache.rope import inverse_frequencies
from kvassay.errors import KernelError
from kvassay.kernels.device import DecodeKernel, LaneRead, PagedLayer, Plan
from kvassay.kernels.packed import PackedSide
from kvassay.kernels.pieces import LOG2E, CodeJob, Job, SlotJob, jobs_of, owners

SHORTEST = 128
"""Tokens of a piece below which another one costs more than it gains; two tiles."""
PER_PROCESSOR = 4
"""Pieces for each multiprocessor."""
INTERPRETED_PROCESSORS = 2
"""How many the interpreter pretends to have, so that what is long is cut there too."""
WIDEST = 1024
"""Elements of a value row beyond which partial sums no longer fit the registers."""
K_CHUNK = 128
"""Elements of a key row that are multiplied at once."""
WARPS, MORE_WARPS = 4, 8
"""Of 32 threads each; with 4, dequantising a tile or summing wide rows takes more registers than there are."""
POOLS = (torch.float32, torch.float16, torch.bfloat16)
Launch = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Computes a job's partial results: (q, top, total, acc) -> None."""


def cuda_kernel(number: int | None = None) -> TritonKernel:
    """The kernel of a CUDA device, by default the one that torch uses; `KernelError` if there is none."""
    if not torch.cuda.is_available():
        raise KernelError(f"torch {torch.__version__} sees no CUDA device; the kernels can be tried with 'interpreted'")
    if _interpreting():
        raise KernelError("TRITON_INTERPRET=1 is set: it would run the kernels of device 'cuda' on the CPU")
    device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    return TritonKernel(device, torch.cuda.get_device_properties(device).multi_processor_count)


def interpreted_kernel() -> TritonKernel:
    """The same kernels run by Triton's interpreter on tensors in main memory: for tests, thousands of times slower."""
    if not _interpreting():
        raise KernelError("device 'interpreted' needs TRITON_INTERPRET=1 in the environment when Triton is imported")
    # The interpreter multiplies the bits of bfloat16 as integers (Triton 3.9).
    return TritonKernel(torch.device("cpu"), INTERPRETED_PROCESSORS, POOLS[:2])


def _interpreting() -> bool:
    """Whether Triton was imported to interpret its functions, its own among them; `KernelError` without Triton."""
    if find_spec("triton") is None:
        raise KernelError("GPU kernels need Triton; run: pip install 'kvassay[gpu]'")
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(standard.softmax, InterpretedFunction)


class TritonKernel(DecodeKernel):
    """`DecodeKernel` for pools of float32, float16 or bfloat16 on one device; sums are float32.

    Queries and weights are rounded to a 16-bit pool's type, as matrix units take them.
    """

    longest_chunk = 512

    def __init__(self, device: torch.device, processors: int, pools: Sequence[torch.dtype] = POOLS) -> None:
        """`processors`: of the device, each to be kept busy; `pools`: types of pools that can be read."""
        self.place, self.processors, self.pools = device, processors, pools

    def plan(self, layer: PagedLayer, lanes: Sequence[LaneRead], queries: int) -> Plan:
        """See `DecodeKernel.plan`: `KernelError` for a pool on another device, of another type or with wide values."""
        self._check(layer)
        jobs = jobs_of(layer, lanes, queries, PER_PROCESSOR * self.processors, SHORTEST)
        maker = _Launches(layer, self.place, queries)
        launches = [maker.of(job) for job in jobs if len(job.pieces)]
        counts = [len(job.pieces) for job in jobs if len(job.pieces)]
        kv_heads = layer.keys.shape[1]
        owner = owners(jobs, kv_heads)
        order = np.argsort(owner, kind="stable")
        first = np.searchsorted(owner[order], np.arange(len(lanes) * queries * kv_heads + 1))
        sinks = None if layer.sinks is None else (layer.sinks.float() * LOG2E).to(self.place).contiguous()
        pieces, starts = (_moved(x.astype(np.int32), self.place) for x in (order, first))
        return _Plan(layer, self.place, launches, counts, pieces, starts, sinks)

    def _check(self, layer: PagedLayer) -> None:
        for name, pool in (("keys", layer.keys), ("values", layer.values)):
            if pool.device != self.place:
                raise KernelError(
                    f"{name} lie on {pool.device}, this kernel reads {self.place}: move the pool, it is not copied"
                )
            if pool.dtype not in self.pools:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.pools)
                raise KernelError(f"{name} are {pool.dtype}, this kernel reads {known}")
        if layer.values.shape[3] > WIDEST:
            raise KernelError(f"values have {layer.values.shape[3]} elements, the GPU kernel takes at most {WIDEST}")

    def finish(self) -> None:
        """Wait until everything that was asked for is computed."""
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)


@dataclass(frozen=True)
class _Plan:
    layer: PagedLayer
    place: torch.device
    launches: Sequence[Launch]
    counts: Sequence[int]
    pieces: Tensor
    """int32, pieces by owner."""
    first: Tensor
    """int32 [owners + 1], where each owner's begin."""
    sinks: Tensor | None

    def run(self, q: Tensor) -> Tensor:
        """See `Plan.run`; q and the result are on the kernel's device."""
        _check_queries(q, self.layer, self.place)
        q = q if q.stride(3) == 1 else q.contiguous()
        with _launching_on(self.place):
            return self._run(q)

    def _run(self, q: Tensor) -> Tensor:
        from kvassay.kernels.triton_core import merge_pieces

        lanes, q_heads, queries, _ = q.shape
        kv_heads, v_dim = self.layer.keys.shape[1], self.layer.values.shape[3]
        group = q_heads // kv_heads
        total = q.new_empty(len(self.pieces), group, dtype=torch.float32)
        top, acc = torch.empty_like(total), total.new_empty(len(self.pieces), group, v_dim)
        at = 0
        for launch, many in zip(self.launches, self.counts, strict=True):
            mine = slice(at, at + many)
            launch(q, top[mine], total[mine], acc[mine])
            at = mine.stop
        out = total.new_empty(lanes, q_heads, queries, v_dim)
        if out.numel():
            merge_pieces[(len(self.first) - 1, _programs(group))](
                top, total, acc, self.pieces, self.first, total if self.sinks is None else self.sinks, out,
                queries, kv_heads, group, v_dim, SINKS=self.sinks is not None, V_WIDTH=_padded(v_dim), num_warps=WARPS,
            )  # fmt: skip
        return out


@dataclass(frozen=True)
class _Launches:
    """Makes the launches of one call's jobs."""

    layer: PagedLayer
    place: torch.device
    queries: int

    def of(self, job: Job) -> Launch:
        """A job's kernel with everything it is told but queries and results."""
        return self._slots(job) if isinstance(job, SlotJob) else self._codes(job)

    def _slots(self, job: SlotJob) -> Launch:
        from kvassay.kernels.triton_slots import attend_slots

        keys, values = (_rows(pool, self.place) for pool in (job.keys, job.values))
        listed = job.biases()
        entries, pieces, biases = (_moved(x, self.place) for x in (job.entries(), job.pieces, listed))
        k_dim, v_dim, size = keys.shape[3], values.shape[3], keys.shape[2]
        meta = {
            "SIZE": size,
            "BY_BLOCK": job.unit > 1,
            "BIASED": len(listed) > 0,
            **self._meta(k_dim, v_dim, 64 if max(k_dim, v_dim) <= 128 else 32),
            "num_warps": WARPS if v_dim <= 256 else MORE_WARPS,
        }

        def launch(q: Tensor, top: Tensor, total: Tensor, acc: Tensor) -> None:
            group = q.shape[1] // self.layer.keys.shape[1]
            attend_slots[(len(pieces), _programs(group))](
                q, keys, values, entries, pieces, biases, top, total, acc,
                q.stride()[:3], keys.stride()[:3], values.stride()[:3], group, self.queries, k_dim, v_dim,
                *self._constants(), **meta,
            )  # fmt: skip

        return launch

    def _codes(self, job: CodeJob) -> Launch:
        from kvassay.kernels.triton_codes import attend_codes

        sides = [self._side(side) for side in (job.read.keys, job.read.values)]
        rope, inner_outer = job.read.keys.rope, job.biases()
        frequencies = torch.zeros(1) if rope is None else inverse_frequencies(rope)
        pieces, positions, seen, inner, outer = (
            _moved(x, self.place) for x in (job.pieces, job.positions(), job.seen().view(np.uint8), *inner_outer)
        )
        frequencies = frequencies.to(self.place)
        shape = job.read.keys.kv_heads, job.read.keys.rows
        k_dim, v_dim = job.read.keys.dim, job.read.values.dim
        meta = {
            "K_KINDS": sides[0][1],
            "V_KINDS": sides[1][1],
            "TURNED": rope is not None,
            "INTERLEAVED": rope is not None and rope.interleaved,
            "SELECTED": job.read.seen is not None,
            "INNER": job.read.inner_bias is not None,
            "OUTER": job.read.bias is not None,
            **self._meta(k_dim, v_dim, 32),
            "num_warps": MORE_WARPS,
        }

        def launch(q: Tensor, top: Tensor, total: Tensor, acc: Tensor) -> None:
            group = q.shape[1] // self.layer.keys.shape[1]
            attend_codes[(len(pieces), _programs(group))](
                q, pieces, top, total, acc, *sides[0][0], *sides[1][0], positions, frequencies, seen, inner, outer,
                q.stride()[:3], *shape, group, self.queries, k_dim, v_dim, len(frequencies),
                *self._constants(), **meta,
            )  # fmt: skip

        return launch

    def _side(self, side: PackedSide) -> tuple[list[Tensor], int]:
        from kvassay.kernels.triton_codes import device_side

        laid = device_side(side)
        return [_moved(x, self.place) for x in laid.arrays()], laid.kinds

    def _constants(self) -> tuple[float, float]:
        """Scale and soft-cap, in units of log2."""
        return self.layer.scale * LOG2E, (self.layer.softcap or 1.0) * LOG2E

    def _meta(self, k_dim: int, v_dim: int, tile: int) -> dict[str, Any]:
        chunk = min(_padded(k_dim), K_CHUNK)
        return {
            "CAPPED": bool(self.layer.softcap),
            "K_CHUNK": chunk,
            "K_CHUNKS": -(-k_dim // chunk),
            "V_WIDTH": _padded(v_dim),
            "TILE": tile if v_dim <= 256 else 16,
        }


def _check_queries(q: Tensor, layer: PagedLayer, place: torch.device) -> None:
    if q.device != place:
        raise KernelError(f"queries lie on {q.device}, this kernel reads {place}")
    if q.shape[1] % layer.keys.shape[1]:
        raise KernelError(f"{q.shape[1]} query heads cannot be shared out over {layer.keys.shape[1]} KV heads")


def _launching_on(place: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the device that torch uses just then."""
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


def _rows(pool: Tensor, place: torch.device) -> Tensor:
    """A pool with contiguous rows on the device; the layer's own is there already."""
    pool = pool.to(place)
    return pool if pool.stride(3) == 1 else pool.contiguous()


def _moved(x: NDArray[Any], place: torch.device) -> Tensor:
    """An array on the device; one element of nothing where it is empty, so that there is an address."""
    array = np.require(x, requirements=["C", "W"]) if x.size else np.zeros(1, dtype=x.dtype)
    return torch.from_numpy(array).to(place)


def _padded(width: int) -> int:
    """The power of two, at least 16, that holds a width: what matrix units take."""
    return max(16, 1 << (width - 1).bit_length())


def _programs(group: int) -> int:
    """Programs that share a KV head's query heads."""
    from kvassay.kernels.triton_core import ROWS

    return -(-group // ROWS.value)
