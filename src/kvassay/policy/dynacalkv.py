"""DynaCalKV: low-rank keys of dynamically grouped heads, a rank for each group (arXiv 2607.24331)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from kvassay.policy.card import Card
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.lowrank import LowRankProjections
from kvassay.policy.lowrank_factors import LayerStats, lost, spectrum
from kvassay.policy.lowrank_heads import Groups, cka, clusterings
from kvassay.policy.lowrank_ranks import Ceiling, cut, energy_ranks, grow
from kvassay.policy.recalkv import FORKED, LIMITS, RAW, SPLIT_GAPS, ReCalKV


class Candidate(NamedTuple):
    """One way to group the heads of a layer."""

    groups: Groups
    ranks: list[int]
    error: float
    """Squared Frobenius norm of what the factors leave out of the key weight."""
    objective: float


@dataclass(frozen=True)
class DynaCalKV(LowRankProjections):
    """Heads clustered by similarity of their keys, ranks by energy and cut to a ceiling, the best number of clusters.

    ceiling: "parameters": the thin projections have at most as many as those of uniform groups (the paper's way, at
        a smaller cache); "elements": as many cached elements as uniform groups, so that only the grouping differs
    penalty: what an unused rank costs beside the squared error, when the number of clusters is chosen
    """

    ceiling: Literal["parameters", "elements"] = "parameters"
    penalty: float = 1.0

    card: ClassVar[Card] = dataclasses.replace(
        ReCalKV.card,
        name="dynacalkv",
        source="arXiv 2607.24331; the rank split and the values as in Palu's and ReCalKV's code",
        summary="low-rank projections: key heads clustered by similarity, a rank per cluster under a parameter ceiling",
        gaps=(
            *SPLIT_GAPS,
            "clusters: average linkage on 1 - CKA, every number of clusters from 1 to the KV heads",
            "the target rank is a parameter; the paper's is unstated (its keys keep 19, 24 and 30% under the baseline)",
            "key factors are whitened as in ReCalKV's code; the text has a plain SVD (whitened=False). Ranks and the "
            "objective are of the plain weights, as the text has them, with the error of the factors really used",
            "ranks are at least 1; what a group has no room for goes to the others by energy; rounded ranks that come "
            "to more than the layer's are cut by the same rule",
            "one alternating pass over the value factors, as the code's default",
        ),
        deviations=(FORKED, RAW, "ceiling='elements' is ours: it compares at equal cached bytes, and grows ranks back"),
        limits=(
            *LIMITS,
            "with no more KV heads than `group` the ceiling binds nothing: one cluster of all heads fits best",
            "the penalty adds a rank count to a squared norm, so its weight depends on the model's scale",
            "its authors advise against it for GQA models on long contexts",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, penalty=0)
        one_of(self, "ceiling", "parameters", "elements")

    def key_groups(self, stats: LayerStats, heads: Tensor, rank: int) -> tuple[Groups, list[int]]:
        """The clustering of least objective; ties go to fewer clusters."""
        best = min(self.candidates(stats, heads, rank), key=lambda one: one.objective)
        return best.groups, best.ranks

    def candidates(self, stats: LayerStats, heads: Tensor, rank: int) -> list[Candidate]:
        """Every number of clusters, with its ranks and objective."""
        return [self._candidate(stats, heads, rank, groups) for groups in clusterings(cka(heads, stats.gram))]

    def _candidate(self, stats: LayerStats, heads: Tensor, rank: int, groups: Groups) -> Candidate:
        weights = [heads[list(group)].flatten(0, 1) for group in groups]
        spectra = [spectrum(weight) for weight in weights]
        ranks = self._ranks(spectra, [len(group) for group in groups], rank)
        error = sum(lost(w, self.key_basis(stats, w, r)) for w, r in zip(weights, ranks, strict=True))
        return Candidate(groups, ranks, error, error + self.penalty * (rank - sum(ranks)))

    def _ranks(self, spectra: list[list[float]], sizes: list[int], rank: int) -> list[int]:
        """By energy, then cut until both the layer's rank and the parameter ceiling hold."""
        whole = sum(sizes)
        cached = Ceiling((1.0,) * len(sizes), rank)
        ranks = cut(spectra, energy_ranks(spectra, rank), cached)
        if self.ceiling == "elements":
            return grow(spectra, ranks, rank)
        return cut(spectra, ranks, Ceiling(tuple(size / whole for size in sizes), self.group * rank / whole))
