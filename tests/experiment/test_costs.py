"""Modelled costs of a run's cells: the measured traffic on the shipped hardware, calibrated only where measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment.costs import calibrations_of, model_costs
from kvassay.experiment.folder import LATENCY, MANIFEST
from kvassay.experiment.plan import Plan, make_plan
from kvassay.experiment.records import read_notes, read_records, write_records
from kvassay.experiment.results import dump_manifest
from kvassay.experiment.schema import load_experiment
from kvassay.measure.aggregate import Cell, aggregate
from kvassay.measure.cost import CostResult
from kvassay.measure.hardware.files import load_hardware, shipped
from kvassay.measure.latency import LatencyResult, quartiles
from tests.experiment.tiny import write_experiment
from tests.rows import row

MAKER = Callable[..., Plan]
CPU = {"cpu": "AMD EPYC", "cpu_count": 2}
OTHER = {"cpu": "Some CPU", "cpu_count": 2}
DENSE = 2 * 384 * 2 * 16 * 2.0
"""Bytes per token of the tiny model at 384 tokens in bfloat16: layers, tokens, KV heads, K and V, width."""
BANDWIDTH = 4.8e12 * 0.9


@pytest.fixture
def plan(tmp_path: Path, tiny_model: Path) -> Plan:
    file = write_experiment(tmp_path, tiny_model, 1)
    text = file.read_text(encoding="utf-8").replace('["knorm"]', '["knorm", "quest", "kivi"]')
    file.write_text(text, encoding="utf-8")
    return make_plan(load_experiment(file), file.name, tmp_path)


def cells(**read: float) -> tuple[Cell, ...]:
    """Dense, and arms by their traffic as a fraction of dense's; selected tokens follow unless codes are read."""
    labels = {"knorm": "knorm keep=0.5", "quest": "quest read=0.5", "kivi": "kivi"}
    rows = [row("dense", read_bytes=DENSE, selected_tokens=384.0)]
    for name, fraction in read.items():
        selected = 384.0 if name == "kivi" else 192.0
        rows.append(row(labels[name], read_bytes=DENSE * fraction, selected_tokens=selected))
    return aggregate(rows).cells


def latency(arm: str, seconds: float, read: float, flops: float) -> LatencyResult:
    return LatencyResult(
        model="tiny-llama",
        trace_set="kv_short 384 (pairs=4, size=2)",
        arm=arm,
        context_tokens=384,
        rounds=7,
        attention_seconds=seconds,
        attention_low=seconds,
        attention_high=seconds,
        policy_seconds=0.0,
        dense_seconds=2.0,
        read_bytes=read,
        flops=flops,
        gigabytes_per_second=read / seconds / 1e9,
        bandwidth_fraction=0.5,
        matrix_fraction=0.5,
        hardware="AMD EPYC, 2 threads",
    )


def by(rows: list[CostResult], hardware: str) -> dict[str, CostResult]:
    return {one.arm: one for one in rows if one.hardware == hardware}


def test_an_arm_costs_its_measured_traffic(plan: Plan) -> None:
    found = model_costs(plan, [(plan.trace_sets[0], cells(knorm=0.5, quest=0.625, kivi=0.25))], (), OTHER)
    assert [one.hardware for one in found[::4]] == list(shipped()) and len(found) == 16
    h200 = by(found, "h200")
    times = {"dense": 1.0, "knorm keep=0.5": 0.5, "quest read=0.5": 0.625, "kivi": 0.25}
    assert {arm: one.seconds_per_token for arm, one in h200.items()} == pytest.approx(
        {arm: share * DENSE / BANDWIDTH for arm, share in times.items()}
    )
    assert {one.dense_seconds_per_token for one in h200.values()} == {DENSE / BANDWIDTH}
    assert {one.how for one in found} == {"modelled"} and {one.calibration_error for one in found} == {None}
    assert {(one.model, one.trace_set, one.batch, one.context_tokens) for one in found} == {
        ("tiny-llama", plan.trace_sets[0].label, 1, 384)
    }


