"""The two narrow contracts that vLLM's own code serves beside ours: a block pool, and a cache manager.

`Pool` is what the ledger asks of blocks, `Manager` what a scheduler asks of a whole cache. Neither knows
of torch or vLLM. Block 0 is the null block in both; ids are those of one pool shared by all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvassay.cache.ops import GroupSpec
from kvassay.cache.pool import BlockRemoved, BlockStored, PoolCounts
from kvassay.cache.prefix import Hit


class Pool(Protocol):
    """Blocks with reference counts, generations, prefix hashes and one free queue (see `BlockPool`)."""

    num_blocks: int
    caching: bool
    events: list[BlockStored | BlockRemoved]

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        ...

    def ref(self, block_id: int) -> int:
        """Reference count of a block; the null block's is 0."""
        ...

    def generation(self, block_id: int) -> int:
        """How often the block has been allocated."""
        ...

    def hash_of(self, block_id: int) -> bytes | None:
        """The hash under which the block can be found, if any."""
        ...

    def free_order(self) -> list[int]:
        """Free blocks in the order of reuse."""
        ...

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        ...

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks from the head of the free queue; `PoolExhausted`, and none taken, if fewer are free."""
        ...

    def acquire(self, ids: Iterable[int]) -> None:
        """Add a reference to each."""
        ...

    def release(self, ids: Iterable[int]) -> None:
        """Drop a reference of each; what becomes free goes to the head of the queue unhashed, to its tail hashed."""
        ...

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """Make a referenced block findable."""
        ...

    def drop_hash(self, block_id: int) -> None:
        """Make a block unfindable, wherever it is."""
        ...

    def lookup(self, block_hash: bytes) -> int | None:
        """The oldest block with this hash; takes no reference."""
        ...

    def is_writable(self, block_id: int) -> bool:
        """Whether the block has one owner and no hash."""
        ...

    def check(self) -> None:
        """Recount everything; `LedgerCorrupt` if two records disagree."""
        ...


class Admitted(NamedTuple):
    """What a request found: tokens taken from the prefix cache, and where a longer prefix ends that only
    some groups still hold (0: none); see `Hit`.
    """

    cached_tokens: int
    boundary: int


@dataclass(frozen=True)
class Stored:
    """A full block became findable: `key` is the low 64 bits of its chained hash, as in vLLM's events."""

    group: int
    key: int


@dataclass(frozen=True)
class Removed:
    """A findable block is gone. vLLM says so for every copy of a key, our pool with the last one."""

    group: int
    key: int


class PoolState(NamedTuple):
    """A whole pool: reference count and hashedness by block id (the null block's are 0 and False), and the
    free blocks in the order in which they would be reused.
    """

    refs: tuple[int, ...]
    hashed: tuple[bool, ...]
    free: tuple[int, ...]


class Manager(Protocol):
    """Requests by name, each with one block table per group, over one pool with prefix caching.

    A request longer than `max_tokens` is refused with `CacheError`; so is a name unknown or in use.
    """

    groups: tuple[GroupSpec, ...]
    num_blocks: int
    max_tokens: int

    def lookup(self, tokens: Sequence[int]) -> Hit:
        """The longest cached prefix, at most all but the last token; takes no reference."""
        ...

    def admit(
        self,
        request: str,
        tokens: Sequence[int],
        count: int | None = None,
        *,
        prompt_tokens: int | None = None,
        lookahead: int = 0,
        pin_boundary: bool = True,
    ) -> Admitted | None:
        """Start a request on the longest cached prefix of `tokens` and give the next `count` tokens slots.

        Default: all of them. The first `prompt_tokens` (default: all) are its prompt. `lookahead` asks for
        so many slots more, up to `max_tokens`. `pin_boundary`: under sparse retention keep findable what a
        later request needs to resume at the boundary. None, and nothing changed, if blocks are short.
        """
        ...

    def append(self, request: str, tokens: Sequence[int], lookahead: int = 0) -> bool:
        """Give the next tokens slots; first those of `admit` that have none yet, in order.

        Blocks that windows have passed are let go first, whatever follows. False, and no slot given, if
        the pool is short; the tokens are then remembered, to be appended again or lost with the request.
        """
        ...

    def free(self, request: str) -> None:
        """End a request (or preempt it: admit it again with all its tokens)."""
        ...

    def evict(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, wherever they are; who holds them keeps them."""
        ...

    def tables(self, request: str) -> tuple[tuple[int, ...], ...]:
        """The block ids of a request per group, 0 where a block was let go."""
        ...

    def keys(self, request: str, group: int) -> list[int]:
        """Keys of the request's full blocks with slots, in order, hashed or not."""
        ...

    def state(self) -> PoolState:
        """Every block's state."""
        ...

    def take_events(self) -> list[Stored | Removed]:
        """What became findable and unfindable since the last call, in order."""
        ...
