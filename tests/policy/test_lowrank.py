"""Grouping, ranks and factors of low-rank projections: by hand, by brute force, and against the published formulas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.policy.lowrank_factors import LayerStats, basis, fisher, lost, spectrum, value_basis
from kvassay.policy.lowrank_heads import cka, clusterings, equal_groups
from kvassay.policy.lowrank_ranks import Ceiling, cut, energy_ranks, fisher_split, grow
from kvassay.policy.recalkv import ReCalKV, shared_out
from kvassay.policy.registry import make
from kvassay.policy.weights import LayerWeights, Projection

RNG = torch.Generator().manual_seed(5)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


def second_moment(x: Tensor) -> Tensor:
    return x.T @ x


# -- heads ------------------------------------------------------------------------------------------------


def test_cka_from_the_gram_matrix_is_cka_of_the_activations() -> None:
    x, heads = randn(50, 12) + 3, randn(3, 4, 12)
    centred = x - x.mean(0)
    found = cka(heads, second_moment(centred))
    keys = [(x @ head.T).numpy() for head in heads]
    for i, j in itertools.product(range(3), repeat=2):
        a, b = (keys[at] - keys[at].mean(0) for at in (i, j))
        top = np.linalg.norm(b.T @ a) ** 2
        assert found[i, j] == pytest.approx(top / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)), rel=1e-10)
    # A rotation and a scale of a head's keys change nothing.
    turned = torch.linalg.qr(randn(4, 4)).Q @ heads[0] * 7
    assert cka(torch.stack([heads[0], turned]), second_moment(centred))[0, 1] == pytest.approx(1)


def test_clusters_are_recovered() -> None:
    """Heads 0, 2, 3 hold one subspace of keys, 1 and 4 another, orthogonal in the text."""
    x = torch.linalg.qr(randn(64, 8)).Q * 8
    x = x - x.mean(0)
    one, other = randn(3, 8), randn(3, 8)
    one[:, 4:], other[:, :4] = 0, 0
    mix = lambda base: torch.linalg.qr(randn(3, 3)).Q @ base + 0.05 * randn(3, 8)  # noqa: E731
    heads = torch.stack([mix(one), mix(other), mix(one), mix(one), mix(other)])
    found = clusterings(cka(heads, second_moment(x)))
    assert [len(groups) for groups in found] == [1, 2, 3, 4, 5]
    assert found[0] == ((0, 1, 2, 3, 4),)
    assert found[1] == ((0, 2, 3), (1, 4))
    assert found[4] == ((0,), (1,), (2,), (3,), (4,))
    assert equal_groups(cka(heads, second_moment(x)), 2) in (((0, 2), (1, 4), (3,)), ((0, 3), (1, 4), (2,)))


def test_average_linkage_by_hand() -> None:
    """0-1 join at 0.1; 2 is 0.3 and 0.7 from them, 0.5 on average, and 0.45 from 3: so 2-3 join before."""
    distance = torch.tensor([[0, 0.1, 0.3, 0.9], [0.1, 0, 0.7, 0.9], [0.3, 0.7, 0, 0.45], [0.9, 0.9, 0.45, 0]])
    found = clusterings(1 - distance.double())
    assert found == [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 1), (2,), (3,)), ((0,), (1,), (2,), (3,))]
    assert clusterings(torch.ones(1, 1)) == [((0,),)]


# -- ranks ------------------------------------------------------------------------------------------------


def test_fisher_split_by_hand() -> None:
    assert fisher_split([1, 3], [8, 8], 0.5, 1) == [2, 6]
    assert fisher_split([1, 9], [8, 8], 0.75, 1) == [4, 8]  # 1.2 and 10.8: clipped, the other gets what is left
    assert fisher_split([1.25, 1.5, 1.25], [4, 4, 4], 5 / 12, 1) == [2, 2, 1]  # of 1.56, 1.88, 1.56: two are dealt
    assert fisher_split([1, 1], [64, 64], 0.30, 32) == [32, 32]  # 19 each: rounded up to the least
    assert fisher_split([1, 3], [96, 96], 0.5, 32) == [32, 64]  # 24 and 72
    assert fisher_split([1, 5], [24, 24], 1.0, 32) == [24, 24]  # never more than there is
    with pytest.raises(PolicyError, match="Fisher scores sum to 0"):
        fisher_split([0, 0], [8, 8], 0.5, 1)


@given(st.lists(st.tuples(st.floats(0.01, 100), st.integers(2, 40)), min_size=1, max_size=8), st.floats(0.2, 1))
def test_fisher_split_spends_the_pool(matrices: list[tuple[float, int]], share: float) -> None:
    scores, dims = zip(*matrices, strict=True)
    ranks = fisher_split(scores, dims, share, 1)
    assert all(1 <= r <= dim for r, dim in zip(ranks, dims, strict=True))
    assert sum(ranks) == round(share * sum(dims)) or 1 in ranks  # a matrix that was due none gets one
    assert fisher_split(scores, dims, 1.0, 1) == list(dims)


def test_fisher_score_by_hand() -> None:
    batches = torch.tensor([[[3.0, 0.0]], [[4.0, 2.0]]])
    assert fisher(batches.square().mean(0)) == pytest.approx((12.5**0.5 + 2**0.5) / 2)


def test_energy_ranks_by_hand() -> None:
    assert energy_ranks([[6, 2, 1], [2, 0.5, 0.5]], 4) == [3, 1]  # 9 : 3 of 4
    assert energy_ranks([[90, 9, 1], [2, 1, 1]], 4) == [3, 1]  # 3.8 of 3: the rest goes over
    assert energy_ranks([[90, 9, 1], [2, 1, 1]], 6) == [3, 3]
    assert energy_ranks([[99.0], [0.1, 0.1]], 1) == [1, 1]  # at least one each
    assert energy_ranks([[1, 1], [0, 0]], 2) == [2, 1]


SPECTRA = st.lists(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda all_: [sorted(one, reverse=True) for one in all_]
)


def energy(spectra: Sequence[Sequence[float]], ranks: Sequence[int]) -> float:
    return sum(sum(one[:r]) for one, r in zip(spectra, ranks, strict=True))


@given(SPECTRA, st.integers(1, 12))
def test_the_cut_under_equal_weights_is_the_best_there_is(spectra: list[list[float]], most: int) -> None:
    full = [len(one) for one in spectra]
    found = cut(spectra, full, Ceiling((1.0,) * len(full), most))
    allowed = [r for r in itertools.product(*(range(1, n + 1) for n in full)) if sum(r) <= max(most, len(full))]
    assert tuple(found) in allowed
    assert energy(spectra, found) == pytest.approx(max(energy(spectra, r) for r in allowed))
    assert sum(grow(spectra, [1] * len(full), most)) == max(len(full), min(most, sum(full)))
    grown = grow(spectra, [1] * len(full), most)
    assert energy(spectra, grown) == pytest.approx(energy(spectra, found))


@given(SPECTRA, st.floats(0.3, 8), st.integers(0, 1000))
def test_the_cut_is_the_published_loop(spectra: list[list[float]], most: float, seed: int) -> None:
    """While it is violated: take argmin of energy lost / alpha, by a plain scan."""
    sizes = np.random.default_rng(seed).integers(1, 5, len(spectra))
    alpha = tuple((sizes / sizes.sum()).tolist())
    ranks = [len(one) for one in spectra]
    found = cut(spectra, ranks, Ceiling(alpha, most))
    while sum(r * a for r, a in zip(ranks, alpha, strict=True)) > most * (1 + 1e-12) and max(ranks) > 1:
        able = [i for i, r in enumerate(ranks) if r > 1]
        ranks[min(able, key=lambda i: spectra[i][ranks[i] - 1] / alpha[i])] -= 1
    assert found == ranks
    assert sum(r * a for r, a in zip(found, alpha, strict=True)) <= most * (1 + 1e-9) or max(found) == 1


def test_even_shares() -> None:
    assert shared_out(10, [4, 4], 8) == [5, 5]
    assert shared_out(11, [4, 4, 1], 8) == [5, 5, 1]
    assert shared_out(9, [4, 4], 8) == [5, 4]
    assert shared_out(64, [4, 4], 8) == [32, 32]
    assert shared_out(1, [1, 1], 8) == [1, 1]


# -- factors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whitened", [True, False])
def test_key_factors_are_the_truncated_svd(whitened: bool) -> None:
    """ReCalKV's route: SVD of C W' with C'C the second moment, un-whitened; rebuilt keys are x L R."""
    x, w = randn(40, 10) * torch.linspace(0.2, 4, 10), randn(6, 10)
    white = torch.linalg.cholesky(second_moment(x)).T if whitened else torch.eye(10).double()
    u, s, vh = torch.linalg.svd(white @ w.T, full_matrices=False)
    left, right = torch.linalg.solve(white, u[:, :3] * s[:3].sqrt()), s[:3].sqrt()[:, None] * vh[:3]
    onto = basis(w, second_moment(x) if whitened else None, 3)
    torch.testing.assert_close(x @ w.T @ onto @ onto.T, x @ left @ right)
    torch.testing.assert_close(onto.T @ onto, torch.eye(3).double())
    # Whitened, what is lost on the text is least: the tail of the spectrum.
    if whitened:
        assert float((x @ w.T - x @ left @ right).square().sum()) == pytest.approx(float(s[3:].square().sum()))
    else:
        assert lost(w, onto) == pytest.approx(sum(spectrum(w)[3:]))


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_value_factors_are_the_alternating_ones(passes: int) -> None:
    """By the formulas of the paper, in columns: y = W x, cached R x, rebuilt L R x."""
    columns, w, rank = (randn(40, 10) * torch.linspace(0.2, 4, 10)).T, randn(6, 10), 3
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    left, right = u[:, :rank] * s[:rank].sqrt(), s[:rank].sqrt()[:, None] * vh[:rank]
    xx, errors = columns @ columns.T, [float((w @ columns - left @ right @ columns).square().sum())]
    for _ in range(passes):
        left = w @ xx @ right.T @ torch.linalg.inv(right @ xx @ right.T)
        right = torch.linalg.inv(left.T @ left) @ left.T @ w
        errors.append(float((w @ columns - left @ right @ columns).square().sum()))
    onto = value_basis(w, xx, rank, passes)
    torch.testing.assert_close(onto @ onto.T @ w @ columns, left @ right @ columns)
    assert errors == sorted(errors, reverse=True)
    whole = value_basis(w, xx, 6, passes)
    torch.testing.assert_close(whole @ whole.T @ w, w)


