"""ReCalKV's uniform groups (arXiv 2505.24357): the baseline that DynaCalKV is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvassay.policy.card import Approximates, Card, Effect, Evidence, Prefill, When
from kvassay.policy.lowrank import LowRankProjections
from kvassay.policy.lowrank_factors import LayerStats
from kvassay.policy.lowrank_heads import Groups, cka, equal_groups

SPLIT_GAPS = (
    "Fisher scores: mean over a weight's elements of the root mean square gradient over batches, keys and values of "
    "all layers in one pool (as in Palu's code); ranks left after clipping are dealt by largest remainder",
    "ranks are rounded to multiples of 8; the code's 32 suits wider models (multiple=32)",
    "16 pieces of 512 tokens, or as many as the calibration text holds; the code's defaults are 256 of 2048",
    "CKA of the keys' activations, from the centred second moment of the layer's inputs",
)
FORKED = (
    "forked from a dense prefill, only what comes after it reads rebuilt keys and values; own prefill is as published"
)
RAW = "generated tokens are stored and billed as they come; an engine stores their coefficients too"
LIMITS = (
    "keeps what the calibration text needs: fitted on prose without a digit it loses answers in digits, and more so "
    "the longer the prose (docs/candidates.md); let the text hold what questions ask for",
    "needs linear k_proj and v_proj: fused or latent projections are refused",
    "layers bounded by a window are left alone, though their projections could be factored as well",
    "attention is timed over rebuilt keys and values where the projections have a bias or the keys a norm: no kernel "
    "here puts those back",
    "keys are rebuilt, normalised and rotated at every step over the whole context",
)


@dataclass(frozen=True)
class ReCalKV(LowRankProjections):
    """Groups of `group` similar KV heads, the layer's key rank shared out evenly by size."""

    card: ClassVar[Card] = Card(
        name="recalkv",
        effects=frozenset({Effect.LOW_RANK}),
        source="arXiv 2505.24357 and its code, as described for DynaCalKV (arXiv 2607.24331)",
        summary="low-rank projections: equal groups of similar key heads, values whole and refined on calibration text",
        when=frozenset({When.OFFLINE, When.AFTER_PREFILL}),
        evidence=frozenset({Evidence.WEIGHTS, Evidence.GRADIENTS, Evidence.LAYER_INPUT}),
        approximates=frozenset({Approximates.KEYS, Approximates.VALUES}),
        prefill=Prefill.OWN,
        budgets=frozenset(),
        reconstruction=True,
        gaps=(
            *SPLIT_GAPS,
            "groups: the first free head, then the free head most similar to the group on average; a last group of "
            "what is left, its rank in proportion to its size",
        ),
        deviations=(FORKED, RAW),
        limits=LIMITS,
    )

    def key_groups(self, stats: LayerStats, heads: Tensor, rank: int) -> tuple[Groups, list[int]]:
        """Equal groups, equal ranks; remainders go to the first."""
        groups = equal_groups(cka(heads, stats.gram), self.group)
        return groups, shared_out(rank, [len(group) for group in groups], heads.shape[1])


def shared_out(rank: int, sizes: list[int], dim: int) -> list[int]:
    """`rank` in proportion to the groups' sizes, each within what its heads have; remainders to the first."""
    whole = sum(sizes)
    ranks = [max(1, min(rank * size // whole, size * dim)) for size in sizes]
    for at, size in enumerate(sizes):
        while sum(ranks) < rank and ranks[at] < min(size * dim, rank * size // whole + 1):
            ranks[at] += 1
    return ranks
