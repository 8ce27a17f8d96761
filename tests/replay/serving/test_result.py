"""The sums of a small replay, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvassay.errors import CacheError
from kvassay.layout.config import from_config
from kvassay.measure.cost import Weights
from kvassay.measure.hardware.files import load_hardware
from kvassay.replay.serving.cost import TableTimes
from kvassay.replay.serving.footprint import Footprint, dropped
from kvassay.replay.serving.result import Levels, ServingResult, Targets, summarise
from kvassay.replay.serving.serve import Setting, arrivals, compare, serve
from kvassay.trace.requests.record import Request, RequestFile
from tests.replay.serving.build import SECOND, ask, full, scheduler

ARM = Footprint("arm", correct=0.5, dense_correct=0.75, freed_fraction=0.5, retained_fraction=0.6, read_fraction=0.7)


def summary(targets: Targets, footprint: Footprint = ARM) -> ServingResult:
    """A and B as in the first schedule by hand; both 5 seconds later, and C that never fits."""
    served = scheduler(100, batched=8, footprint=footprint)
    log = served.run([ask(5, 8, 3), ask(5.5, 12, 2), ask(6, 500, 1)])
    return summarise(log, served.geometry, footprint, 100, "ours", SECOND, targets)


def test_times_rates_and_goodput() -> None:
    result = summary(Targets(ttft=2.0))
    assert (result.requests, result.refused, result.admitted, result.finished) == (3, 1, 2, 2)
    assert (result.ttft.count, result.ttft.mean, result.ttft.p50) == (2, 1.75, 1.75)
    assert (result.tpot.mean, result.tpot.p99) == (1.0, 1.0)
    assert (result.seconds, result.busy_seconds, result.steps) == (4.0, 4.0, 4)
    assert (result.requests_per_second, result.output_tokens_per_second) == (0.5, 5 / 4)
    assert (result.in_time, result.correct, result.goodput) == (1, 0.5, 1 * 0.5 / 4)
    assert summary(Targets(tpot=0.9)).in_time == 0
    assert summary(Targets()).in_time == 2


def test_goodput_without_known_correctness_is_not_made_up() -> None:
    assert summary(Targets(), Footprint("arm")).goodput is None


def test_occupancy_is_a_mean_over_busy_time() -> None:
    """Requests at the end of each second: 1, 2, 2, 1; tokens: 8, 9 + 7, 10 + 12, 13."""
    result = summary(Targets(), Footprint("dense"))
    assert (result.mean_requests, result.peak_requests) == (6 / 4, 2)
    assert (result.mean_tokens, result.peak_tokens) == ((8 + 16 + 22 + 13) / 4, 22)


def test_capacity_counts_a_mean_request_after_its_edit() -> None:
    """Prompts of 173.3 tokens on average, answers of 2: 44 blocks of 4; half of the 43 full ones of a prompt go."""
    assert summary(Targets(), Footprint("dense")).capacity == 100 / 44
    assert summary(Targets()).capacity == 100 / (44 - 21)


def test_levels_are_kept_apart() -> None:
    arm, dense = summary(Targets()), summary(Targets(), Footprint("dense"))
    levels = Levels.of(replace(arm, mean_requests=3.0, hit_rate=0.25), replace(dense, hit_rate=0.75))
    assert levels.hits == -0.5
    assert (levels.selected, levels.retained, levels.blocks_freed) == (1.0, 0.6, 0.5)
    assert levels.requests == 3.0 / 1.5
    assert levels.capacity == pytest.approx(44 / 23)


def test_dropped_blocks_are_spread_and_leave_the_first() -> None:
    assert dropped(8, 0.25) == [3, 7]
    assert dropped(5, 0.75) == [1, 3, 4]
    assert dropped(10, 0.3) == [3, 6, 9], "0.3 * 10 is 3 blocks, though not in floats"
    assert dropped(1, 0.9) == []


def test_a_footprint_out_of_range_is_refused() -> None:
    with pytest.raises(CacheError, match=r"arm: freed_fraction is 1, must be in \[0, 1\)"):
        Footprint("arm", freed_fraction=1.0)
    with pytest.raises(CacheError, match="arm: read_fraction is -1"):
        Footprint("arm", read_fraction=-1.0)


# -- the entry point ------------------------------------------------------------------------------------


def trace(requests: list[Request], block_size: int = 4) -> RequestFile:
    return RequestFile(Path("made"), "kvassay", block_size, "ceil", lambda: iter(requests))


def setting(model: str = "smollm2-135m", **changes: object) -> Setting:
    """A pool of 5 blocks of 4 tokens, 4 of them usable; a second per step."""
    block = 4 * 30 * 3 * 2 * 64 * 2
    plain = Setting(
        from_config(model), 5 * block, load_hardware("h200"), Weights(1e8), table=TableTimes(1.0, how="table: made")
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_arms_are_compared_on_the_same_bytes() -> None:
    """Prompts of 2 blocks: dense 2 at a time; with half the bytes per block 9 are usable, 4 at a time."""
    arm = replace(ARM, timing="from_start")
    found = compare(trace([ask(0, 7, 2) for _ in range(4)]), setting(), [arm])
    dense, half = found.results
    assert (dense.arm, dense.pool_blocks, dense.peak_requests, dense.correct) == ("dense", 4, 2, 0.75)
    assert (half.pool_blocks, half.peak_requests, half.block_bytes) == (9, 4, dense.block_bytes / 2)
    assert found.levels[0].requests == 2.0
    assert dense.times == "table: made"


def test_side_data_makes_blocks_dearer() -> None:
    assert serve(trace([ask(0, 4, 1)]), setting(), Footprint("quest", side_fraction=0.25)).pool_blocks == 3


def test_a_smaller_cache_beside_windows_is_refused() -> None:
    arm = replace(ARM, timing="from_start")
    with pytest.raises(CacheError, match="blocks of one pool must be equal"):
        serve(trace([ask(0, 4, 1)]), setting("gemma-3-270m"), arm)


def test_sessions_run_side_by_side_and_faster_if_asked() -> None:
    rows = [ask(0, 4, 1, session="a"), ask(8, 4, 1, session="a"), ask(2, 4, 1, session="b")]
    assert [one.arrival for one in arrivals(rows, 2.0, None)] == [0.0, 1.0, 4.0]
    assert [one.arrival for one in arrivals(rows, 1.0, 2)] == [0.0, 8.0]


def test_the_geometry_of_the_capacity_is_in_tokens() -> None:
    assert full(4).units(175) == 44
