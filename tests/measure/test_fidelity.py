from __future__ import annotations

import math

import pytest
import torch

from kvassay.cache.data import LayerData
from kvassay.measure.fidelity import ArmFidelity, Deviation, retained_share, screen
from kvassay.measure.result import LayerFidelity


def test_deviation_is_the_relative_norm_over_all_chunks() -> None:
    sums = Deviation()
    sums.add(torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[3.0, 4.0]]]), torch.tensor([[0.5]]))
    sums.add(torch.tensor([[[0.0, 4.0]]]), torch.tensor([[[0.0, 0.0]]]), torch.tensor([[0.75]]))
    assert sums.output_error == pytest.approx(5 / 5)
    assert sums.retained_mass == 0.625
    assert Deviation().output_error == 0.0
    nothing = Deviation()
    nothing.add(torch.ones(1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1))
    assert nothing.output_error == math.inf


def test_each_head_has_an_error_of_its_own() -> None:
    sums = Deviation()
    sums.add(torch.tensor([[[3.0]], [[1.0]]]), torch.tensor([[[4.0]], [[1.0]]]), torch.ones(2, 1))
    sums.add(torch.tensor([[[3.0]], [[2.0]]]), torch.tensor([[[3.0]], [[2.0]]]), torch.ones(2, 1))
    assert sums.head_errors == pytest.approx((1 / 5, 0.0))
    assert sums.output_error == pytest.approx((1 / 30) ** 0.5)


def test_share_is_looked_up_by_position_per_head() -> None:
    # Two KV heads, one query head each, positions 5 to 8; a sink takes the rest of the second head's mass.
    rows = torch.zeros(2, 4, 1)
    dense = LayerData.dense(rows, rows, first=5).stored
    weights = torch.tensor([[[0.1, 0.2, 0.3, 0.4]], [[0.1, 0.1, 0.2, 0.1]]])
    kept = LayerData.ragged(rows[:, :3], rows[:, :3], torch.tensor([[5, 7, 8], [6, 8, -1]])).stored
    seen = torch.tensor([[[True, True, False]], [[True, True, False]]])
    share = retained_share(weights, dense, kept, seen)
    assert share.flatten().tolist() == pytest.approx([0.4, 0.2 / 0.5])


def test_bytes_add_up_over_chunks() -> None:
    sums = Deviation()
    sums.charge(10.0, 2.0, 40.0, 1)
    sums.charge(30.0, 0.0, 60.0, 3)
    assert (sums.read, sums.scanned, sums.dense, sums.queries) == (40.0, 2.0, 100.0, 4)


def test_read_fraction_is_of_the_sums_in_scope() -> None:
    rows = [
        LayerFidelity("t", "w", 0, "a", layer, 0.0, 1.0, layer > 0, read_bytes=read, dense_bytes=dense)
        for layer, read, dense in ((0, 7.0, 7.0), (1, 1.0, 10.0), (2, 29.0, 90.0))
    ]
    assert screen(rows)[0].read_fraction == 0.3


def row(arm: str, branch: int, layer: int, error: float, mass: float, in_scope: bool = True) -> LayerFidelity:
    return LayerFidelity("t", "w", branch, arm, layer, error, mass, in_scope)


def test_screen_takes_means_and_the_worst_layer_in_scope() -> None:
    rows = [
        row("a", 0, 3, 0.2, 0.5),
        row("a", 1, 3, 0.4, 0.7),
        row("a", 0, 5, 0.6, 0.9),
        row("a", 1, 5, 0.0, 0.7),
        row("a", 0, 1, 9.0, 0.0, in_scope=False),
        row("b", 0, 3, 0.1, 1.0),
    ]
    a, b = screen(rows)
    assert (a.arm, a.layers, a.worst_layer, a.least_layer) == ("a", 2, 3, 3)
    assert (a.output_error, a.worst_error, a.retained_mass, a.least_mass) == pytest.approx((0.3, 0.3, 0.7, 0.6))
    assert b == ArmFidelity("b", 1, 0.1, 0.1, 3, 1.0, 1.0, 3)
