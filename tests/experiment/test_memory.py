"""The memory plan: sizes by hand for a tiny model, the pool against the one that is made, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvassay.cache.ops import group_specs
from kvassay.cache.store import KVStore
from kvassay.errors import DoesNotFit
from kvassay.experiment import memory
from kvassay.experiment.memory import memory_plan, pool_bytes, recording_need, weight_bytes
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.run import run
from kvassay.experiment.schema import load_experiment
from kvassay.layout.config import from_config
from kvassay.replay.closed import pool_blocks
from tests.experiment.test_run import FakeReplay
from tests.experiment.tiny import write_experiment

# 2 layers: q, o 32 x 32; k, v 32 x 16; three of 32 x 48; two norms of 32. 257 words in and out, and the last norm.
PARAMETERS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 2 * 257 * 32 + 32
KV = 2 * 2 * 8 * 2 * 4
"""Bytes of a token: 2 layers, 2 heads, 8 elements, both sides, float32."""
CONTEXT, CHUNK = 384, 128
ACTIVATIONS = CHUNK * 32 * memory.ACTIVATIONS * 4


def made(folder: Path, model: Path, policies: str, device: str = "cpu") -> Plan:
    file = write_experiment(folder, model)
    text = file.read_text(encoding="utf-8").replace("seed = 3", f'seed = 3\ndevice = "{device}"')
    file.write_text(text.replace('["knorm"]', f"{policies}\nalways_on = false"), encoding="utf-8")
    return make_plan(load_experiment(file), file.name, folder)


def free(monkeypatch: pytest.MonkeyPatch, **devices: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: devices[device])


def test_an_evicting_arm_owns_what_it_is_asked_and_an_encoding_arm_a_copy(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, cpu=1 << 40)
    (need,) = memory_plan(made(tmp_path, tiny_model, '["dense", "knorm", "fp8"]'), jobs=3)
    assert (need.weights, need.dense_kv) == (4 * PARAMETERS, CONTEXT * KV)
    assert need.private == CONTEXT * KV + 3 * 256 * KV
    assert need.workspace == 64 * 257 * (3 * 4 + 28) + 4 * 64 * CONTEXT * 8 + ACTIVATIONS + (1 << 30)
    assert need.total == 3 * (need.weights + need.dense_kv + need.private + need.workspace)
    assert need.line.startswith("memory of cpu, modelled (tiny-llama, kv_short 384")
    assert need.line.endswith(f"x 3 processes = {need.total / 2**30:.2f} GiB of 1024.00 GiB free")


def test_a_gpu_gives_the_whole_pool_and_main_memory_keeps_what_is_decoded(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, cpu=1 << 40, cuda=1 << 30)
    plan = made(tmp_path, tiny_model, '["dense", "knorm", "fp8"]', "cuda")
    host, gpu = memory_plan(plan, jobs=1)
    assert (host.device, host.private) == ("cpu", CONTEXT * KV)
    blocks = 1 + (2 * 3 + 2) * (-(-(CONTEXT + 2 * (256 + 3)) // 16) + 4)
    assert (gpu.device, gpu.dense_kv + gpu.private) == ("cuda", blocks * 16 * KV)
    assert gpu.workspace == ACTIVATIONS


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma-3-270m"])
def test_the_pool_is_as_large_as_the_store_makes_it(tmp_path: Path, tiny_model: Path, model: str) -> None:
    """The pool of a real layout, sliding groups and all, made without memory."""
    plan, layout = made(tmp_path, tiny_model, '["dense"]'), from_config(model)
    groups = group_specs(layout, 16)
    blocks = pool_blocks(groups, 1000, 256 + plan.protocol.free_tokens, 4)
    store = KVStore(layout, groups, blocks, device="meta")
    sides = [side(layer.index) for layer in layout.storing for side in (store.keys, store.values)]
    storages = {side.untyped_storage()._cdata: side.untyped_storage().nbytes() for side in sides}
    assert pool_bytes(layout, 1000, plan.arms, plan) == sum(storages.values())


def test_a_run_that_cannot_fit_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, cpu=1 << 20)
    plan, told = made(tmp_path, tiny_model, '["dense", "knorm"]'), Told()
    need = memory_plan(plan)[0]
    message = rf"^cpu: {need.total} bytes needed \(modelled\), 1048576 available, for tiny-llama, kv_short 384"
    with pytest.raises(DoesNotFit, match=message):
        run(plan, tmp_path / "run", told, FakeReplay(), jobs=1)  # type: ignore[arg-type]
    assert told.notes == [need.line] and not (tmp_path / "run").exists()


def test_a_model_that_is_not_here_has_no_plan(tmp_path: Path) -> None:
    assert weight_bytes("someone/something") == 0
    plan = made(tmp_path, Path("someone/something"), '["dense"]')
    assert memory_plan(plan) == []


def test_a_damaged_file_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00")
    assert weight_bytes(str(tmp_path)) == 0


def test_recording(tiny_model: Path) -> None:
    need = recording_need(str(tiny_model), from_config(tiny_model), CONTEXT, CHUNK, "cpu")
    assert (need.weights, need.dense_kv, need.private) == (4 * PARAMETERS, CONTEXT * KV, 0)
    assert need.workspace == CONTEXT * KV + ACTIVATIONS + (1 << 30) and "arms" not in need.line
    assert need.title == "tiny-llama, 384 tokens" and need.available > 0


@pytest.mark.gpu
def test_what_is_free_on_a_gpu() -> None:
    before = memory.available_bytes("cuda")
    held = torch.empty(1 << 28, device="cuda")
    assert before - memory.available_bytes("cuda") >= held.nbytes


class Told:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
