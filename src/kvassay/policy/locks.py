"""LOCKS (Hwang 2026, arXiv 2607.24555): read the pages of largest attention mass, predicted from page-local spectra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvassay.errors import PolicyError
from kvassay.policy.base import Memory
from kvassay.policy.blocks import BlockSelector
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.spectral import Widths, log_mass, names, summarize
from kvassay.policy.views import BlockView, LayerView

Combine = Literal["share", "peak"]


@dataclass(frozen=True)
class MassSelector(BlockSelector):
    """Reads the pages of largest predicted mass; page 0 and the page still filling are always among them.

    Every page that is described takes part in the shares, page 0 included, the one with the newest token not.

    bits: of the codes of everything but a basis; 32 is float32, not coded
    combine: how the query heads of a KV head choose. "share" averages each head's shares of the mass; "peak"
        adds each head's masses relative to its largest
    """

    bits: int = 8
    combine: Combine = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, "bits", 8, 32)
        one_of(self, "combine", "share", "peak")

    @property
    def widths(self) -> Widths:
        """What of a page is kept, and in how many bits."""
        raise PolicyError(f"policy '{self.card.name}' does not say what it keeps of a page")

    @property
    def forced_ends(self) -> tuple[int, int]:
        """Page 0 and the page still filling."""
        return 1, 1

    def summarize(self, block: BlockView) -> Mapping[str, Tensor]:
        """The packed description of each block, from keys [blocks, kv_heads, block_size, k_dim]."""
        return summarize(block.keys, self.widths)

    def ranks(self, layer: LayerView, query: Tensor, memory: Memory) -> Tensor:
        """Combined mass [kv_heads, queries, pages] of all described pages before that of the newest token."""
        mass = self.log_mass(layer, query)[..., : self.held(layer) - 1]
        if mass.shape[-1] == 0:
            return mass.sum(1)
        if self.combine == "share":
            return mass.softmax(-1).mean(1)
        return (mass - mass.amax(-1, keepdim=True)).exp().sum(1)

    def log_mass(self, layer: LayerView, query: Tensor) -> Tensor:
        """Predicted log mass of each described page: [kv_heads, group, queries, pages]."""
        side = {name: layer.side_data(name) for name in names(self.widths)}
        blocks = log_mass(
            side,
            self.widths,
            query.unflatten(0, (layer.kv_heads, -1)),
            layer.block_size,
            scale=layer.layer.scale,
            softcap=layer.layer.softcap,
        )
        return self.grouped(blocks, layer, dim=-1).logsumexp(-1)


@dataclass(frozen=True)
class Locks(MassSelector):
    """Each page's keys as a mean and their `rank` leading directions; the mass is exact at rank 15 and 32 bits.

    block: page size in tokens (paper: 16); a larger page of several cache blocks keeps one description for each
    rank: directions kept of a cache block's keys (paper: 8)
    basis_bits: of the directions' elements: 4 (paper), 8 or 32 (float32, not coded)
    bits: of coefficients and mean: 8 (paper) or 32
    combine: "share" is the paper's rule, "peak" that of the published package
    """

    rank: int = 8
    basis_bits: int = 4

    card: ClassVar[Card] = Card(
        name="locks",
        effects=frozenset({Effect.SELECT}),
        source=(
            "LOCKS, arXiv 2607.24555, from its full text: summaries, log-sum-exp mass, share-average, "
            "forced pages, widths; package locks-kv 0.1.4, from its code: where the scales are, which pages make up "
            "a share, the peak rule"
        ),
        summary="reads the pages of largest attention mass, predicted from a rank-8 summary of each page's keys",
        when=frozenset({When.BLOCK_FULL, When.EVERY_STEP}),
        unit="block",
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY}),
        budgets=frozenset({"read_tokens"}),
        deviations=(
            "pages with protected tokens are always read, inside the budget, beside page 0 and the page still "
            "filling; with no protection this is the published rule",
            "a budget that is not whole pages is rounded down, to stay inside it; the paper rounds up",
            "scales are float16 and codes are made with the rounded scale; the package stores bfloat16 scales and "
            "makes codes with the unrounded ones",
            "the query is not rounded to int8 before scoring, as the package's kernel does",
        ),
        limits=(
            "memory rises by a tenth of the cache, and each step scans that tenth whatever the budget; in the paper "
            "decoding breaks even near 30,000 tokens",
            "one block list per KV head: an attention kernel that takes one block table per request cannot run it",
            "blind to values, and to mass spread thinly over many pages; its error in log mass has a heavy tail",
            "redundant where the model brings a trained indexer",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, rank=1)
        one_of(self, "basis_bits", 4, 8, 32)

    @property
    def widths(self) -> Widths:
        """Rank and bits."""
        return Widths(self.rank, self.basis_bits, self.bits)
