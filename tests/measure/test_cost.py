"""The cost model by hand: bytes, operations and seconds of toy layouts and of published models."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import HardwareError
from kvassay.layout.bytes import bytes_at
from kvassay.layout.config import from_config
from kvassay.layout.model import KV, Component, IndexKeys, Latent, Layer, Layout, Pooled, TopK, Window
from kvassay.measure.cost import (
    Calibration,
    CostResult,
    Point,
    Traffic,
    Weights,
    Work,
    arm_work,
    attention_seconds,
    calibrate,
    decode_work,
    step_cost,
)
from kvassay.measure.hardware.files import Hardware
from tests.layout.configs import PUBLISHED


def hardware(bandwidth: float = 1600, rate: float = 4000, **changes: object) -> Hardware:
    """800 bytes and 1000 bfloat16 operations per second achievable."""
    values = {
        "name": "toy",
        "title": "Toy",
        "kind": "gpu",
        "memory_bandwidth": bandwidth,
        "capacity": 7000,
        "matrix_rate": {"bfloat16": rate, "float32": rate / 2},
        "achievable": {"bandwidth": 0.5, "matrix": 0.25, "source": "assumed"},
        "sources": ("a test",),
    }
    return Hardware.model_validate({**values, **changes})


def layout(*components: Component, q_heads: int = 4) -> Layout:
    layers = tuple(Layer(i, q_heads, (component,), 1.0) for i, component in enumerate(components))
    return Layout("toy", layers, hidden_size=8, vocab_size=9, native_context=1000)


FULL = Component(KV(2, 4, 4))
SLIDING = Component(KV(2, 4, 4), Window(8))


def test_full_and_sliding_by_hand() -> None:
    assert decode_work(layout(FULL, SLIDING), 100) == [
        Work(0, "full", 100 * 2 * 8 * 2, 2 * 4 * 100 * 8),
        Work(1, "sliding", 8 * 2 * 8 * 2, 2 * 4 * 8 * 8),
    ]
    cost = step_cost(layout(FULL, SLIDING), 100, hardware())
    # 3200 bytes / 800 = 4 s against 6400 operations / 1000 = 6.4 s: arithmetic decides, in both layers.
    assert cost.parts == pytest.approx({"full": 6.4, "sliding": 0.512})
    assert cost.seconds == pytest.approx(6.912) and cost.memory_bound == 0
    assert (cost.held_bytes, cost.fits) == (3200 + 256, True)


def test_each_component_waits_for_what_it_lacks() -> None:
    wide = Component(KV(4, 4, 4))  # 4 query heads on 4 KV heads: 1 operation per byte, memory decides
    cost = step_cost(layout(FULL, wide), 100, hardware())
    assert cost.parts == {"full": pytest.approx(6.4 + 6400 / 800)}
    assert cost.memory_bound == pytest.approx(8 / 14.4)


def test_a_batch_shares_the_weights_alone() -> None:
    weights = Weights(1000)
    one, four = (step_cost(layout(FULL), 100, hardware(), batch=batch, weights=weights) for batch in (1, 4))
    assert one.parts == pytest.approx({"full": 6.4, "weights": 2000 / 800})
    # 2 operations per weight and request: 8000 / 1000 = 8 s now exceed the 2.5 s of reading them once.
    assert four.parts == pytest.approx({"full": 25.6, "weights": 8.0})
    assert (one.held_bytes, four.held_bytes) == (3200 + 2000, 12800 + 2000)
    assert one.fits and not four.fits


def test_hardware_may_hold_the_cache_in_another_dtype() -> None:
    cost = step_cost(layout(FULL), 100, hardware(cache_dtype="float32"))
    assert cost.parts == pytest.approx({"full": max(6400 / 800, 6400 / 500)})
    assert cost.held_bytes == 6400


def test_a_rate_that_the_file_lacks_is_named() -> None:
    with pytest.raises(HardwareError, match=r"toy: \[matrix_rate\] has no 'fp8_e4m3' \(known: bfloat16, float32\)"):
        hardware().rate("fp8_e4m3")
    with pytest.raises(HardwareError, match="context 0 and batch 1 must be at least 1"):
        step_cost(layout(FULL), 0, hardware())


def test_latents_are_read_once_for_all_heads() -> None:
    mla = Component(Latent(512, 64))
    (work,) = decode_work(layout(mla, q_heads=128), 10)
    assert work == Work(0, "latent", 10 * 576 * 2, 2 * 128 * 10 * (576 + 512))


def test_a_selection_reads_its_units_and_scans_its_index() -> None:
    blocks = Component(KV(1, 4, 4), TopK(2, unit=16), IndexKeys(3))
    entries = Component(Pooled(4, 6), TopK(5, unit=4), IndexKeys(2))
    assert decode_work(layout(blocks, entries), 100) == [
        Work(0, "full", 32 * 8 * 2, 2 * 4 * 32 * 8),
        Work(0, "index", 100 * 3 * 2, 0),
        Work(1, "pooled", 5 * 6 * 2, 2 * 4 * 5 * 12),
        Work(1, "index", 25 * 2 * 2, 0),
    ]
    short = decode_work(layout(blocks, entries), 8)
    assert [work.bytes for work in short] == [8 * 8 * 2, 8 * 3 * 2, 2 * 6 * 2, 2 * 2 * 2]


def test_a_layer_that_reads_anothers_cache_reads_it_again() -> None:
    reader = Layer(1, 2, (), 1.0, cache_of=0)
    shared = Layout("toy", (Layer(0, 4, (FULL,), 1.0), reader), hidden_size=8, vocab_size=9, native_context=1000)
    assert decode_work(shared, 10) == [Work(0, "full", 320, 640), Work(0, "full", 320, 320)]


def test_deepseek_v32_at_128k_is_bounded_by_its_index() -> None:
    context = 131_072
    cost = step_cost(from_config(PUBLISHED["deepseek-v3.2"]), context, hardware(1e12, 1e18))
    layers = 61
    assert cost.parts == pytest.approx(
        {"latent": layers * 2048 * 576 * 2 / 0.5e12, "index": layers * context * 128 * 2 / 0.5e12}
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_published_layout_reads_at_least_something_and_at_most_what_its_readers_hold(name: str) -> None:
    found = from_config(PUBLISHED[name])
    for context in (1, 4096, 131_072):
        work = decode_work(found, context)
        readers = max(sum(found.source(layer.index).index == i for layer in found.layers) for i in range(len(work)))
        assert 0 < sum(one.bytes for one in work) <= bytes_at(found, context).total * max(readers, 1)
        assert all(math.isfinite(one.flops) for one in work)


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_time_grows_with_context_and_batch(context: int, batch: int) -> None:
    toy, machine = layout(FULL, SLIDING), hardware()
    one = step_cost(toy, context, machine, batch=batch).seconds
    assert one == pytest.approx(batch * attention_seconds(decode_work(toy, context), machine, "bfloat16"))
    assert one <= step_cost(toy, context + 1, machine, batch=batch).seconds


def traffic(read: float, selected: float, **more: bool) -> Traffic:
    return Traffic(read, 3456, selected, 100, **more)


def test_an_arms_traffic_is_laid_on_the_layers_it_may_act_on() -> None:
    dense = decode_work(layout(FULL, SLIDING), 100)
    quarter = arm_work(dense, frozenset({0}), traffic(800 + 256, 25))
    assert quarter == [Work(0, "full", 800, 1600), dense[1]]
    assert arm_work(dense, frozenset({0}), traffic(3456, 100)) == dense
    # A scan: fewer tokens in the products, more bytes than dense.
    scan = arm_work(dense, frozenset({0}), traffic(3456 + 160, 50))
    assert scan == [Work(0, "full", 3360, 3200), dense[1]]


def test_codes_weigh_the_same_whatever_the_rest_is_held_in() -> None:
    wide = decode_work(layout(FULL), 100, "float32")
    quantised = Traffic(800, 3200, 100, 100, encoded=True)
    assert arm_work(wide, frozenset({0}), quantised, widened=2.0) == [Work(0, "full", 800, 6400 * 100 / 100)]
    evicted = Traffic(800, 3200, 25, 100)
    assert arm_work(wide, frozenset({0}), evicted, widened=2.0) == [Work(0, "full", 1600, 1600)]


def test_calibration_is_one_factor_and_judged_on_shapes_it_has_not_seen() -> None:
    found = calibrate([Point("a", 1.0, 2.0), Point("b", 1.0, 8.0)])
    assert found is not None
    assert found.scale == pytest.approx(4)
    assert found.errors == pytest.approx({"a": 3.0, "b": 0.75})  # 8 for 2, and 2 for 8
    assert found.error == pytest.approx((3.0 + 0.75) / 2)
    exact = calibrate([Point(str(n), float(n), 3.0 * n) for n in range(1, 5)])
    assert exact == Calibration(pytest.approx(3.0), pytest.approx(dict.fromkeys("1234", 0.0), abs=1e-12))


@pytest.mark.parametrize("points", [[], [Point("a", 1.0, 2.0)]])
def test_one_shape_alone_calibrates_nothing(points: list[Point]) -> None:
    assert calibrate(points) is None


def test_a_result_is_a_fraction_of_dense_and_says_how() -> None:
    result = CostResult("m", "t", "a", "h200", 1, 2048, 0.5, 2.0)
    assert (result.fraction, result.how, result.calibration_error) == (0.25, "modelled", None)
