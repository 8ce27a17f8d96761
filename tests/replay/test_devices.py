"""The closed loop and the timing stage with the GPU's kernels: by the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kvassay.cache.store import KVStore
from kvassay.kernels.device import kernel
from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import parse
from kvassay.record.load import LoadedModel
from kvassay.replay import engine
from kvassay.replay.arms import Arm
from kvassay.replay.closed import replay_trace
from kvassay.replay.latency import time_arms
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace
from kvassay.workload.sample import Branch, Sample
from tests.kernels.devices import GPU_KERNELS
from tests.record import tiny
from tests.replay.worlds import World

PROTOCOL = Protocol(free_tokens=2)


def arm(name: str, budget: str | None = None) -> Arm:
    return Arm(parse(name), Budget.parse(budget) if budget else None, Protection(2, 8))


ARMS = (
    arm("dense"),
    arm("snapkv(window=8)", "keep=0.25"),
    arm("quest(dense_layers=0)", "read=0.9"),
    arm("fp8"),
    arm("nearest-merge", "keep=0.5"),
)
EXACT = ("arm", "top1", "agree", "generated", "retained_bytes", "read_bytes", "selected_tokens", "blocks_freed")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(params=GPU_KERNELS)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def placed(world: World, device: str) -> LoadedModel:
    """The model where the device computes."""
    if device == "interpreted":
        return world.loaded
    return replace(world.loaded, model=copy.deepcopy(world.loaded.model).to(device))


@pytest.fixture(scope="module")
def short(gemma_mqa: World) -> Trace:
    """56 tokens of context and one question: an interpreted program takes as long as a thousand on a GPU."""
    ids = tuple(tiny.token_ids(61, seed=7))
    branch = Branch(ids[56:58], ids[58:], "question", "answer", (0, 1, 2), 0.5)
    return gemma_mqa.record("short", Sample("needle_multikey", 0, 0, ids[:56], (branch,), False))


def test_a_replay_says_the_same(gemma_mqa: World, short: Trace, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and full layers; chunks and single tokens; slots, lists per head, decoded copies and biases."""
    expected = replay_trace(gemma_mqa.loaded, short, ARMS, PROTOCOL)
    if device == "interpreted":
        monkeypatch.setattr(engine, "kernel", lambda name: kernel(device))
    found = replay_trace(placed(gemma_mqa, device), short, ARMS, PROTOCOL)
    for one, other in zip(found, expected, strict=True):
        assert [getattr(one, name) for name in EXACT] == [getattr(other, name) for name in EXACT]
        assert one.nll == pytest.approx(other.nll, abs=1e-4) and one.kl == pytest.approx(other.kl, abs=1e-4)


def test_its_kernel_can_be_timed(gemma_mqa: World, short: Trace, device: str) -> None:
    """What is read is the arm's, whatever reads it."""
    mine = time_arms(placed(gemma_mqa, device), short, ARMS[:4], PROTOCOL, 1, device=device)
    cpu = time_arms(gemma_mqa.loaded, short, ARMS[:4], PROTOCOL, 1)
    assert [one.read_bytes for one in mine] == [one.read_bytes for one in cpu]
    assert all(len(one.attention) == 1 and one.attention[0] > 0 for one in mine)


@pytest.mark.gpu
def test_blocks_lie_on_the_gpu_and_are_read_back_from_there(gemma_mqa: World) -> None:
    from kvassay.cache.ops import group_specs

    layout = gemma_mqa.loaded.layout
    store = KVStore(layout, group_specs(layout, 16), 3, device="cuda")
    assert store.keys(0).device.type == "cuda"
    store.keys(0)[:] = torch.arange(3, device="cuda").view(3, 1, 1, 1)
    assert store.keys(0)[2].cpu().unique().tolist() == [2.0]
