"""A model's block tables at the grain a request trace allows, and a request's tokens in that grain.

Nothing in serving depends on single tokens, so the pool is driven in units: a unit is as many tokens as the
smallest block of any group holds, and each unit is one entry of a block table's slots. Block counts and prefix
hits of groups without a window are exactly those of single tokens: `ceil(ceil(n / unit) / (block / unit))
= ceil(n / block)`, and likewise for the limit of all but the last token. A window is rounded up to units, so its
blocks are let go up to `unit - 1` tokens early or late.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kvassay.cache.ops import GroupSpec
from kvassay.errors import CacheError
from kvassay.layout.groups import plan_groups
from kvassay.layout.model import Layout
from kvassay.trace.requests.record import Request

PRIVATE = 1 << 40
"""Numbers from here on name content that no other request has."""
PER_REQUEST = 1 << 21
"""Private units a request may have."""


@dataclass(frozen=True)
class Geometry:
    """Groups in units, and what a block weighs."""

    groups: tuple[GroupSpec, ...]
    """One pretended layer and KV head each: only blocks are counted. Sizes and windows are in units."""
    components: tuple[str, ...]
    """Per group what people call it: full, sliding, latent, ..."""
    unit: int
    """Tokens per unit."""
    block_bytes: int
    """Bytes of one block, the same in every group."""

    @classmethod
    def of(cls, layout: Layout, block_size: int) -> Geometry:
        """The groups that vLLM plans for a model; `UnsupportedModel` where it has no plan with equal pages."""
        planned = plan_groups(layout, block_size)
        unit = gcd(*(group.block_size for group in planned))
        groups = tuple(
            GroupSpec(
                group.index,
                (group.index,),
                (1,),
                group.block_size // unit,
                None if group.window is None else -(-(group.window - 1) // unit) + 1,
            )
            for group in planned
        )
        kinds = tuple(layout.layers[group.layers[0]].kind for group in planned)
        return cls(groups, kinds, unit, max(group.block_bytes for group in planned))

    @property
    def windowed(self) -> bool:
        """Whether any group is bounded by a window."""
        return any(group.window is not None for group in self.groups)

    def units(self, tokens: int) -> int:
        """Units that `tokens` fill, the last one maybe in part."""
        return -(-tokens // self.unit)

    def blocks(self, units: int) -> int:
        """Blocks a sequence of `units` holds if nothing is shared, freed or passed by a window."""
        return sum(-(-units // group.block_size) for group in self.groups)

    def blocks_after(self, units: int, held: list[int], chunk: int) -> int:
        """Blocks to take for a sequence of `units` that has `held` table entries per group already.

        A windowed group never holds more than its window and a `chunk` in flight (units), plus one block where the
        two do not begin at a block's edge: vLLM's `max_admission_blocks_per_request`.
        """
        total = 0
        for group, has in zip(self.groups, held, strict=True):
            blocks = -(-units // group.block_size)
            if group.window is not None:
                blocks = min(blocks, -(-(group.window - 1 + chunk) // group.block_size) + 1)
            total += max(blocks - has, 0)
        return total

    def pool_blocks(self, pool_bytes: int, scale: float = 1.0) -> int:
        """Blocks of a pool of `pool_bytes`, the null block among them, if each costs `scale` times its bytes.

        `CacheError` if not even two fit.
        """
        blocks = int(pool_bytes / (self.block_bytes * scale))
        if blocks < 2:
            raise CacheError(
                f"a pool of {pool_bytes} bytes holds {blocks} blocks of {self.block_bytes * scale:.0f}, 2 are needed"
            )
        return blocks


def unit_ids(request: Request, number: int, unit: int, trace_block: int, start: int, stop: int) -> list[int]:
    """A number for each unit in [start, stop), equal to another request's only if the trace says they are equal.

    number: the request's ordinal in the trace.
    trace_block: tokens per block id of the trace.
    A unit that ends inside a trace block is shared when that block is: what two prompts share of a block without
    sharing all of it cannot be known. Units that reach beyond the prompt or its last id are the request's own.
    """
    known = request.blocks or ()
    reach = min(request.input_tokens, len(known) * trace_block)
    shared = -(-reach // unit) if reach == request.input_tokens else reach // unit
    ids = [known[(min((i + 1) * unit, reach) - 1) // trace_block] for i in range(start, min(stop, shared))]
    base = PRIVATE + number * PER_REQUEST
    return ids + list(range(base + start + len(ids), base + stop))
