"""Schedules worked out by hand: who runs when, who waits, who is preempted, what is found again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvassay.errors import CacheError
from kvassay.replay.serving import scheduler as module
from kvassay.replay.serving.backend import OursBackend
from kvassay.replay.serving.cost import TableTimes
from kvassay.replay.serving.footprint import Footprint, Timing
from kvassay.replay.serving.log import Log
from kvassay.replay.serving.scheduler import Scheduler
from kvassay.trace.requests.record import Request
from tests.replay.serving.build import ask, full, hybrid, scheduler


def test_three_requests_by_hand() -> None:
    """Budget 8 a step. A prefills 0-1; 1-2 A decodes, B prefills 7; 2-3 A ends, B prefills 5; 3-4 B ends; C 10-11."""
    log = scheduler(100, batched=8).run([ask(0, 8, 3), ask(0.5, 12, 2), ask(10, 4, 1)])
    a, b, c = log.flights
    assert [flight.first_token for flight in (a, b, c)] == [1.0, 3.0, 11.0]
    assert [flight.finished for flight in (a, b, c)] == [3.0, 4.0, 11.0]
    assert [flight.ttft for flight in (a, b, c)] == [1.0, 2.5, 1.0]
    assert [flight.tpot for flight in (a, b, c)] == [1.0, 1.0, None]
    assert (log.steps, log.end, log.busy) == (5, 11.0, 5.0)
    assert (log.prefilled_tokens, log.decoded_tokens, log.peak_requests) == (24, 3, 2)


def test_step_times_count_tokens_and_contexts() -> None:
    """1 + 8 x 0.1; 1 + 8 x 0.1 + 9 x 0.01; 1 + 6 x 0.1 + 10 x 0.01; 1 + 0.1 + 13 x 0.01; C 1 + 4 x 0.1."""
    times = TableTimes(step=1.0, token=0.1, context=0.01)
    log = scheduler(100, batched=8, times=times).run([ask(0, 8, 3), ask(0.5, 12, 2), ask(10, 4, 1)])
    assert [flight.finished for flight in log.flights] == pytest.approx([1.8 + 1.89 + 1.7, 6.62, 11.4])


def test_a_request_that_gets_no_block_preempts_the_last_one() -> None:
    """4 blocks of 4 tokens. A and B prefill in 0-1 (2 + 1 blocks). At 1 A takes the last block and B finds none: it
    goes, itself being the last. A needs a fourth block at its 13th token and takes B's old one, so B computes its
    5 tokens again at 6-7, when A is done.
    """
    log = scheduler(4).run([ask(0, 8, 6), ask(0, 4, 6)])
    a, b = log.flights
    assert (a.first_token, a.finished, a.preemptions) == (1.0, 6.0, 0)
    assert (b.first_token, b.finished, b.preemptions) == (1.0, 11.0, 1)
    assert (b.recomputed, b.tpot, log.preemptions) == (4, 2.0, 1)


def test_a_preempted_request_s_own_blocks_are_no_hits() -> None:
    """B is admitted again on its own block, which nobody took: that is not in the hit count (vllm #25780)."""
    log = scheduler(5).run([ask(0, 12, 5), ask(0, 4, 9, blocks=[0])])
    b = log.flights[1]
    assert (b.preemptions, b.recomputed, b.cached) == (1, 0, 0)


def test_a_whole_prompt_must_fit_before_its_first_chunk() -> None:
    """A holds 3 of 5 blocks until 3; B's first chunk of 4 would fit, its 12 tokens do not."""
    log = scheduler(5, batched=5).run([ask(0, 9, 2), ask(0, 12, 1)])
    a, b = log.flights
    assert a.finished == 3.0
    assert (b.first_token, log.preemptions) == (6.0, 0)


def test_what_fits_no_empty_pool_is_refused_and_counted() -> None:
    log = scheduler(3).run([ask(0, 12, 1), ask(0, 8, 1), ask(1, 8, 4)])
    assert log.refused == 1, "12 + 1 tokens need 4 blocks; 8 + 4 need 3"
    assert [flight.finished is not None for flight in log.flights] == [False, True, True]
    assert scheduler(9, max_tokens=11).run([ask(1, 8, 4)]).refused == 1


def test_only_so_many_run_at_once() -> None:
    log = scheduler(100, requests=2).run([ask(0, 4, 3), ask(0, 4, 5), ask(0, 4, 2)])
    assert [flight.first_token for flight in log.flights] == [1.0, 1.0, 4.0]
    assert log.peak_requests == 2


def test_an_arrival_during_decoding_is_seen_at_the_next_step() -> None:
    log = scheduler(100).run([ask(0, 4, 100), ask(10.5, 4, 1), ask(20.0, 4, 1)])
    assert [flight.first_token for flight in log.flights] == [1.0, 12.0, 21.0]


def test_a_request_that_waits_for_blocks_is_counted_once() -> None:
    """C shares A's 3 blocks and is looked up at every second in which B decodes (vllm #43736)."""
    ids = [0, 1, 2, 3]
    log = scheduler(8, batched=4).run([ask(0, 13, 2, ids), ask(4, 8, 9), ask(7, 29, 1, [*ids[:3], 10, 11, 12, 13, 14])])
    a, b, c = log.flights
    assert (a.finished, b.first_token, b.finished) == (5.0, 7.0, 15.0)
    assert (c.cached, c.preemptions) == (12, 0)
    assert c.first_token == 15.0 + 5, "17 tokens in chunks of 4"


# -- prefix hits ----------------------------------------------------------------------------------------

IDS = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("footprint", "cached"),
    [
        (Footprint("dense"), 16),
        (Footprint("lets go", freed_fraction=0.5), 16),
        (Footprint("rewrites", freed_fraction=0.5, writes=True), 0),
        (Footprint("smaller from the start", freed_fraction=0.5, timing="from_start"), 16),
    ],
)
def test_hits_lost_through_rewritten_blocks(footprint: Footprint, cached: int) -> None:
    """17 tokens again: 4 blocks are found, the last token is always computed. A block let go is findable until it is
    reused; one written in place is not, here the first, so nothing is.
    """
    log = scheduler(100, footprint=footprint).run([ask(0, 17, 3, IDS), ask(10, 17, 3, IDS)])
    assert [flight.cached for flight in log.flights] == [0, cached]