# -- the choice of clusters -------------------------------------------------------------------------------


def stats_of(heads: Tensor, x: Tensor) -> LayerStats:
    weights = LayerWeights(Projection(heads.flatten(0, 1)), Projection(heads.flatten(0, 1)))
    centred = x - x.mean(0)
    return LayerStats(weights, second_moment(x), second_moment(centred), (1.0, 1.0))


@pytest.mark.parametrize("whitened", [True, False])
def test_the_chosen_clusters_have_the_least_objective_under_the_ceiling(whitened: bool) -> None:
    heads, x, rank = randn(6, 4, 12), randn(60, 12), 12
    heads[3:] = torch.linalg.qr(randn(4, 4)).Q @ heads[:3] + 0.1 * randn(3, 4, 12)
    stats = stats_of(heads, x)
    policy = make("dynacalkv", whitened=whitened, group=2, penalty=0.5)
    found = policy.candidates(stats, heads, rank)  # type: ignore[attr-defined]
    assert [len(one.groups) for one in found] == [1, 2, 3, 4, 5, 6]
    for one in found:
        alpha = [len(group) / 6 for group in one.groups]
        assert sum(r * a for r, a in zip(one.ranks, alpha, strict=True)) <= 2 * rank / 6 + 1e-9
        assert sum(one.ranks) <= rank
        error = 0.0
        for group, r in zip(one.groups, one.ranks, strict=True):
            w = heads[list(group)].flatten(0, 1)
            white = torch.linalg.cholesky(stats.moment).T if whitened else torch.eye(12).double()
            onto = torch.linalg.svd(white @ w.T, full_matrices=False).Vh[:r]
            error += float((w - onto.T @ onto @ w).square().sum())
        assert one.error == pytest.approx(error)
        assert one.objective == pytest.approx(error + 0.5 * (rank - sum(one.ranks)))
    best = min(found, key=lambda one: one.objective)
    assert policy.key_groups(stats, heads, rank) == (best.groups, best.ranks)  # type: ignore[attr-defined]
    assert found[0].ranks == [4]  # one cluster: 2 * 12 / 6
    # At equal elements every grouping caches as much as uniform groups do.
    equal = make("dynacalkv", ceiling="elements", group=2)
    assert {sum(one.ranks) for one in equal.candidates(stats, heads, rank)} == {rank}  # type: ignore[attr-defined]
    groups, ranks = ReCalKV(group=2).key_groups(stats, heads, rank)
    assert groups == ((0, 3), (1, 4), (2, 5)) and ranks == [4, 4, 4]


@pytest.mark.parametrize("name", ["dynacalkv", "recalkv"])
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rank": 0.0}, r"rank=0.0, must be a fraction in \(0, 1\]"),
        ({"rank": 1.5}, "rank=1.5"),
        ({"multiple": 0}, "multiple=0, must be at least 1"),
        ({"tokens": 1}, "tokens=1, must be at least 2"),
    ],
)
def test_parameters_are_refused(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make(name, **parameters)


def test_an_unknown_ceiling_is_refused() -> None:
    with pytest.raises(PolicyError, match="ceiling"):
        make("dynacalkv", ceiling="bytes")
