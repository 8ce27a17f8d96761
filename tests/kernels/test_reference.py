"""The reference attention in float64 against loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData, Run, Stored
from kvassay.kernels.reference import attend, attention_weights, visible
from tests.kernels.loops import logit, mean, weights

KV_HEADS, GROUP, QUERIES, K_DIM, V_DIM, SCALE = 2, 3, 2, 5, 4, 0.7
Q_HEADS = KV_HEADS * GROUP


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stored(rows: list[list[int]], **more: Tensor) -> Stored:
    """Tokens at given positions per head, in that order; padding is NaN, as memory nobody wrote."""
    width = max(map(len, rows))
    k, v = random(len(rows), width, K_DIM, seed=1), random(len(rows), width, V_DIM, seed=2)
    positions = torch.full((len(rows), width), -1)
    for head, row in enumerate(rows):
        positions[head, : len(row)] = torch.tensor(row)
        k[head, len(row) :] = v[head, len(row) :] = torch.nan
    return Stored((Run.of(k, v),), positions, positions, complete=bool((positions >= 0).all()), **more)


def split(data: Stored, *widths: int) -> Stored:
    """The same in several runs."""
    k, v = (side.split(list(widths), dim=1) for side in (data.runs[0].k, data.runs[0].v))
    return replace(data, runs=tuple(Run.of(a, b) for a, b in zip(k, v, strict=True)))


def by_loops(
    q: Tensor,
    data: Stored,
    positions: list[int],
    *,
    window: int | None = None,
    allowed: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention weights [q_heads, queries, tokens] and output, token by token."""
    k, v = (torch.cat([getattr(run, side) for run in data.runs], 1) for side in ("k", "v"))
    rows = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.float64)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for head, query in itertools.product(range(q.shape[0]), range(q.shape[1])):
        kv = head // (q.shape[0] // k.shape[0])
        seen = []
        for at, position in enumerate(data.positions[kv].tolist()):
            distance = positions[query] - position
            past = position >= 0 and distance >= 0 and (window is None or distance < window)
            chosen = allowed is None or bool(allowed[query, head, at]) or distance == 0
            seen += [at] if past and chosen else []
        if not seen:
            continue
        biases = {
            name: [0.0 if x is None else float(x[kv, at]) for at in seen]
            for name, x in (("bias", data.bias), ("inner_bias", data.inner_bias))
        }
        logits = [
            logit(
                q[head, query],
                k[kv, at],
                scale=SCALE,
                softcap=softcap,
                bias=biases["bias"][row],
                inner_bias=biases["inner_bias"][row],
            )
            for row, at in enumerate(seen)
        ]
        by = weights(logits, None if sinks is None else float(sinks[head]))
        rows[head, query, seen] = torch.tensor(by, dtype=torch.float64)
        out[head, query] = torch.tensor(mean([v[kv, at].tolist() for at in seen], by), dtype=torch.float64)
    return rows, out