def test_codes_are_not_widened_on_a_cpu_that_reads_float32(plan: Plan) -> None:
    found = by(model_costs(plan, [(plan.trace_sets[0], cells(knorm=0.5, kivi=0.5))], (), OTHER), "epyc-2core-avx2")
    bandwidth, rate = 21.8e9 * 0.87, 27e9
    flops = 2 * 4 * 384 * 16 * 2.0
    assert found["dense"].seconds_per_token == pytest.approx(max(2 * DENSE / bandwidth, flops / rate))
    assert found["knorm keep=0.5"].fraction == pytest.approx(0.5)
    assert found["kivi"].seconds_per_token == pytest.approx(max(0.5 * DENSE / bandwidth, flops / rate))


def test_times_measured_on_the_machine_itself_calibrate_it_alone(plan: Plan) -> None:
    roof = 21.8e9 * 0.87
    # Twice and eight times the roofline: scale 4, and each of them predicted by the other's.
    timed = [latency("dense", 2.0, roof, 0.0), latency("knorm keep=0.5", 4.0, roof / 2, 0.0)]
    sets = [(plan.trace_sets[0], cells(knorm=0.5, kivi=0.5))]
    plain, found = (model_costs(plan, sets, timed, machine) for machine in (OTHER, CPU))
    assert {one.calibration_error for one in plain} == {None}
    cpu, before = by(found, "epyc-2core-avx2"), by(plain, "epyc-2core-avx2")
    assert cpu["dense"].seconds_per_token == pytest.approx(4 * before["dense"].seconds_per_token)
    assert [cpu[arm].calibration_error for arm in ("dense", "knorm keep=0.5", "kivi")] == [
        pytest.approx(3.0), pytest.approx(0.75), None,
    ]  # fmt: skip
    assert by(found, "h200") == by(plain, "h200")


def test_without_dense_nothing_is_modelled(plan: Plan) -> None:
    only = aggregate([row("knorm keep=0.5")]).cells
    assert model_costs(plan, [(plan.trace_sets[0], only)], (), CPU) == []


def test_calibrations_of_a_run_folder(tmp_path: Path) -> None:
    machines = [load_hardware(name) for name in ("h200", "epyc-2core-avx2")]
    rows = [latency("dense", 2.0, 21.8e9 * 0.87, 0.0), latency("kivi", 2.0, 21.8e9 * 0.87, 0.0)]
    write_records(rows, LatencyResult, tmp_path / LATENCY)
    (tmp_path / MANIFEST).write_text(dump_manifest({"machine": CPU}), encoding="utf-8")
    found = calibrations_of(tmp_path, machines)
    assert list(found) == ["epyc-2core-avx2"]
    assert (found["epyc-2core-avx2"].scale, found["epyc-2core-avx2"].error) == pytest.approx((2.0, 0.0))
    (tmp_path / MANIFEST).write_text(dump_manifest({"machine": OTHER}), encoding="utf-8")
    with pytest.raises(ExperimentError, match="2 measured decode times on Some CPU, 2 CPUs, calibrate none of h200, e"):
        calibrations_of(tmp_path, machines)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    rows: list[Any] = [
        CostResult("m", "t", "a", "h200", 1, 9, 0.5, 1.0),
        CostResult("m", "t", "b", "c", 1, 9, 1, 1, 0.1),
    ]
    write_records(rows, CostResult, file, {"key": "abc"})
    assert read_records(file, CostResult) == tuple(rows)
    assert read_notes(file)["key"] == "abc"
    assert read_records(tmp_path / "none.parquet", CostResult) == () and read_notes(tmp_path / "none.parquet") == {}
    with pytest.raises(ExperimentError, match=r"x\.parquet: cannot be read"):
        read_records(file, LatencyResult)
    file.write_bytes(b"half")
    with pytest.raises(ExperimentError, match=r"x\.parquet: cannot be read"):
        read_records(file, CostResult)
    assert read_notes(file) == {}


def test_quartiles_by_hand() -> None:
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)
    with pytest.raises(ExperimentError, match="no round was timed"):
        quartiles([])
