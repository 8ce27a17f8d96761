"""Attention received, taken in pieces of tokens and parts of queries, against loops and against whole rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData, Stored
from kvassay.kernels import mass
from kvassay.kernels.mass import received
from kvassay.kernels.reference import attention_weights, visible
from tests.kernels.test_reference import DENSE, K_DIM, KV_HEADS, Q_HEADS, RAGGED, SCALE, SINKS, by_loops, random, split
from tests.kernels.test_reference import stored as stored_at

AT = [5, 6, 2, 6]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces of tokens and two parts of queries for what follows."""
    monkeypatch.setattr(mass, "PIECE", 3)
    monkeypatch.setattr(mass, "ROWS", 3 * (Q_HEADS // KV_HEADS))


def check(data: Stored, at: list[int], *, choice: Tensor | None = None, own: bool = True, **more: Any) -> Tensor:
    """Compare with loops, or, where the query's own token may be left out, with whole rows; returns the sums."""
    q = random(Q_HEADS, len(at), K_DIM, seed=3)
    allowed = None if choice is None else lambda part: choice[part]
    found = received(q, data, torch.tensor(at), scale=SCALE, allowed=allowed, own=own, **more)
    wide = None if choice is None else choice.repeat_interleave(Q_HEADS // choice.shape[1], dim=1)
    if own:
        rows = by_loops(q, data, at, allowed=wide, **more)[0]
    else:
        seen = visible(data, torch.tensor(at), Q_HEADS, allowed=wide, own=False)
        rows = attention_weights(q, data, seen, scale=SCALE, **more)
    torch.testing.assert_close(found, rows.sum(1), rtol=0, atol=1e-12)
    return found


@pytest.mark.parametrize("rows", [DENSE, RAGGED], ids=["dense", "ragged, NaN padding"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 0.9])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("biased", ["", "bias", "inner_bias", "bias inner_bias"])
def test_all_together(
    rows: list[list[int]], window: int | None, softcap: float | None, sinks: Tensor | None, biased: str
) -> None:
    data = stored_at(rows)
    data = replace(data, **{name: random(*data.positions.shape, seed=4 + len(name)) for name in biased.split()})
    found = check(data, AT, window=window, softcap=softcap, sinks=sinks)
    sums = found.sum(-1)
    assert bool((sums < len(AT)).all()) if sinks is not None else torch.allclose(sums, torch.full_like(sums, len(AT)))


def test_runs_need_not_end_where_pieces_do() -> None:
    check(split(stored_at(DENSE), 4, 1, 2), AT)


def test_tokens_need_no_order() -> None:
    check(stored_at([[6, 0, 3, 5, 1], [2, 6, 1, 4, 0]]), [5, 6], window=4)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("heads", [KV_HEADS, Q_HEADS])
def test_selections_per_query_and_head(own: bool, heads: int) -> None:
    choice = torch.rand(len(AT), heads, 6, generator=torch.Generator().manual_seed(5)) < 0.4
    check(stored_at(RAGGED), AT, choice=choice, own=own)


def test_who_sees_nothing_gives_nothing() -> None:
    """A query before all that is left, alone and beside one that sees it."""
    data = stored_at([[4, 5, 6, 7]] * KV_HEADS)
    assert float(check(data, [2]).abs().max()) == 0
    torch.testing.assert_close(check(data, [2, 7]).sum(), torch.tensor(float(Q_HEADS), dtype=torch.float64))


def test_logits_far_apart_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces whose largest logits differ by hundreds, as sinks of real heads do, against whole rows in float64."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 5000, 8, generator=generator) * torch.tensor([1.0, 40.0]).repeat_interleave(2500)[:, None]
    q, at = torch.randn(4, 70, 8, generator=generator) * 3, torch.arange(4930, 5000)
    data = LayerData.dense(k, k).stored
    wide = LayerData.dense(k.double(), k.double()).stored
    rows = attention_weights(q.double(), wide, visible(wide, at, 4), scale=1.0)
    torch.testing.assert_close(received(q, data, at, scale=1.0).double(), rows.sum(1), rtol=1e-3, atol=1e-4)