def check(
    data: Stored,
    positions: list[int],
    *,
    window: int | None = None,
    allowed: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compare both functions with the loops; returns the weights."""
    q = random(Q_HEADS, len(positions), K_DIM, seed=3)
    seen = visible(data, torch.tensor(positions), Q_HEADS, window=window, allowed=allowed)
    rows, out = by_loops(q, data, positions, window=window, allowed=allowed, softcap=softcap, sinks=sinks)
    found = attention_weights(q, data, seen, scale=SCALE, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found, rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        attend(q, data, seen, scale=SCALE, softcap=softcap, sinks=sinks), out, rtol=0, atol=1e-12
    )
    return found


DENSE = [list(range(7))] * 2
RAGGED = [[0, 2, 3, 6], [1, 2, 3, 4, 5, 6]]
SINKS = torch.tensor([-1.0, 0.0, 1.0, 2.0, -3.0, 0.5], dtype=torch.float64)


class TestAgainstLoops:
    @pytest.mark.parametrize("rows", [DENSE, RAGGED], ids=["dense", "ragged, NaN padding"])
    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("softcap", [None, 0.9])
    @pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
    @pytest.mark.parametrize("biased", ["", "bias", "inner_bias", "bias inner_bias"])
    def test_all_together(
        self, rows: list[list[int]], window: int | None, softcap: float | None, sinks: Tensor | None, biased: str
    ) -> None:
        data = stored(rows)
        data = replace(data, **{name: random(*data.positions.shape, seed=4 + len(name)) for name in biased.split()})
        found = check(data, [5, 6], window=window, softcap=softcap, sinks=sinks)
        sums = found.sum(-1)
        assert bool((sums < 1).all()) if sinks is not None else torch.allclose(sums, torch.ones_like(sums))

    def test_tokens_need_no_order(self) -> None:
        check(stored([[6, 0, 3, 5], [2, 6, 1, 4]]), [5, 6], window=4)

    def test_selections_per_query_head_and_query(self) -> None:
        data = stored(RAGGED)
        allowed = torch.rand(2, Q_HEADS, 6, generator=torch.Generator().manual_seed(5)) < 0.4
        found = check(data, [5, 6], allowed=allowed)
        assert bool((found[0] != found[1]).any())

    def test_the_own_token_is_read_whatever_is_selected(self) -> None:
        data = stored(DENSE)
        found = check(data, [5, 6], allowed=torch.zeros(2, Q_HEADS, 7, dtype=torch.bool))
        assert torch.equal(found[:, 0], torch.eye(7, dtype=torch.float64)[5].expand(Q_HEADS, -1))

    def test_a_selection_does_not_reach_into_the_future(self) -> None:
        found = check(stored(DENSE), [3, 4], allowed=torch.ones(2, Q_HEADS, 7, dtype=torch.bool))
        assert not found[:, 0, 4:].any()

    @pytest.mark.parametrize("widths", [(4, 3), (1, 5, 1), (0, 7)])
    def test_several_runs_are_one_cache(self, widths: tuple[int, ...]) -> None:
        whole = stored([list(range(7)), [1, 3, 5, 6]])
        parts = split(whole, *widths)
        assert torch.equal(check(parts, [5, 6], softcap=2.0), check(whole, [5, 6], softcap=2.0))

    def test_nan_in_what_is_evicted_does_not_leak(self) -> None:
        data = stored(RAGGED)
        assert bool(torch.isnan(data.runs[0].v).any()) and bool(torch.isnan(data.runs[0].k).any())
        assert bool(torch.isfinite(check(data, [5, 6])).all())

    def test_a_query_before_everything_kept_reads_nothing(self) -> None:
        found = check(stored([[4, 5], [4, 6]]), [3, 6])
        assert not found[:, 0].any() and torch.allclose(found[:, 1].sum(-1), torch.ones(Q_HEADS).double())

    def test_one_query_head_per_kv_head(self) -> None:
        data, q = stored(DENSE), random(KV_HEADS, 1, K_DIM, seed=3)
        seen = visible(data, torch.tensor([6]), KV_HEADS)
        _, out = by_loops(q, data, [6])
        torch.testing.assert_close(attend(q, data, seen, scale=SCALE), out, rtol=0, atol=1e-12)


class TestByHand:
    def test_two_equal_keys_halve_and_a_bias_of_log_three_weighs_threefold(self) -> None:
        k, v = torch.ones(1, 2, 1), torch.tensor([[[0.0], [1.0]]])
        data = LayerData.dense(k, v).stored
        q, seen = torch.ones(1, 1, 1), torch.ones(1, 1, 2, dtype=torch.bool)
        assert attend(q, data, seen, scale=1.0).item() == 0.5
        heavy = replace(data, bias=torch.tensor([[0.0, math.log(3)]]))
        assert attend(q, heavy, seen, scale=1.0).item() == pytest.approx(0.75)

    def test_a_sink_equal_to_the_only_logit_halves_the_output(self) -> None:
        data = LayerData.dense(torch.zeros(1, 1, 1), torch.ones(1, 1, 1)).stored
        out = attend(torch.ones(1, 1, 1), data, torch.ones(1, 1, 1, dtype=torch.bool), scale=1.0, sinks=torch.zeros(1))
        assert out.item() == 0.5


class TestVisible:
    def test_window_counts_the_querys_own_token(self) -> None:
        seen = visible(stored(DENSE), torch.tensor([4, 6]), Q_HEADS, window=2)
        assert seen.shape == (KV_HEADS, 2, 7)
        assert seen[0].nonzero().tolist() == [[0, 3], [0, 4], [1, 5], [1, 6]]

    def test_by_true_position_not_by_index(self) -> None:
        seen = visible(stored([[0, 5], [3, 4]]), torch.tensor([4]), Q_HEADS, window=3)
        assert seen[:, 0].tolist() == [[False, False], [True, True]]

    def test_a_selection_gives_a_row_per_query_head(self) -> None:
        seen = visible(stored(DENSE), torch.tensor([6]), Q_HEADS, allowed=torch.zeros(1, Q_HEADS, 7).bool())
        assert seen.shape == (Q_HEADS, 1, 7) and seen.sum().item() == Q_HEADS
