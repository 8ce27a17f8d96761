"""Synthetic rows: the same however they are asked for, shaped as measured, with targets that can be found."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvassay.cache.rope import rotate, unrotate
from kvassay.errors import RecordError
from kvassay.layout.model import KV, Component, Layer, Rope
from kvassay.record.synthetic import validity
from kvassay.record.synthetic.fitting import fit_head
from kvassay.record.synthetic.measure import SKIPPED, measure
from kvassay.record.synthetic.rows import BLOCK, SyntheticLayer
from kvassay.record.synthetic.statistics import LayerStatistics, Side, Statistics, load, save, shipped
from tests.replay import synthetic

ROPE = Rope(theta=10_000.0, dims=4)
TYPES, RANK, DIM = 3, 2, 4


def side(heads: int, scatter: float, seed: int) -> Side:
    g = torch.Generator().manual_seed(seed)
    return Side(
        torch.randn(heads, TYPES, DIM, generator=g),
        scatter * torch.randn(heads, DIM, RANK, generator=g),
        scatter * torch.rand(heads, DIM, generator=g),
        torch.tensor([[0.3, 0.2]]).expand(heads, -1),
    )


def known(scatter: float = 1.0, kv_heads: int = 2, group: int = 2, aimed: float = 0.0) -> LayerStatistics:
    g = torch.Generator().manual_seed(9)
    return LayerStatistics(
        frequency=torch.tensor([0.5, 0.3, 0.2]),
        keys=side(kv_heads, scatter, 1),
        values=side(kv_heads, scatter, 2),
        queries=side(kv_heads * group, scatter, 3),
        first_key=torch.randn(kv_heads, DIM, generator=g),
        first_value=torch.randn(kv_heads, DIM, generator=g),
        question=torch.randn(kv_heads * group, DIM, generator=g),
        aimed=torch.full((kv_heads * group,), aimed),
    )


def layer(kv_heads: int = 2, group: int = 2, k_dim: int = DIM, v_dim: int = DIM, rope: Rope | None = ROPE) -> Layer:
    return Layer(0, kv_heads * group, (Component(KV(kv_heads, k_dim, v_dim)),), 1 / math.sqrt(k_dim), rope=rope)


def rows(context: int = 9000, seed: int = 0, of: Layer | None = None, **about: float) -> SyntheticLayer:
    return SyntheticLayer(of or layer(), known(**about), 0.5, context=context, question=4, seed=seed)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=4), st.integers(0, 5000), st.sampled_from(["keys", "values"])
)
def test_rows_are_the_same_in_whatever_pieces_they_are_drawn(pieces: list[int], first: int, kind: str) -> None:
    source, whole = rows(), getattr(rows(), kind)(1, first, sum(pieces))
    at, parts = first, []
    for count in pieces:
        parts.append(getattr(source, kind)(1, at, count))
        at += count
    assert torch.equal(torch.cat(parts), whole)


def test_queries_are_the_same_in_pieces_and_another_seed_gives_other_rows() -> None:
    source = rows(aimed=0.2)
    assert torch.equal(
        torch.cat([source.queries(3, 4000, 90), source.queries(3, 4090, 30)]), source.queries(3, 4000, 120)
    )
    assert not torch.equal(rows(seed=1).keys(0, 0, 8), rows().keys(0, 0, 8))
    assert not torch.equal(rows().keys(0, 1, 8), rows().keys(1, 1, 8))


def test_without_scatter_a_key_is_its_types_centre_turned_to_its_true_position() -> None:
    found = unrotate(rows(scatter=0.0).keys(1, BLOCK - 50, 100), torch.arange(BLOCK - 50, BLOCK + 50), ROPE)
    centres = known().keys.centres[1]
    nearest = torch.cdist(found, centres).min(1)
    assert float(nearest.values.max()) < 1e-3
    assert set(nearest.indices.tolist()) == {0, 1, 2}


def test_all_heads_have_tokens_of_the_same_types() -> None:
    source = rows(scatter=0.0, of=layer(rope=None))
    types = [torch.cdist(source.values(head, 1, 300), known().values.centres[head]).argmin(1) for head in (0, 1)]
    assert torch.equal(*types)


def test_position_0_is_the_recorded_first_row() -> None:
    assert torch.allclose(rows().keys(1, 0, 1)[0], known().first_key[1])
    assert torch.allclose(rows().values(1, 0, 1)[0], known().first_value[1])


def test_scatter_has_the_variance_that_was_measured_and_lasts_over_its_spans() -> None:
    one = replace(known(), frequency=torch.tensor([1.0, 0.0, 0.0]))
    source = SyntheticLayer(layer(rope=None), one, 0.5, context=1 << 17, question=1, seed=0)
    found = source.values(0, 1, (1 << 17) - 1) - one.values.centres[0, 0]
    expected = (one.values.basis[0].square().sum() + one.values.rest[0].square().sum()).item()
    assert found.square().sum(1).mean().item() == pytest.approx(expected, rel=0.05)
    shifted = (found[1:] * found[:-1]).sum(1).mean().item() / expected
    # Neighbours share the span of 4 in three pairs of four, and that of 64 in 63 of 64.
    assert shifted == pytest.approx(0.3 * 3 / 4 + 0.2 * 63 / 64, abs=0.03)
    assert (found[200:] * found[:-200]).sum(1).mean().item() / expected == pytest.approx(0, abs=0.03)


def test_a_head_twice_as_wide_is_two_recorded_heads_whose_logits_keep_their_scale() -> None:
    statistics = known(scatter=0.0)
    wide = layer(kv_heads=1, group=1, k_dim=2 * DIM, rope=None)
    fitted = fit_head(wide, 0, statistics, scale=0.7)
    key, query = fitted.key.centres[1], fitted.queries[0].centres[2]
    parts = [float(statistics.queries.centres[2 * i, 2] @ statistics.keys.centres[i, 1]) * 0.7 for i in (0, 1)]
    assert float(key @ query) * wide.scale == pytest.approx(sum(parts) / math.sqrt(2), rel=1e-5)


def test_pairs_are_dealt_out_by_rotary_frequency_and_still_channels_take_the_slowest() -> None:
    # Recorded: pairs (0, 2) fast and (1, 3) slow in each of two heads, channels 4 to 7 being the second head's.
    wide = layer(kv_heads=1, group=1, k_dim=8, rope=Rope(theta=100.0, dims=4))
    marked = replace(known(), keys=replace(known().keys, centres=torch.arange(8.0).view(2, 1, 4).expand(2, TYPES, 4)))
    found = fit_head(wide, 0, marked, scale=1.0).key.centres[0].tolist()
    # Turning pairs (0, 2) and (1, 3) take the two fast ones; the still channels 4, 5 and 6, 7 the slow ones.
    assert found == [0, 4, 2, 6, 1, 3, 5, 7]
    assert fit_head(layer(1, 1, 8, rope=Rope(100.0, 8, interleaved=True)), 0, marked, 1.0).key.centres[0].tolist() == [
        *(0, 2, 4, 6, 1, 3, 5, 7)
    ]


@pytest.mark.parametrize(("k_dim", "rope"), [(64, Rope(100_000.0, 64)), (128, Rope(1e7, 128)), (192, Rope(1e6, 64))])
def test_the_keenest_heads_question_looks_at_what_was_planted(k_dim: int, rope: Rope) -> None:
    shape = layer(kv_heads=2, group=2, k_dim=k_dim, rope=rope)
    source = SyntheticLayer(shape, shipped().at(0.6), shipped().scale, context=20_000, question=4, seed=3)
    head = source.keenest
    logits = source.queries(head, 20_002, 2) @ source.keys(head // 2, SKIPPED, 20_000 - SKIPPED).T * shape.scale
    assert (logits.argmax(1) + SKIPPED).tolist() == list(source.targets)
    assert source.aimed(head, 20_002, 2) == {20_002 + j: target for j, target in enumerate(source.targets)}
    assert source.aimed((head + 1) % 4, 20_002, 2) == {}
    assert all(SKIPPED <= target < 20_000 for target in source.targets)


def test_other_heads_look_for_targets_as_often_as_recorded_ones_did() -> None:
    source = rows(aimed=0.25, context=50_000)
    found = source.aimed(3, 20_000, 8000)
    assert len(found) == pytest.approx(2000, abs=150)
    assert all(SKIPPED <= target <= position - 128 for position, target in found.items())
    assert rows(aimed=0.0).aimed(3, 4000, 1000) == {}


def test_a_question_is_asked_from_its_own_centre() -> None:
    source = rows(scatter=0.0, context=50)
    other, at = (source.keenest + 1) % 4, torch.arange(50, 54)
    found = unrotate(source.queries(other, 50, 4), at, ROPE) * source.layer.scale / source.scale
    assert torch.allclose(found, known().question[other].expand(4, -1), atol=1e-5)


def test_measuring_gives_back_mean_and_variance(tmp_path: Path) -> None:
    trace = synthetic.make(tmp_path / "t", tokens=400, q_tail=400, dim=8, branches=(5,))
    found = measure(trace, [1], types=1, rank=3)
    (one,) = found.layers.values()
    keys = trace.prefix.k(1).transpose(0, 1)[:, SKIPPED:]
    assert torch.allclose(one.keys.centres[:, 0], keys.mean(1), atol=1e-5)
    variance = one.keys.basis.square().sum((1, 2)) + one.keys.rest.square().sum(1)
    assert torch.allclose(variance, keys.var(1, unbiased=False).sum(1), rtol=1e-4)
    assert torch.allclose(one.question, trace.branches[0].q(1).mean(0), atol=1e-5)
    assert torch.equal(one.first_key, trace.prefix.k(1)[0])
    assert one.frequency.tolist() == [1.0]
    assert float(one.keys.lasting.max()) < 0.2
    assert found.about["layers"] == "1"


def test_statistics_are_read_back_as_written_to_half_precision(tmp_path: Path) -> None:
    file = tmp_path / "s.safetensors"
    save(Statistics({0.0: known(), 0.5: known(2.0)}, 0.25, {"model": "m"}), file)
    found = load(file)
    assert (found.scale, dict(found.about), list(found.layers)) == (0.25, {"model": "m"}, [0.0, 0.5])
    assert torch.equal(found.at(0.4).keys.basis, known(2.0).keys.basis.half().float())
    assert torch.equal(found.at(0.1).question, known().question.half().float())
    file.write_bytes(b"not one")
    with pytest.raises(RecordError, match=r"s\.safetensors: cannot be read as statistics"):
        load(file)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    tail = synthetic.make(tmp_path / "tail", tokens=400, q_tail=40)
    with pytest.raises(RecordError, match="stores queries from position 360 on; statistics take all"):
        measure(tail)
    short = synthetic.make(tmp_path / "short", tokens=40, q_tail=40)
    with pytest.raises(RecordError, match="40 tokens are too few for 32 types"):
        measure(short)


def test_the_shipped_statistics_are_small_and_say_where_they_are_from() -> None:
    found = shipped()
    assert found.about["model"] == "smollm2-135m"
    assert found.about["licence"] == "Apache-2.0"
    assert len(found.sha256) == 64
    one = found.at(0.5)
    assert (one.kv_heads, one.group, one.keys.dim) == (3, 3, 64)
    assert float(one.frequency.sum()) == pytest.approx(1, abs=0.01)
    weights = _attention_sink(found)
    assert weights > 0.2  # the recorded heads in the middle of the model lean on their first token


def _attention_sink(found: Statistics) -> float:
    shape = Layer(15, 9, (Component(KV(3, 64, 64)),), 0.125, rope=Rope(100_000.0, 64))
    source = SyntheticLayer(shape, found.at(0.6), found.scale, context=2000, question=4, seed=0)
    masses: list[Tensor] = []
    for head in range(9):
        logits = source.queries(head, 1990, 8) @ source.keys(head // 3, 0, 1990).T * 0.125
        masses.append(torch.softmax(logits, 1)[:, 0].mean())
    return float(torch.stack(masses).mean())


COMPARED = validity.Comparison("a" * 64, "m", 4, 2, 8, 8, 8000, 12, {"0.1": 0.8, "0.25": 0.9, "0.5": 1.0})


def test_rows_judge_only_in_a_shape_that_was_compared_and_agreed() -> None:
    shape = layer(k_dim=8, v_dim=8)
    statistics = Statistics({0.0: known()}, 0.5, {}, "a" * 64)
    assert validity.judges(statistics, shape, [COMPARED])
    assert not validity.judges(statistics, shape, [])
    assert not validity.judges(statistics, layer(k_dim=8), [COMPARED])
    assert not validity.judges(replace(statistics, sha256="b" * 64), shape, [COMPARED])
    worse = replace(COMPARED, tau={**COMPARED.tau, "0.1": 0.79})
    assert not validity.judges(statistics, shape, [COMPARED, worse])
    assert not replace(COMPARED, policies=11).agrees
    assert not replace(COMPARED, tau={"0.1": 1.0, "0.5": 1.0}).agrees


def test_tau_is_of_the_ordering_alone(tmp_path: Path) -> None:
    assert validity.tau([1, 2, 3, 4], [10, 20, 30, 400]) == 1
    assert validity.tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert validity.tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    validity.write([COMPARED], tmp_path / "v.json")
    assert '"0.25": 0.9' in (tmp_path / "v.json").read_text()


def test_rotation_is_that_of_the_engine() -> None:
    raw = unrotate(rows().keys(0, 5000, 3), torch.arange(5000, 5003), ROPE)
    assert torch.allclose(rotate(raw, torch.arange(5000, 5003), ROPE), rows().keys(0, 5000, 3), atol=1e-5)
