"""What a policy did to our ledger, carried out on vLLM's live manager.

vLLM has tables per group, one length per request, and three things it can do to a table: null a block,
replace a block by a copy, and end. That is enough for `reclaim`, for writes with copy on write, and, where
every group lost the same number of slots, for `slot_reuse` and `compaction`. Tables per layer or per head
it has not: what they would free is counted in `cache.reclaim`.
"""

from __future__ import annotations

from kvassay.cache.manager import PagedManager
from kvassay.cache.vllm.manager import VllmManager
from kvassay.errors import CacheError


def follow(ours: PagedManager, theirs: VllmManager, request: str) -> None:
    """Bring vLLM's tables of a request to where an edit brought ours, by vLLM's own means.

    Call it after each edit of the request, before anything else. New blocks are taken from vLLM's pool
    (and must be those ours took), blocks let go are freed to it, and blocks that ours no longer finds by
    hash lose theirs. From the first edit on, what the request fills is not hashed.

    Raises:
        CacheError: the edit left groups with different numbers of slots, or the pools had drifted apart.
    """
    r, seq = theirs.known(request), ours.sequence(request)
    slots = {ours.ledger.used_slots(seq, group.index) for group in ours.groups}
    if len(slots) > 1:
        raise CacheError(f"request '{request}': groups use {sorted(slots)} slots, vLLM keeps one length for all")
    for group, wanted in enumerate(ours.tables(request)):
        _follow_group(theirs, request, group, wanted)
    hashed = ours.state().hashed
    theirs.evict([block_id for table in ours.tables(request) for block_id in table if not hashed[block_id]])
    if new := ours.ledger.tokens(seq)[r.num_tokens :]:
        r.append_output_token_ids(list(new))
    r.num_computed_tokens = slots.pop()
    theirs.given[request] = ours.ledger.length(seq)
    if not ours.ledger.is_dense(seq):
        theirs.diverged.add(request)


def _follow_group(theirs: VllmManager, request: str, group: int, wanted: tuple[int, ...]) -> None:
    pool = theirs.pool
    table = theirs.manager.coordinator.single_type_managers[group].req_to_blocks[request]
    held = {block.block_id for block in table}
    missing = [block_id for block_id in wanted if block_id not in held and block_id]
    taken = [block.block_id for block in pool.get_new_blocks(len(missing))]
    if taken != missing:
        raise CacheError(f"request '{request}' group {group}: ours took blocks {missing}, vLLM's pool gave {taken}")
    gone = [block for block in reversed(table) if not block.is_null and block.block_id not in wanted]
    table[:] = [pool.blocks[block_id] if block_id else pool.null_block for block_id in wanted]
    pool.free_blocks(gone)
