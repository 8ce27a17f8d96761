"""vLLM's `KVCacheManager` as a `Manager`: the real thing, driven as its scheduler drives it.

What the scheduler does between calls is done here: it looks up a hit, pins the shared-prefix boundary,
allocates, and advances `num_computed_tokens`. A request that was refused keeps its tokens and no blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvassay.cache.manager import KEY_BITS, check_count, check_length, key64, unknown_tokens
from kvassay.cache.ops import GroupSpec
from kvassay.cache.prefix import Hit
from kvassay.cache.protocol import Admitted, PoolState, Removed, Stored
from kvassay.cache.vllm.api import api, call
from kvassay.cache.vllm.specs import block_sizes, cache_config, layout_groups
from kvassay.errors import CacheError
from kvassay.layout.model import Layout


class VllmManager:
    """`Manager` over vLLM's; `manager` is its `KVCacheManager`, `requests` its `Request`s by name.

    `latents` are the indices of groups that hold MLA latents.
    """

    def __init__(
        self,
        groups: Iterable[GroupSpec],
        num_blocks: int,
        max_tokens: int,
        *,
        caching: bool = True,
        retention_interval: int | None = None,
        latents: frozenset[int] = frozenset(),
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        scheduler_block, self._hash_block = block_sizes(self.groups)
        self.manager = call(
            api().KVCacheManager,
            kv_cache_config=cache_config(self.groups, latents, num_blocks, retention_interval),
            max_model_len=max_tokens,
            scheduler_block_size=scheduler_block,
            hash_block_size=self._hash_block,
            enable_caching=caching,
            enable_kv_cache_events=True,
        )
        self.requests: dict[str, Any] = {}
        self.given: dict[str, int] = {}
        """Tokens of each request that were given a slot; vLLM's `num_computed_tokens` unless edits moved slots."""
        self.diverged: set[str] = set()
        """Requests whose K/V no longer follow from their tokens: what they fill is not hashed."""
        self._hasher = api().block_hasher(self._hash_block)
        self._partial: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, layout: Layout, num_blocks: int, max_tokens: int, block_size: int = 16) -> VllmManager:
        """A manager with the groups of a layout, latent ones included."""
        groups, latents = layout_groups(layout, block_size)
        return cls(groups, num_blocks, max_tokens, latents=latents)

    @property
    def pool(self) -> Any:
        """vLLM's `BlockPool`."""
        return self.manager.block_pool

    def lookup(self, tokens: Sequence[int]) -> Hit:
        """See `Manager.lookup`."""
        blocks, tokens_hit, boundary = self._computed(self._request("lookup", tokens, len(tokens)))
        ids = [[block.block_id for block in group] for group in blocks.blocks]
        return Hit(tokens_hit, ids, boundary)

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
        if request in self.requests:
            raise CacheError(f"request '{request}' is already admitted")
        check_length(request, len(tokens), self.max_tokens)
        r = self._request(request, tokens, len(tokens) if prompt_tokens is None else prompt_tokens)
        blocks, cached, boundary = self._computed(r)
        r.shared_prefix_boundary = boundary if pin_boundary else 0
        count = check_count(request, count, len(tokens) - cached)
        if not self._allocate(r, count, lookahead, num_new_computed_tokens=cached, new_computed_blocks=blocks):
            self.manager.free(r)
            return None
        r.num_computed_tokens = self.given[request] = cached + count
        self.requests[request] = r
        return Admitted(cached, boundary)

    def append(self, request: str, tokens: Sequence[int], lookahead: int = 0) -> bool:
        """See `Manager.append`."""
        r = self.known(request)
        new = unknown_tokens(request, r.all_token_ids[self.given[request] :], tokens)
        check_length(request, r.num_tokens + len(new), self.max_tokens)
        if new:
            r.append_output_token_ids(new)
        if not self._allocate(r, len(tokens), lookahead):
            return False
        r.num_computed_tokens += len(tokens)
        self.given[request] += len(tokens)
        return True

    def free(self, request: str) -> None:
        """See `Manager.free`."""
        self.manager.free(self.known(request))
        del self.requests[request], self.given[request]
        self.diverged.discard(request)

    def evict(self, block_ids: Iterable[int]) -> None:
        """See `Manager.evict`."""
        for block_id in block_ids:
            self.manager.evict_blocks({block_id})

    def tables(self, request: str) -> tuple[tuple[int, ...], ...]:
        """See `Manager.tables`."""
        return tuple(map(tuple, self.manager.get_block_ids(self.known(request).request_id)))

    def keys(self, request: str, group: int) -> list[int]:
        """See `Manager.keys`."""
        r, step = self.known(request), self.groups[group].block_size // self._hash_block
        full = r.num_computed_tokens // self.groups[group].block_size
        return [key64(r.block_hashes[(i + 1) * step - 1]) for i in range(full)]

    def state(self) -> PoolState:
        """See `Manager.state`."""
        blocks = self.pool.blocks
        refs = tuple(0 if block.is_null else block.ref_cnt for block in blocks)
        hashed = tuple(block.block_hash is not None for block in blocks)
        free = self.pool.free_block_queue.get_all_free_blocks()
        return PoolState(refs, hashed, tuple(block.block_id for block in free))

    def take_events(self) -> list[Stored | Removed]:
        """See `Manager.take_events`. Left out: keys of prompt tails inside a block, which no lookup here asks for."""
        taken: list[Stored | Removed] = []
        for event in self.manager.take_events():
            group = event.group_idx or 0
            keys = [(group, _key(block_hash)) for block_hash in event.block_hashes]
            if isinstance(event, api().BlockStored) and event.block_size != self.groups[group].block_size:
                self._partial.update(keys)
            elif isinstance(event, api().BlockStored):
                taken += [Stored(*key) for key in keys]
            elif isinstance(event, api().BlockRemoved):
                taken += [Removed(*key) for key in keys if key not in self._partial]
        return taken

    def _request(self, request: str, tokens: Sequence[int], prompt_tokens: int) -> Any:
        tokens = [int(token) for token in tokens]
        r = call(
            api().Request,
            request_id=request,
            prompt_token_ids=tokens[:prompt_tokens],
            sampling_params=api().SamplingParams(max_tokens=self.max_tokens),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        if tokens[prompt_tokens:]:
            r.append_output_token_ids(tokens[prompt_tokens:])
        return r

    def _computed(self, r: Any) -> tuple[Any, int, int]:
        """The cached blocks, their tokens, and the boundary where this version knows of one."""
        blocks, tokens, *boundary = self.manager.get_computed_blocks(r)
        return blocks, tokens, boundary[0] if boundary else 0

    def _allocate(self, r: Any, count: int, lookahead: int, **hit: Any) -> bool:
        blocks = call(
            self.manager.allocate_slots,
            request=r,
            num_new_tokens=count,
            num_lookahead_tokens=lookahead,
            delay_cache_blocks=r.request_id in self.diverged,
            **hit,
        )
        return blocks is not None

    def known(self, request: str) -> Any:
        """vLLM's `Request` of that name."""
        if request not in self.requests:
            raise CacheError(f"no request '{request}': {len(self.requests)} admitted")
        return self.requests[request]


def _key(block_hash: int | bytes) -> int:
    """An event's hash in 64 bits, in whichever form vLLM was told to give it."""
    return block_hash & ((1 << KEY_BITS) - 1) if isinstance(block_hash, int) else key64(block_hash)
