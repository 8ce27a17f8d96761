"""SelKV against a slow recomputation of its equations from the whole attention map."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.cache.edits import Bias, Evict, Merge
from kvassay.errors import BudgetError, EvidenceMissing, PolicyError
from kvassay.policy.card import Evidence
from kvassay.policy.selkv import SelKV
from kvassay.policy.twins import merge_off
from kvassay.policy.views import LayerView, Rows
from tests.policy.build import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    allowance,
    attention_oracle,
    cache,
    dense,
    memory,
    ragged,
    random_q,
    view,
)

N, W, SIZE, GROUP = 40, 8, 8, Q_HEADS // KV_HEADS
POLICY = SelKV(window=W, recent=4)


def attention_map(q: Tensor, data: LayerData) -> np.ndarray:
    at = list(range(N))
    return np.stack([attention_oracle(q[h], data.k[h // GROUP], at, at, DIM**-0.5) for h in range(Q_HEADS)])


def shown(policy: SelKV, data: LayerData, q: Tensor, rows: int = N) -> LayerView:
    """A view with the taps a recorder would have kept: scores inside each bucket, and each row's log-sum-exp."""
    found = view(policy, data, queries=q, length=N)
    scores = torch.full((N, Q_HEADS, SIZE), -torch.inf, dtype=torch.float64)
    lse = torch.zeros(N, Q_HEADS, dtype=torch.float64)
    for h in range(Q_HEADS):
        logits = (q[h] @ data.k[h // GROUP].T) * DIM**-0.5
        for p in range(N):
            lse[p, h] = torch.logsumexp(logits[p, : p + 1], 0)
            first = p - p % SIZE
            scores[p, h, : p - first + 1] = logits[p, first : p + 1]
    found._rows = {
        Evidence.BUCKET: lambda: Rows(scores[:rows], torch.arange(rows)),
        Evidence.ROW_LSE: lambda: Rows(lse[:rows], torch.arange(rows)),
    }
    return found


def test_every_equation_against_the_whole_map() -> None:
    data, q, tokens = dense(N), random_q(N), 14
    full = attention_map(q, data).reshape(KV_HEADS, GROUP, N, N).sum(1)
    v = data.v.numpy()
    mass = full[:, N - W :].sum(1)
    weighed = mass * np.linalg.norm(v, axis=-1)
    padded = np.pad(weighed, ((0, 0), (2, 2)))
    score = np.stack([padded[:, t : t + 5].mean(1) for t in range(N)], axis=1)

    recents, free = list(range(N - 4, N)), tokens - 4
    tops = [set(np.argsort(-score[h, : N - 4])[:free].tolist()) for h in range(KV_HEADS)]
    union = sorted(set().union(*tops))
    kept = sorted(sorted(union, key=lambda t: -score[:, t].mean())[:free] + recents)
    merged, ratio = v.copy(), np.zeros((KV_HEADS, N))
    into = np.full((KV_HEADS, N), -1)
    for h in range(KV_HEADS):
        targets = [i for i in kept if i in tops[h] or i in recents]
        top, extra = {i: mass[h, i] * v[h, i] for i in kept}, dict.fromkeys(kept, 0.0)
        for j in sorted(set(range(N)) - set(kept)):
            near = [i for i in targets if i // SIZE == j // SIZE and i < j]
            if not near:
                continue
            i = max(near, key=lambda i: full[h, j, i])
            gamma = v[h, j] @ v[h, i] / np.linalg.norm(v[h, j]) / np.linalg.norm(v[h, i])
            if gamma > 0:
                into[h, j] = i
                top[i] = top[i] + gamma * mass[h, j] * v[h, j]
                extra[i] += gamma * mass[h, j]
        for i in kept:
            merged[h, i] = top[i] / (mass[h, i] + extra[i])
            ratio[h, i] = (mass[h, i] + extra[i]) / mass[h, i]
    bias = 0.5 * np.log(np.where(ratio.mean(0) > 0, ratio.mean(0), 1.0))

    seen = shown(POLICY, data, q)
    scores = {0: POLICY.score(seen, memory())}
    np.testing.assert_allclose(scores[0].numpy(), score, rtol=1e-6)
    decision = POLICY.decide(cache(seen), scores, memory(), allowance(tokens, N))
    merge, log, evict = decision.edits[0]
    assert isinstance(merge, Merge) and isinstance(log, Bias) and isinstance(evict, Evict)
    assert evict.keep.nonzero().flatten().tolist() == kept
    assert merge.into.tolist() == into.tolist() and (into >= 0).any(), "the case must merge something"
    np.testing.assert_allclose(log.log_weight.numpy(), np.stack([bias] * KV_HEADS), atol=1e-9)
    for h in range(KV_HEADS):
        for i in kept:
            sources = [i, *np.flatnonzero(into[h] == i).tolist()]
            weight = merge.weight[h, sources].numpy()
            np.testing.assert_allclose(weight @ v[h, sources] / weight.sum(), merged[h, i], rtol=1e-6)


def test_it_reports_how_much_was_merged() -> None:
    seen = shown(POLICY, dense(N), random_q(N))
    decision = POLICY.decide(cache(seen), {0: POLICY.score(seen, memory())}, memory(), allowance(14, N))
    merge, _, evict = decision.edits[0]
    gone = int((~evict.keep).sum()) * KV_HEADS
    assert set(decision.facts) == {"routed_share", "gate_mean", "floored_targets", "position_0_kept"}
    assert 0 < int((merge.into >= 0).sum()) / gone <= decision.facts["routed_share"] <= 1  # type: ignore[union-attr]
    assert decision.facts["position_0_kept"] == float(evict.keep[0]) and 0 <= decision.facts["gate_mean"] <= 1


def test_values_that_point_away_are_dropped_not_merged() -> None:
    data = dense(N)
    v = torch.where((torch.arange(N) % 2 == 0)[None, :, None], 1.0, -1.0).expand(KV_HEADS, N, DIM).double()
    seen = shown(POLICY, LayerData.dense(data.k, v), random_q(N))
    decision = POLICY.decide(cache(seen), {0: POLICY.score(seen, memory())}, memory(), allowance(14, N))
    for edit in decision.edits[0]:
        if isinstance(edit, Merge):
            rows, sources = (edit.into >= 0).nonzero(as_tuple=True)
            assert bool((sources % 2 == edit.into[rows, sources] % 2).all())


def test_alpha_0_leaves_the_logits_alone_and_the_merges_as_they_are() -> None:
    plain = SelKV(window=W, recent=4, alpha=0.0)
    seen = shown(POLICY, dense(N), random_q(N))
    scores = {0: POLICY.score(seen, memory())}
    with_bias, without = (p.decide(cache(seen), scores, memory(), allowance(14, N)).edits[0] for p in (POLICY, plain))
    assert bool((without[1].log_weight == 0).all()) and bool((with_bias[1].log_weight > 0).any())  # type: ignore[union-attr]
    assert torch.equal(with_bias[0].into, without[0].into)  # type: ignore[union-attr]


def test_the_merge_off_twin_keeps_the_same_tokens_and_nothing_else() -> None:
    off = merge_off(POLICY)
    seen, other = (shown(p, dense(N), random_q(N)) for p in (POLICY, off))  # type: ignore[arg-type]
    kept = POLICY.decide(cache(seen), {0: POLICY.score(seen, memory())}, memory(), allowance(14, N)).edits[0]
    alone = off.decide(cache(other), {0: off.score(other, memory())}, memory(), allowance(14, N)).edits[0]
    assert len(alone) == 1 and torch.equal(alone[0].keep, kept[-1].keep)  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens", [6, 10, 25, 38])
def test_every_layer_keeps_exactly_the_budget(tokens: int) -> None:
    seen = shown(POLICY, dense(N, seed=tokens), random_q(N))
    edits = POLICY.decide(cache(seen), {0: POLICY.score(seen, memory())}, memory(), allowance(tokens, N)).edits[0]
    assert int(edits[-1].keep.sum()) == tokens  # type: ignore[union-attr]


def test_protected_tokens_stay() -> None:
    seen = view(POLICY, dense(N), queries=random_q(N), sink=3, recent=6)
    kept, _ = POLICY.choose(seen, POLICY.score(seen, memory()), 12)
    assert kept[:3].all() and kept[-6:].all() and int(kept.sum()) == 12
    with pytest.raises(BudgetError, match="always keeps 9 tokens, the budget is 9"):
        POLICY.choose(seen, POLICY.score(seen, memory()), 9)


def test_what_is_missing_or_not_possible_is_said() -> None:
    scores = {0: torch.rand(KV_HEADS, N)}
    with pytest.raises(EvidenceMissing, match="of all 40 tokens of layer 0, the trace holds 30"):
        POLICY.decide(cache(shown(POLICY, dense(N), random_q(N), rows=30)), scores, memory(), allowance(14, N))
    uneven = view(POLICY, ragged(dense(N), [list(range(N)), list(range(20))]), queries=random_q(N), length=N)
    with pytest.raises(PolicyError, match="hold different tokens already"):
        POLICY.decide(cache(uneven), scores, memory(), allowance(14, N))
    with pytest.raises(PolicyError, match="kernel=2, must be odd"):
        SelKV(kernel=2)
    assert math.isclose(POLICY.alpha, 0.5)