def test_blocks_let_go_are_lost_once_somebody_takes_them() -> None:
    """8 blocks. A keeps 0, 2 and its partial block of 5; the other request needs 5 and reuses blocks 1 and 3, oldest
    first, then nothing: at 10 A's successor finds block 0 only.
    """
    footprint = Footprint("lets go", freed_fraction=0.5)
    log = scheduler(8, footprint=footprint).run([ask(0, 17, 8, IDS), ask(2, 17, 1), ask(20, 17, 1, IDS)])
    assert [flight.cached for flight in log.flights] == [0, 0, 4]


def test_requests_of_one_step_share() -> None:
    log = scheduler(6).run([ask(0, 17, 2, IDS), ask(0, 17, 2, IDS)])
    assert [(flight.cached, flight.finished) for flight in log.flights] == [(0, 2.0), (16, 2.0)]
    assert log.peak_blocks == 6, "4 shared, one each of their own"


def test_a_writer_copies_what_another_holds() -> None:
    """Both rewrite 2 of their 4 shared blocks: the first copies them, the second owns them alone by then.

    Blocks held after the edits: 2 copies + 1, and 2 + 1 of the second; two that both let go are free.
    """
    served = scheduler(20, footprint=Footprint("rewrites", freed_fraction=0.5, writes=True))
    served.waiting.extend(served._flights([ask(0, 17, 2, IDS), ask(0, 17, 2, IDS)]))
    served.step()
    assert isinstance(served.backend, OursBackend)
    served.backend.check()
    tables = [served.backend.tables(flight.name)[0] for flight in served.running]
    assert [[block != 0 for block in table] for table in tables] == [[True, False, True, False, True]] * 2
    assert not {*tables[0]} & {*tables[1]} - {0}
    assert served.backend.usable - served.backend.free_blocks == 6


# -- footprints and concurrency -------------------------------------------------------------------------


def most_at_once(usable: int, footprint: Footprint) -> int:
    """Prompts of 65 tokens, 5 blocks of 16, and answers that stay in the fifth."""
    log = scheduler(usable, geometry=full(16), footprint=footprint).run([ask(0, 65, 15) for _ in range(40)])
    assert log.preemptions == 0
    return log.peak_requests


def test_half_the_bytes_from_the_start_is_twice_the_requests() -> None:
    half = Footprint("half", freed_fraction=0.5, timing="from_start")
    geometry = full(16)
    blocks = [geometry.pool_blocks(16_000, scale) for scale in (1.0, half.block_scale)]
    assert blocks == [16, 32]
    assert [most_at_once(count - 1, half) for count in blocks] == [3, 6]


@pytest.mark.parametrize(("usable", "dense", "half"), [(15, 3, 4), (60, 12, 19)])
def test_half_the_blocks_after_the_prefill_gain_less(usable: int, dense: int, half: int) -> None:
    """Edited requests hold 3 of their 5 blocks, but each prompt needs 5 first: k are joined by one more while
    3 k + 5 <= usable.
    """
    assert most_at_once(usable, Footprint("dense")) == dense
    assert most_at_once(usable, Footprint("half", freed_fraction=0.5)) == half


# -- what is compressed as it is generated ---------------------------------------------------------------

KARA = Footprint("kara", timing="every_n", interval=8, freed_fraction=0.5)


