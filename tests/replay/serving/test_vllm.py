"""vLLM's manager and our ledger under the same scheduler: the same hits, admissions, preemptions and times."""

from __future__ import annotations

import random

import pytest

from kvassay.errors import CacheError
from kvassay.replay.serving.backend import OursBackend
from kvassay.replay.serving.footprint import DENSE, Footprint
from kvassay.replay.serving.scheduler import Limits, Scheduler
from kvassay.trace.requests.record import Request
from tests.replay.serving.build import SECOND, ask, full, hybrid
from tests.replay.serving.test_scheduler import outcome

pytestmark = pytest.mark.vllm


def requests(seed: int) -> list[Request]:
    """Conversations: prompts that extend earlier ones, in blocks of 4 tokens, and unrelated ones between them."""
    rng = random.Random(seed)
    made: list[Request] = []
    paths: list[list[int]] = [[]]
    fresh, now = 0, 0.0
    for _ in range(120):
        now += rng.choice([0, 0, 1, 3, 12])
        path = list(rng.choice(paths))[: rng.randint(0, 12)]
        prompt = 4 * len(path) + rng.randint(1, 60)
        while len(path) < -(-prompt // 4):
            path.append(fresh)
            fresh += 1
        paths.append(path)
        made.append(ask(now, prompt, rng.randint(1, 40), path))
    return made


@pytest.mark.parametrize("windowed", [False, True], ids=["full", "hybrid"])
@pytest.mark.parametrize(
    "footprint",
    [DENSE, Footprint("lets go", freed_fraction=0.5), Footprint("rewrites", freed_fraction=0.5, writes=True)],
    ids=lambda footprint: footprint.arm,
)
@pytest.mark.parametrize(("usable", "seed"), [(60, 0), (90, 1), (400, 2)])
def test_both_backends_agree(windowed: bool, footprint: Footprint, usable: int, seed: int) -> None:
    from kvassay.replay.serving.vllm import VllmBackend

    geometry = hybrid() if windowed else full()
    backends = (
        OursBackend(geometry, usable + 1, 4096),
        VllmBackend(geometry, usable + 1, 4096, edits=footprint.edits),
    )
    logs = [
        Scheduler(geometry, backend, SECOND, footprint, Limits(32, 16), 4).run(requests(seed)) for backend in backends
    ]
    assert outcome(logs[0]) == outcome(logs[1])
    assert logs[0].sampled_blocks == logs[1].sampled_blocks
    assert [log.peak_blocks for log in logs] == [logs[0].peak_blocks] * 2
    assert sum(flight.cached for flight in logs[0].flights) > 0
    if usable == 60 and not footprint.edits:
        assert logs[0].preemptions > 0, "the pool must be under pressure"


def test_edits_need_a_backend_that_was_made_for_them() -> None:
    from kvassay.replay.serving.vllm import VllmBackend

    backend = VllmBackend(full(), 10, 4096)
    backend.admit("0", [1, 2, 3], 3, 3)
    with pytest.raises(CacheError, match="made without edits"):
        backend.release("0", 0.5, 2)
