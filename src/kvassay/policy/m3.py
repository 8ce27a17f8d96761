"""MiniMax-M3's block-sparse selection (arXiv 2606.13392) with a stated scorer in place of its trained index heads.

The mechanism is M3's: 128-token blocks, a block's score is the largest of its tokens', blocks at the start and at the
end are forced inside the budget, one list per KV head, the first layers dense. The index heads are trained with the
model and are not to be had for another one, so a token's score is either its exact attention mass (a reference that
scans all keys) or comes from small index projections fitted to attention on another text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvassay.policy.base import Memory
from kvassay.policy.blocks import BlockSelector
from kvassay.policy.card import Card, Effect, Evidence, When
from kvassay.policy.checks import at_least, one_of
from kvassay.policy.views import LayerView

SOURCE = (
    "MiniMax-M3 block-sparse attention, arXiv 2606.13392, as in transformers (MiniMaxM3VLIndexer) and vLLM 0.33, "
    "from their code"
)
OWN_SCORER = "M3's trained index heads are not used: its scores are replaced, only its selection is M3's"
PROTECTED = "blocks with protected tokens are always read, inside the budget, beside M3's own init and local blocks"


@dataclass(frozen=True)
class M3Selector(BlockSelector):
    """M3's selection; a subclass says what a token scores.

    block: block size in tokens (M3: 128), a multiple of the cache's block size
    dense_layers: the first layers read everything (M3: 3 of 60)
    init_blocks, local_blocks: blocks at the start and at the end that are always read, inside the budget (M3: 0, 1);
        the block still filling is one of the local ones
    pool: of a block's token scores: "max" (M3), or "sum" of their masses, for comparison
    """

    block: int = 128
    dense_layers: int = 3
    init_blocks: int = 0
    local_blocks: int = 1
    pool: Literal["max", "sum"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, init_blocks=0, local_blocks=1)
        one_of(self, "pool", "max", "sum")

    @property
    def forced_ends(self) -> tuple[int, int]:
        """Init and local blocks."""
        return self.init_blocks, self.local_blocks


@dataclass(frozen=True)
class M3ExactMass(M3Selector):
    """A token scores its exact attention mass, averaged over the query heads of its KV head."""

    card: ClassVar[Card] = Card(
        name="m3-exact-mass",
        effects=frozenset({Effect.SELECT}),
        source=SOURCE,
        summary="M3's block selection by exact attention mass in place of trained index heads; scans all keys",
        when=frozenset({When.EVERY_STEP}),
        unit="block",
        evidence=frozenset({Evidence.KEYS, Evidence.QUERY}),
        budgets=frozenset({"read_tokens"}),
        reference=True,
        deviations=(OWN_SCORER, PROTECTED),
        limits=("reads every key to choose: a reference for the block shape and the pooling, not a saving",),
    )

    def ranks(self, layer: LayerView, query: Tensor, memory: Memory) -> Tensor:
        """Largest, or summed, mass of each block's tokens: [kv_heads, queries, blocks]."""
        mass = layer.group_sum(layer.mass(query)) / (layer.layer.q_heads // layer.kv_heads)
        ordinal = (layer.slots.clamp(min=0) // self.block)[:, None].expand_as(mass)
        blocks = mass.new_zeros(*mass.shape[:2], self.held(layer))
        mass = mass.masked_fill(~layer.alive[:, None], 0)
        return blocks.scatter_reduce(2, ordinal, mass, "amax" if self.pool == "max" else "sum")
