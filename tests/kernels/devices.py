"""The devices whose kernels the tests are run on, and how a call is brought there and back."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from kvassay.kernels.device import LaneRead, PagedLayer, kernel

GPU = torch.cuda.is_available()
NO_TRITON = "Triton is not installed: pip install 'kvassay[gpu]'"
REAL_GPU = "a CUDA device is here: `pytest -m gpu` runs the same kernels on it"


def interpreted(*more: pytest.MarkDecorator) -> ParameterSet:
    """The GPU's kernels by Triton's interpreter."""
    without_triton = pytest.mark.skipif(find_spec("triton") is None, reason=NO_TRITON)
    return pytest.param("interpreted", marks=[without_triton, pytest.mark.skipif(GPU, reason=REAL_GPU), *more])


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", interpreted(pytest.mark.slow), CUDA]
GPU_KERNELS = [interpreted(), CUDA]


class Device:
    """A kernel that is given tensors in main memory and answers there."""

    def __init__(self, name: str) -> None:
        self.name, self.kernel = name, kernel(name)

    def decode(self, layer: PagedLayer, q: Tensor, lanes: Sequence[LaneRead]) -> Tensor:
        """The kernel's answer; pools keep their strides on the way."""
        keys, values = (there(pool, self.kernel.place) for pool in (layer.keys, layer.values))
        moved = PagedLayer(keys, values, layer.scale, layer.softcap, layer.sinks)
        return self.kernel.decode(moved, q.to(self.kernel.place), lanes).cpu()


def there(pool: Tensor, place: torch.device) -> Tensor:
    """The same memory layout on a device."""
    if pool.device == place:
        return pool
    extent = 1 + sum((size - 1) * step for size, step in zip(pool.shape, pool.stride(), strict=True))
    flat = pool.as_strided((extent,), (1,)).to(place)
    return flat.as_strided(pool.shape, pool.stride())
