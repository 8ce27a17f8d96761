"""Our ledger behind the contract that vLLM's manager serves too: requests by name, admission, growth.

Only what a scheduler decides on is added to `Ledger` here: a request is admitted whole or not at all, and
a failed `append` has still let go of what windows have passed, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import GroupSpec
from kvassay.cache.pool import NULL_BLOCK, BlockStored
from kvassay.cache.prefix import Hit
from kvassay.cache.protocol import Admitted, PoolState, Removed, Stored
from kvassay.errors import CacheError, PoolExhausted

KEY_BITS = 64


@dataclass
class _Request:
    seq: int
    pending: list[int]
    """Tokens known that the sequence does not hold yet."""


class PagedManager:
    """`Manager` over our own `Ledger`; `ledger` and `sequence` are there for edits."""

    def __init__(
        self,
        groups: Iterable[GroupSpec],
        num_blocks: int,
        max_tokens: int,
        *,
        caching: bool = True,
        retention_interval: int | None = None,
    ) -> None:
        self.ledger = Ledger(groups, num_blocks, caching, retention_interval=retention_interval)
        self.groups = self.ledger.groups
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self._requests: dict[str, _Request] = {}

    def sequence(self, request: str) -> int:
        """The ledger's sequence of a request."""
        return self._known(request).seq

    def lookup(self, tokens: Sequence[int]) -> Hit:
        """See `Manager.lookup`."""
        return self.ledger.lookup(tokens)

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
        """See `Manager.admit`."""
        if request in self._requests:
            raise CacheError(f"request '{request}' is already admitted")
        check_length(request, len(tokens), self.max_tokens)
        hit = self.ledger.lookup(tokens)
        count = check_count(request, count, len(tokens) - hit.tokens)
        end = hit.tokens + count
        lookahead = min(lookahead, self.max_tokens - end)
        if self._blocks_to_admit(hit, end + lookahead) > self.ledger.pool.num_free:
            return None
        pinned = hit if pin_boundary else hit._replace(boundary=0)
        seq, cached = self.ledger.create(tokens, prompt_tokens=prompt_tokens, hit=pinned)
        self.ledger.append(seq, tokens[cached:end], lookahead=lookahead)
        self._requests[request] = _Request(seq, [int(token) for token in tokens[end:]])
        return Admitted(cached, hit.boundary)

    def append(self, request: str, tokens: Sequence[int], lookahead: int = 0) -> bool:
        """See `Manager.append`."""
        r = self._known(request)
        length = self.ledger.length(r.seq)
        new = unknown_tokens(request, r.pending, tokens)
        check_length(request, length + len(r.pending) + len(new), self.max_tokens)
        r.pending += new
        try:
            self.ledger.append(r.seq, tokens, lookahead=min(lookahead, self.max_tokens - length - len(tokens)))
        except PoolExhausted:
            self.ledger.expire(r.seq)
            return False
        del r.pending[: len(tokens)]
        return True

    def free(self, request: str) -> None:
        """See `Manager.free`."""
        self.ledger.free(self._known(request).seq)
        del self._requests[request]

    def evict(self, block_ids: Iterable[int]) -> None:
        """See `Manager.evict`."""
        for block_id in block_ids:
            self.ledger.pool.drop_hash(block_id)

    def tables(self, request: str) -> tuple[tuple[int, ...], ...]:
        """See `Manager.tables`."""
        seq = self._known(request).seq
        return tuple(self.ledger.table(seq, group.index) for group in self.groups)

    def keys(self, request: str, group: int) -> list[int]:
        """See `Manager.keys`."""
        return [key64(chain_hash) for chain_hash in self.ledger.chain(self._known(request).seq, group)]

    def state(self) -> PoolState:
        """See `Manager.state`."""
        pool = self.ledger.pool
        ids = range(self.num_blocks)
        hashed = tuple(pool.hash_of(i) is not None for i in ids)
        return PoolState(tuple(map(pool.ref, ids)), hashed, tuple(pool.free_order()))

    def take_events(self) -> list[Stored | Removed]:
        """See `Manager.take_events`."""
        pool = self.ledger.pool
        taken: list[Stored | Removed] = []
        for event in pool.events:
            chain_hash, group = event.hash[:-4], int.from_bytes(event.hash[-4:], "big")
            taken.append((Stored if isinstance(event, BlockStored) else Removed)(group, key64(chain_hash)))
        pool.events.clear()
        return taken

    def check(self) -> None:
        """Verify every law of the ledger."""
        self.ledger.check()

    def _blocks_to_admit(self, hit: Hit, end: int) -> int:
        """Free blocks that a request needs for `end` slots: new ones, and cached ones that nobody holds."""
        held = [block_id for ids in hit.blocks for block_id in ids if block_id != NULL_BLOCK]
        revived = sum(self.ledger.pool.ref(block_id) == 0 for block_id in held)
        return revived + sum(
            max(-(-end // group.block_size) - len(ids), 0) for group, ids in zip(self.groups, hit.blocks, strict=True)
        )

    def _known(self, request: str) -> _Request:
        if request not in self._requests:
            raise CacheError(f"no request '{request}': {len(self._requests)} admitted")
        return self._requests[request]


def key64(chain_hash: bytes) -> int:
    """The low 64 bits of a hash, big endian: how vLLM's events name it."""
    return int.from_bytes(chain_hash, "big") & ((1 << KEY_BITS) - 1)


def check_length(request: str, tokens: int, max_tokens: int) -> None:
    """`CacheError` if a request is empty or longer than the cache is meant for."""
    if not 0 < tokens <= max_tokens:
        raise CacheError(f"request '{request}' has {tokens} tokens, 1..{max_tokens} are allowed")


def check_count(request: str, count: int | None, uncached: int) -> int:
    """The number of tokens to give slots at admission, `uncached` by default."""
    if count is None:
        return uncached
    if not 0 < count <= uncached:
        raise CacheError(f"request '{request}': {count} tokens to compute, {uncached} are not cached")
    return count


def unknown_tokens(request: str, pending: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Those of `tokens` that come after the `pending` ones, which they must begin with."""
    known = min(len(pending), len(tokens))
    if not len(tokens) or list(tokens[:known]) != list(pending[:known]):
        raise CacheError(
            f"request '{request}': append its {len(pending)} known tokens first, in order; {len(tokens)} given"
        )
    return [int(token) for token in tokens[known:]]
