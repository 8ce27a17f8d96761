"""Modelled step times against sums over components."""

from __future__ import annotations

import numpy as np
import pytest

from kvassay.layout.config import from_config
from kvassay.measure.cost import Weights, attention_seconds, decode_work
from kvassay.measure.hardware.files import load_hardware
from kvassay.replay.serving.cost import Chunk, RooflineTimes, TableTimes
from kvassay.replay.serving.footprint import DENSE, Footprint

GEMMA, H200 = from_config("gemma-3-270m"), load_hardware("h200")
NONE = np.array([], dtype=np.int64)


def test_decoding_is_the_sum_over_requests_and_the_weights_once() -> None:
    times = RooflineTimes(GEMMA, H200, Weights(1e9), DENSE, step_overhead=0.25)
    contexts = [1, 511, 512, 513, 40_000]
    attention = sum(attention_seconds(decode_work(GEMMA, context), H200, "bfloat16") for context in contexts)
    weights = 2e9 / H200.bandwidth
    assert times.seconds(np.array(contexts), ()) == pytest.approx(0.25 + weights + attention, rel=1e-9)


def test_an_arm_scales_only_what_no_window_bounds() -> None:
    arm = Footprint("arm", read_fraction=0.25, selected_fraction=0.25)
    times = RooflineTimes(GEMMA, H200, Weights(1.0), arm)
    dense = RooflineTimes(GEMMA, H200, Weights(1.0), DENSE)
    work = decode_work(GEMMA, 9_000)
    sliding = attention_seconds([one for one in work if one.kind == "sliding"], H200, "bfloat16")
    whole = [run.seconds(np.array([9_000]), ()) - 2 / H200.bandwidth for run in (times, dense)]
    assert whole[0] - sliding == pytest.approx((whole[1] - sliding) / 4, rel=1e-6)


@pytest.mark.parametrize(("tokens", "before", "computes"), [(3, 2, False), (513, 200, True)])
def test_prefill_multiplies_every_pair_it_sees(tokens: int, before: int, computes: bool) -> None:
    """Without windows: `before + 1`, ... `before + tokens` pairs; a short chunk waits for memory, a long one not."""
    layout = from_config("smollm2-135m")
    times = RooflineTimes(layout, H200, Weights(1.0), DENSE)
    each = [sum(one.flops for one in decode_work(layout, before + 1 + i)) for i in range(tokens)]
    count = sum(one.bytes for one in decode_work(layout, before + tokens))
    matrix, memory = sum(each) / H200.rate("bfloat16"), count / H200.bandwidth
    assert (matrix > memory) == computes
    linear = max(2 / H200.bandwidth, 2 * tokens / H200.rate("bfloat16"))
    assert times.seconds(NONE, [Chunk(tokens, before)]) == pytest.approx(linear + max(matrix, memory), rel=1e-9)


def test_a_scan_reads_its_share_of_the_scope_once() -> None:
    times = RooflineTimes(GEMMA, H200, Weights(1.0), Footprint("arm", scan_fraction=0.5))
    scope = sum(one.bytes for one in decode_work(GEMMA, 1000) if one.kind == "full")
    assert times.scan_seconds(1000) == pytest.approx(0.5 * scope / H200.bandwidth, rel=1e-9)
    assert TableTimes(1.0).scan_seconds(1000) == 0.0