def held_by_step(made: Scheduler, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks held after every step, one decode step at a time."""
    monkeypatch.setattr(module, "leap", lambda *_: 1)
    held: list[int] = []
    step = made.step

    def noted(coming: float | None = None) -> None:
        step(coming)
        held.append(made.backend.usable - made.backend.free_blocks)

    monkeypatch.setattr(made, "step", noted)
    made.run(requests)
    return held


def test_each_interval_gives_back_its_share_once_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 6 fills a block and a half of 4 tokens. Intervals of 8 end at 14 and 22 tokens and hold one whole
    block each (8-11 and 16-19): half of one is none; of 16 tokens (6-21) the three whole blocks give one.
    """
    requests = [ask(0, 6, 18)]
    assert held_by_step(scheduler(20, footprint=KARA), requests, monkeypatch) == [
        *[2] * 3, *[3] * 4, *[4] * 4, *[5] * 4, *[6] * 2, 0,
    ]  # fmt: skip
    long = replace(KARA, interval=16)
    assert held_by_step(scheduler(20, footprint=long), requests, monkeypatch) == [
        *[2] * 3, *[3] * 4, *[4] * 4, *[5] * 4, 6, 5, 0,
    ]  # fmt: skip


def test_decode_steps_read_what_is_left_and_scan_each_interval() -> None:
    """Prompt 8, intervals of 8 at 16 and 24 tokens, a block of 4 let go at each: contexts 9-16, 13-20, 17."""
    times = TableTimes(step=0.0, context=1.0)
    log = scheduler(20, footprint=KARA, times=times).run([ask(0, 8, 18)])
    assert log.end == sum(range(9, 17)) + sum(range(13, 21)) + 17
    assert log.flights[0].let_go == 8 and log.flights[0].windows == 2


def test_a_preempted_request_is_compressed_again_when_it_is_back() -> None:
    """Two requests of 8 + 24 tokens want 16 blocks; 12 hold one and what the first has not given back."""
    made = scheduler(12, footprint=KARA)
    log = made.run([ask(0, 8, 24), ask(0, 8, 24)])
    dense = scheduler(12).run([ask(0, 8, 24), ask(0, 8, 24)])
    assert dense.preemptions == 1 and log.preemptions == 0
    tight = scheduler(10, footprint=KARA).run([ask(0, 8, 24), ask(0, 8, 24)])
    assert tight.preemptions == 1
    assert [flight.windows for flight in tight.flights] == [2, 2] and made.backend.free_blocks == 12


@pytest.mark.parametrize(("timing", "interval"), [("every_n", 0), ("after_prefill", 8)])
def test_an_interval_and_its_timing_belong_together(timing: Timing, interval: int) -> None:
    with pytest.raises(CacheError, match=f"timing '{timing}' with interval {interval}"):
        Footprint("arm", timing=timing, interval=interval)


# -- leaps ----------------------------------------------------------------------------------------------

traces = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12
)


def requests_of(rows: list[tuple[int, int, int, int]]) -> list[Request]:
    """Prompts begin with one of three shared texts of any length."""
    made = []
    for number, (arrival, prompt, output, text) in enumerate(sorted(rows)):
        shared = [text * 100 + i for i in range(min(prompt // 4, 5))]
        own = [1000 * (number + 1) + i for i in range(-(-prompt // 4) - len(shared))]
        made.append(ask(float(arrival), prompt, output, shared + own))
    return made


def outcome(log: Log) -> list[object]:
    return [
        (flight.cached, flight.preemptions, flight.recomputed, flight.first_token, flight.finished)
        for flight in log.flights
    ]


@example([(0, 1, 10, 0), (0, 36, 8, 0), (1, 11, 7, 0), (9, 9, 1, 0)], 22, True, 0.0, False, 0)
@settings(max_examples=60, deadline=None)
@given(traces, st.integers(8, 40), st.booleans(), st.sampled_from([0.0, 0.5]), st.booleans(), st.sampled_from([0, 9]))
def test_a_leap_changes_nothing(
    rows: list[tuple[int, int, int, int]], usable: int, windowed: bool, freed: float, writes: bool, interval: int
) -> None:
    """Step by step comes to the same, and the ledger is sound at every step. Whole seconds are exact in floats."""
    timing: Timing = "every_n" if interval else "after_prefill"
    footprint = Footprint("arm", timing=timing, interval=interval, freed_fraction=freed, writes=writes)
    geometry = hybrid() if windowed else full()
    leaping = scheduler(usable, geometry=geometry, footprint=footprint, batched=16)
    leapt = leaping.run(requests_of(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "leap", lambda *_: 1)
        walking = scheduler(usable, geometry=geometry, footprint=footprint, batched=16)
        assert isinstance(walking.backend, OursBackend)
        step, check = walking.step, walking.backend.check

        def checked(coming: float | None = None) -> None:
            step(coming)
            check()

        patch.setattr(walking, "step", checked)
        walked = walking.run(requests_of(rows))
    assert outcome(leapt) == outcome(walked)
    assert (leapt.steps, leapt.decoded_tokens, leapt.end) == (walked.steps, walked.decoded_tokens, walked.end)
    assert leaping.backend.free_blocks == leaping.backend.usable
