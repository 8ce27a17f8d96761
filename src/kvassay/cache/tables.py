"""The life of sequences: tokens, block tables, prefix hits, copy on write, forks, speculation.

Only bookkeeping: no K or V here. Whatever a store must copy comes back as ops, to be run at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvassay.cache.ops import Bools, CopyBlock, Created, GroupSpec, Op
from kvassay.cache.pool import NULL_BLOCK, BlockPool, exhausted
from kvassay.cache.prefix import Hit, alignment, block_key, extend_chain, longest_hit, worth_hashing
from kvassay.cache.protocol import Pool
from kvassay.cache.segments import Segments
from kvassay.cache.sequence import NULL_REF, BlockRef, SequenceState, Table
from kvassay.errors import CacheError, IllegalEdit


class Tables:
    """Sequences over one block pool, for one or more KV cache groups.

    Tables only grow at the end or become null in place, as vLLM's. Calls that need blocks take all of
    them or raise `PoolExhausted` and change nothing.
    """

    def __init__(
        self,
        groups: Iterable[GroupSpec],
        num_blocks: int,
        caching: bool = True,
        *,
        retention_interval: int | None = None,
        pool: Pool | None = None,
    ) -> None:
        """`retention_interval` is vLLM's `prefix_cache_retention_interval` (`worth_hashing` says what it keeps);
        `pool` replaces the block pool, which then has `num_blocks` blocks.
        """
        self.groups = tuple(groups)
        layers = [layer for group in self.groups for layer in group.layers]
        if [group.index for group in self.groups] != list(range(len(self.groups))) or not self.groups:
            raise CacheError(f"groups must be numbered 0.., not {[group.index for group in self.groups]}")
        if len(set(layers)) != len(layers):
            raise CacheError(f"a layer belongs to one group only: {sorted(layers)}")
        self.pool: Pool = BlockPool(num_blocks, caching) if pool is None else pool
        self.step = alignment(self.groups)
        if retention_interval is not None and (retention_interval < 0 or retention_interval % self.step):
            raise CacheError(f"retention_interval is {retention_interval}, must be a multiple of {self.step} tokens")
        self.retention_interval = retention_interval
        self._segments = Segments()
        self._group_of = {layer: group.index for group in self.groups for layer in group.layers}
        self._sequences: dict[int, SequenceState] = {}
        self._next_sequence = 0

    # -- what a sequence is --------------------------------------------------------------------------

    def sequences(self) -> tuple[int, ...]:
        """Ids of the live sequences, oldest first."""
        return tuple(self._sequences)

    def tokens(self, seq: int) -> tuple[int, ...]:
        """All tokens of a sequence, the uncommitted ones included."""
        return tuple(self._sequence(seq).tokens)

    def length(self, seq: int) -> int:
        """Number of tokens; the next one gets this position."""
        return len(self._sequence(seq).tokens)

    def uncommitted(self, seq: int) -> int:
        """Number of speculative tokens at the end."""
        return self._sequence(seq).uncommitted

    def is_dense(self, seq: int) -> bool:
        """Whether nothing was evicted or written: only such a sequence hashes the blocks it fills."""
        return self._sequence(seq).dense

    def table(self, seq: int, group: int) -> tuple[int, ...]:
        """The block ids of a sequence in a group, 0 where a block was let go."""
        return tuple(ref.id for ref in self._table(self._sequence(seq), group).blocks)

    def chain(self, seq: int, group: int) -> tuple[bytes, ...]:
        """Chained hashes of a sequence's committed full blocks, while it hashes at all."""
        return tuple(self._sequence(seq).chains[self.groups[group].block_size])

    def used_slots(self, seq: int, group: int) -> int:
        """Slots in use in a group's table; fewer than tokens after slot reuse or compaction."""
        return self._table(self._sequence(seq), group).slots

    # -- life ----------------------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int], salt: bytes = b"") -> Hit:
        """The longest cached prefix of `token_ids`, at most all but the last token; takes no reference."""
        return self._find(token_ids, salt)[0]

    def create(
        self, token_ids: Sequence[int], salt: bytes = b"", *, prompt_tokens: int | None = None, hit: Hit | None = None
    ) -> Created:
        """A new sequence holding the longest cached prefix of `token_ids`, at most all but the last token.

        Append the rest with `append(seq, token_ids[cached_tokens:])`. Sequences with different `salt`
        never share. Of `token_ids` the first `prompt_tokens` are the prompt (default: all), which sparse
        retention keeps resumable; `hit` is what `lookup` said, if nothing changed since.
        """
        tokens = [int(token) for token in token_ids]
        found, chains = self._find(tokens, salt, hit)
        self.pool.acquire(block_id for ids in found.blocks for block_id in ids if block_id != NULL_BLOCK)
        tables = [
            Table(
                group,
                [self._reference(block_id) for block_id in ids],
                found.tokens,
                hashed=len(ids),
                expired=ids.count(NULL_BLOCK),
            )
            for group, ids in zip(self.groups, found.blocks, strict=True)
        ]
        for block_size, chain in chains.items():
            del chain[found.tokens // block_size :]
        prompt = len(tokens) if prompt_tokens is None else prompt_tokens
        boundaries = (prompt - 1, found.boundary)
        s = SequenceState(tokens[: found.tokens], found.tokens, tables, salt, chains, boundaries)
        return Created(self._add(s), found.tokens)

    def append(self, seq: int, token_ids: Sequence[int], committed: bool = True, lookahead: int = 0) -> list[Op]:
        """Give the next tokens a slot in every group; returns the copies to make before writing there.

        Windowed groups first let go of blocks that no later query sees. `committed=False` appends
        speculative tokens, to be settled by `commit` and `rollback` before committed ones may follow.
        `lookahead` reserves blocks for so many tokens more; they stay in the tables until tokens fill them.
        """
        s = self._edit(seq)
        if committed and s.uncommitted:
            raise IllegalEdit(f"sequence {seq} has {s.uncommitted} uncommitted tokens: settle them first")
        if not len(token_ids):
            return []
        ops = self._grow(s, s.tables, len(token_ids), lookahead=lookahead)
        s.tokens.extend(int(token) for token in token_ids)
        if committed:
            self._commit(s, len(token_ids))
        return ops

    def expire(self, seq: int) -> None:
        """Let go of the blocks that windows have passed, as the next `append` would do first."""
        s = self._edit(seq)
        for table in s.tables:
            self._expire(s, table, self._leaving_window(s, table))

    def commit(self, seq: int, n: int) -> None:
        """Accept the first `n` uncommitted tokens; only now may their blocks be hashed."""
        s = self._edit(seq)
        self._check_uncommitted(seq, s, n)
        self._commit(s, n)

    def rollback(self, seq: int, n: int) -> None:
        """Forget the last `n` uncommitted tokens; their positions will be given again."""
        s = self._edit(seq)
        self._check_uncommitted(seq, s, n)
        if n == 0:
            return
        del s.tokens[-n:]
        for table in s.tables:
            table.slots -= n
            self.pool.release([ref.id for ref in reversed(table.blocks[table.filled :])])
            del table.blocks[table.filled :]
            table.reserved = 0

    def fork(self, seq: int) -> int:
        """A second sequence with the same content, by reference counts alone."""
        s = self._sequence(seq)
        tables = [table.fork() for table in s.tables]
        for table in tables:
            self.pool.acquire(table.held())
        self._segments.acquire(s.segment_ids)
        chains = {block_size: list(chain) for block_size, chain in s.chains.items()}
        segments = {layer: dict(masks) for layer, masks in s.segments.items()}
        fork = SequenceState(list(s.tokens), s.committed, tables, s.salt, chains, s.boundaries, s.dense, segments)
        return self._add(fork)

    def free(self, seq: int) -> None:
        """End a sequence; its hashed blocks stay findable until they are reused."""
        s = self._edit(seq)
        for table in s.tables:
            self.pool.release(table.held())
        self._segments.release(s.segment_ids)
        del self._sequences[seq]

    def diverge(self, seq: int) -> None:
        """Say that later K/V no longer follow from the tokens alone (selective reads, say): hash no more."""
        self._edit(seq).dense = False

    # -- shared machinery ----------------------------------------------------------------------------

    def _find(self, tokens: Sequence[int], salt: bytes, hit: Hit | None = None) -> tuple[Hit, dict[int, list[bytes]]]:
        """The cached prefix (`hit` if already known) and the chains of `tokens`, by block size."""
        chains: dict[int, list[bytes]] = {group.block_size: [] for group in self.groups}
        if not self.pool.caching:
            return Hit(0, [[] for _ in self.groups], 0), chains
        limit = max(len(tokens) - 1, 0) if hit is None else hit.tokens
        for block_size, chain in chains.items():
            extend_chain(chain, tokens, limit, block_size, salt)
        sizes = [group.block_size for group in self.groups]

        def find(group: int, ordinal: int) -> int | None:
            return self.pool.lookup(block_key(chains[sizes[group]][ordinal], group))

        return longest_hit(self.groups, limit, find) if hit is None else hit, chains

    def _grow(self, s: SequenceState, tables: Sequence[Table], n: int, extra: int = 0, lookahead: int = 0) -> list[Op]:
        """Make room for `n` more tokens in `tables`, with `extra` further blocks known to be free."""
        windowed = [(table, self._leaving_window(s, table)) for table in s.tables if table.group.window is not None]
        soon = sum(self.pool.ref(ref.id) == 1 for _, refs in windowed for ref in refs)
        fresh = [self._fresh(table, n + lookahead) for table in tables]
        copies = sum(self._last_is_shared(table) for table in tables)
        self._require(extra + copies + sum(fresh), soon)
        for table, leaving in windowed:
            self._expire(s, table, leaving)
        ops: list[Op] = []
        for table, need in zip(tables, fresh, strict=True):
            if table.slots % table.group.block_size:
                ops += self._make_writable(table, table.filled - 1)
            if need:
                table.blocks += self._allocate(need)
            table.slots += n
            table.reserved = len(table.blocks) - table.filled
        return ops

    def _fresh(self, table: Table, n: int) -> int:
        """Blocks to take for `n` more slots."""
        return max(-(-(table.slots + n) // table.group.block_size) - len(table.blocks), 0)

    def _last_is_shared(self, table: Table) -> bool:
        partial = table.slots % table.group.block_size != 0
        return partial and self.pool.ref(table.blocks[table.filled - 1].id) > 1

    def _leaving_window(self, s: SequenceState, table: Table) -> list[BlockRef]:
        """Blocks no committed or later query sees, tail first; judged by committed tokens, as those stay."""
        last = s.window_low(table, s.committed) // table.group.block_size
        if last <= table.expired:
            return []
        return [ref for ref in reversed(table.blocks[table.expired : last]) if ref != NULL_REF]

    def _expire(self, s: SequenceState, table: Table, leaving: list[BlockRef]) -> None:
        low = s.window_low(table, s.committed)
        last = low // table.group.block_size
        if last > table.expired:
            table.blocks[table.expired : last] = [NULL_REF] * (last - table.expired)
            table.expired = last
            self.pool.release(ref.id for ref in leaving)
        for layer in table.group.layers if low and s.segments else ():
            for segment, mask in list(s.masks(layer).items()):
                self._keep_in_segment(s, segment, mask & (self._segments.get(segment).positions >= low))

    def _keep_in_segment(self, s: SequenceState, segment: int, alive: Bools) -> None:
        """Narrow a sequence's mask of a segment; with nothing left to read the sequence lets go of it."""
        masks = s.segments.setdefault(self._segments.get(segment).layer, {})
        if alive.any():
            alive.setflags(write=False)
            masks[segment] = alive
        else:
            del masks[segment]
            self._segments.release([segment])

    def _make_writable(self, table: Table, ordinal: int) -> list[Op]:
        """Copy on write: a shared block is replaced by a copy, a sole owner's loses its hash."""
        old = table.blocks[ordinal]
        if self.pool.ref(old.id) == 1:
            self.pool.drop_hash(old.id)
            return []
        (new,) = table.blocks[ordinal : ordinal + 1] = self._allocate(1)
        self.pool.release([old.id])
        return [CopyBlock(table.group.index, old.id, new.id)]

    def _allocate(self, n: int) -> list[BlockRef]:
        return [self._reference(block_id) for block_id in self.pool.allocate(n)]

    def _reference(self, block_id: int) -> BlockRef:
        return BlockRef(block_id, self.pool.generation(block_id)) if block_id != NULL_BLOCK else NULL_REF

    def _require(self, need: int, soon: int = 0) -> None:
        free = self.pool.num_free + soon
        if need > free:
            raise exhausted(need, free, self.pool.num_blocks)

    def _shared(self, table: Table, ordinals: Iterable[int]) -> int:
        return sum(self.pool.ref(table.blocks[i].id) > 1 for i in ordinals)

    def _commit(self, s: SequenceState, n: int) -> None:
        s.committed += n
        if not (self.pool.caching and s.dense):
            return
        for block_size, chain in s.chains.items():
            extend_chain(chain, s.tokens, s.committed, block_size, s.salt)
        findable = s.committed // self.step * self.step
        if findable <= s.committed - n:
            return
        for table in s.tables:
            chain, full = s.chains[table.group.block_size], findable // table.group.block_size
            todo = range(table.hashed, full)
            for ordinal in worth_hashing(table.group, todo, self.step, self.retention_interval, s.boundaries):
                block_id = table.blocks[ordinal].id
                if block_id != NULL_BLOCK and self.pool.hash_of(block_id) is None:
                    self.pool.set_hash(block_id, block_key(chain[ordinal], table.group.index))
            table.hashed = max(table.hashed, full)

    def _check_uncommitted(self, seq: int, s: SequenceState, n: int) -> None:
        if not 0 <= n <= s.uncommitted:
            raise IllegalEdit(f"sequence {seq} has {s.uncommitted} uncommitted tokens, not {n}")

    def _add(self, s: SequenceState) -> int:
        seq = self._next_sequence
        self._next_sequence += 1
        self._sequences[seq] = s
        return seq

    def _sequence(self, seq: int) -> SequenceState:
        if seq not in self._sequences:
            raise CacheError(f"no live sequence {seq}: {len(self._sequences)} live, next id {self._next_sequence}")
        return self._sequences[seq]

    def _edit(self, seq: int) -> SequenceState:
        """The sequence, its cached views dropped: for every call that may change it."""
        s = self._sequence(seq)
        s.slot_views.clear()
        s.segment_views.clear()
        return s

    def _table(self, s: SequenceState, group: int) -> Table:
        if not 0 <= group < len(s.tables):
            raise CacheError(f"no group {group}: there are 0..{len(s.tables) - 1}")
        return s.tables[group]

    def _layer_table(self, s: SequenceState, layer: int) -> Table:
        if layer not in self._group_of:
            raise CacheError(f"no group holds layer {layer}: known are {sorted(self._group_of)}")
        return s.tables[self._group_of[layer]]
