"""What is the GPU kernel's own: 16-bit pools, many query heads, refusals. What kernels share is in the other files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvassay.errors import KernelError
from kvassay.kernels.device import PagedLayer, SlotRead, kernel
from kvassay.kernels.gather import ReferenceKernel
from tests.kernels.devices import GPU, GPU_KERNELS, NO_TRITON, Device

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=GPU_KERNELS)
def gpu(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield Device(request.param)


def layer(k_dim: int, v_dim: int, dtype: torch.dtype = torch.float32) -> PagedLayer:
    rng = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(5, 1, 16, dim, generator=rng).to(dtype) for dim in (k_dim, v_dim))
    return PagedLayer(keys, values, k_dim**-0.5)


def read(tokens: int = 77) -> SlotRead:
    blocks = torch.tensor([[3, 0, 4, 1, 2]], dtype=torch.int32)
    return SlotRead(blocks, torch.tensor([[tokens]], dtype=torch.int32), unit=16)


def queries(heads: int, dim: int) -> torch.Tensor:
    return torch.randn(1, heads, 1, dim, generator=torch.Generator().manual_seed(1))


def difference(gpu: Device, pool: PagedLayer, q: torch.Tensor) -> float:
    return float((gpu.decode(pool, q, [[read()]]) - ReferenceKernel().decode(pool, q, [[read()]])).abs().max())


class TestForms:
    def test_a_half_precision_pool_is_read_as_it_is(self, gpu: Device) -> None:
        """Queries, too, are float16 numbers here, so that only the weights are rounded, each by 2 ** -11 at most."""
        pool, q = layer(64, 64, torch.float16), queries(3, 64).half().float()
        assert 0 < difference(gpu, pool, q) < 2**-11 * float(pool.values.abs().max())

    def test_bfloat16(self, gpu: Device) -> None:
        pool, q = layer(64, 64, torch.bfloat16), queries(3, 64).bfloat16().float()
        if gpu.name == "interpreted":
            with pytest.raises(KernelError, match=r"^keys are torch.bfloat16, this kernel reads float32, float16$"):
                gpu.decode(pool, q, [[read()]])
        else:
            assert 0 < difference(gpu, pool, q) < 2**-8 * float(pool.values.abs().max())

    def test_more_query_heads_than_a_program_takes(self, gpu: Device) -> None:
        assert difference(gpu, layer(24, 16), queries(37, 24)) < 2e-6

    def test_a_latent_cache(self, gpu: Device) -> None:
        """Keys of 576 elements, of which the first 512 are the values."""
        pool = layer(576, 512)
        for values in (pool.keys[..., :512], pool.keys):  # as the model has them, and whole rows, to be cut later
            assert difference(gpu, PagedLayer(pool.keys, values, pool.scale), queries(4, 576)) < 2e-6


class TestRefusals:
    def test_a_pool_elsewhere(self, gpu: Device) -> None:
        pool = layer(16, 16)
        far = PagedLayer(pool.keys.to("meta"), pool.values, 1.0)
        with pytest.raises(
            KernelError, match=r"keys lie on meta, this kernel reads c.*: move the pool, it is not copied"
        ):
            gpu.kernel.plan(far, [[read()]], 1)

    def test_a_type_without_a_kernel(self, gpu: Device) -> None:
        with pytest.raises(KernelError, match=r"keys are torch\.float64, this kernel reads float32, float16"):
            gpu.decode(layer(16, 16, torch.float64), queries(1, 16), [[read()]])

    def test_values_that_are_too_wide(self, gpu: Device) -> None:
        with pytest.raises(KernelError, match="values have 1025 elements, the GPU kernel takes at most 1024"):
            gpu.decode(layer(16, 1025), queries(1, 16), [[read()]])

    def test_heads_that_cannot_be_shared_out(self, gpu: Device) -> None:
        pool = layer(16, 16)
        two = PagedLayer(pool.keys.expand(-1, 2, -1, -1), pool.values.expand(-1, 2, -1, -1), 1.0)
        with pytest.raises(KernelError, match="3 query heads cannot be shared out over 2 KV heads"):
            gpu.decode(two, queries(3, 16), [[]])

    @pytest.mark.skipif(GPU, reason="there is a CUDA device")
    def test_no_cuda_device(self) -> None:
        with pytest.raises(KernelError, match="sees no CUDA device; the kernels can be tried with 'interpreted'"):
            kernel("cuda")

    def test_the_interpreter_must_be_asked_for_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton", reason=NO_TRITON)
        monkeypatch.setattr("kvassay.kernels.gpu._interpreting", lambda: False)
        with pytest.raises(KernelError, match="needs TRITON_INTERPRET=1 in the environment"):
            kernel("interpreted")

    def test_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvassay.kernels.gpu.find_spec", lambda name: None)
        with pytest.raises(KernelError, match=r"^GPU kernels need Triton; run: pip install 'kvassay\[gpu\]'$"):
            kernel("interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_form_compiles_for_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    """What the interpreter takes a compiler may not: types, shapes, globals. Nothing is run."""
    pytest.importorskip("triton", reason=NO_TRITON)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compiling", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert {name: kernels.count(name) for name in kernels} == {"attend_slots": 8, "attend_codes": 6, "merge_pieces": 6}
