"""The laws of the ledger, recomputed from the tables alone rather than from any running count."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvassay.cache.pool import NULL_BLOCK
from kvassay.cache.prefix import block_key, extend_chain
from kvassay.cache.sequence import NULL_REF, SequenceState, Table
from kvassay.errors import LedgerCorrupt

if TYPE_CHECKING:
    from kvassay.cache.tables import Tables


def check_ledger(ledger: Tables) -> None:
    """Raise `LedgerCorrupt`, with the numbers, at the first law found broken."""
    ledger.pool.check()
    _check_owners(ledger)
    for seq, s in ledger._sequences.items():
        for table in s.tables:
            where = f"sequence {seq} group {table.group.index}"
            _check_table(ledger, s, table, where)
            _check_hashes(ledger, s, table, where)
            for layer in table.group.layers:
                _check_addresses(ledger, s, table, layer, f"{where} layer {layer}")


def _check_owners(ledger: Tables) -> None:
    tables = [table for s in ledger._sequences.values() for table in s.tables]
    owners = Counter(ref.id for table in tables for ref in table.blocks if ref.id != NULL_BLOCK)
    groups: dict[int, set[int]] = {}
    for table in tables:
        for ref in table.blocks:
            groups.setdefault(ref.id, set()).add(table.group.index)
    for block_id in range(1, ledger.pool.num_blocks):
        if ledger.pool.ref(block_id) != owners[block_id]:
            raise LedgerCorrupt(
                f"block {block_id} has reference count {ledger.pool.ref(block_id)}, {owners[block_id]} tables hold it"
            )
        if len(groups.get(block_id, ())) > 1:
            raise LedgerCorrupt(f"block {block_id} is held by groups {sorted(groups[block_id])}")
    readers = Counter(segment for s in ledger._sequences.values() for segment in s.segment_ids)
    counted = {segment.id: segment.owners for segment in ledger._segments.all()}
    if readers != Counter(counted):
        raise LedgerCorrupt(f"segment owners {counted}, sequences that hold them {dict(readers)}")


def _check_table(ledger: Tables, s: SequenceState, table: Table, where: str) -> None:
    length, size = len(s.tokens), table.group.block_size
    if not 0 <= s.committed <= length or not s.uncommitted <= table.slots <= length:
        raise LedgerCorrupt(f"{where}: {s.committed} committed of {length} tokens in {table.slots} slots")
    if table.group.window is not None and table.slots != length:
        raise LedgerCorrupt(f"{where}: a windowed group has {table.slots} slots for {length} tokens")
    if len(table.blocks) != table.filled + table.reserved or NULL_REF in table.blocks[table.filled :]:
        raise LedgerCorrupt(f"{where}: {len(table.blocks)} blocks of {size} for {table.slots} slots")
    for ref in table.blocks:
        if ref != NULL_REF and ledger.pool.generation(ref.id) != ref.generation:
            now = ledger.pool.generation(ref.id)
            raise LedgerCorrupt(f"{where}: block {ref.id} held in generation {ref.generation}, it is in {now}")
    if table.expired * size > s.window_low(table, s.committed):
        raise LedgerCorrupt(f"{where}: {table.expired} blocks of {size} expired, position {s.committed} sees them")
    held = table.held()
    if len(set(held)) != len(held):
        raise LedgerCorrupt(f"{where}: a block is in the table twice: {held[::-1]}")


def _check_hashes(ledger: Tables, s: SequenceState, table: Table, where: str) -> None:
    """A hashed block holds, at its ordinal, exactly the tokens its hash names."""
    size, chain = table.group.block_size, list[bytes]()
    extend_chain(chain, s.tokens, len(s.tokens), size, s.salt)
    for ordinal, ref in enumerate(table.blocks):
        found = ledger.pool.hash_of(ref.id)
        full = (ordinal + 1) * size <= min(len(s.tokens), table.slots)
        if found is not None and full and found != block_key(chain[ordinal], table.group.index):
            raise LedgerCorrupt(f"{where}: block {ref.id} at {ordinal} has the hash of other content")


def _check_addresses(ledger: Tables, s: SequenceState, table: Table, layer: int, where: str) -> None:
    """Every live position is in exactly one slot of a held block, or in one segment."""
    if (layer_map := table.maps.get(layer)) and layer_map.n > s.committed_slots(table):
        raise LedgerCorrupt(f"{where}: {layer_map.n} slots mapped, {s.committed_slots(table)} committed")
    low = s.first_visible(table)
    mapped = layer_map.entries if layer_map else np.empty((table.group.heads(layer), 0), dtype=np.int32)
    rule = np.arange(mapped.shape[1], table.slots) + len(s.tokens) - table.slots
    segments = [(ledger._segments.get(segment), mask) for segment, mask in s.masks(layer).items()]
    null = np.array([ref == NULL_REF for ref in table.blocks], dtype=np.bool_)
    for head, row in enumerate(mapped):
        entries = np.concatenate((row, rule))
        named = entries[entries != np.iinfo(np.int32).min]
        positions = np.where(named < 0, ~named, named)
        encoded = [segment.positions[head][mask[head]] for segment, mask in segments]
        live = np.concatenate((entries[entries >= low], *encoded))
        for kind, found in (("slots", positions), ("live", live)):
            if len(np.unique(found)) != len(found):
                raise LedgerCorrupt(f"{where} head {head}: a position has two places among {kind} {np.sort(found)}")
            if found.size and not 0 <= found.min() <= found.max() < len(s.tokens):
                raise LedgerCorrupt(f"{where} head {head}: positions {np.sort(found)} of {len(s.tokens)} tokens")
        slots = np.flatnonzero(entries >= low)
        for slot in slots[null[slots // table.group.block_size]]:
            raise LedgerCorrupt(f"{where} head {head}: position {entries[slot]} lives in slot {slot}, a null block")
        if len(s.tokens) and live.size == 0 and table.group.window is None:
            raise LedgerCorrupt(f"{where} head {head}: nothing is left to read of {len(s.tokens)} tokens")
