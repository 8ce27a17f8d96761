"""The ledger's laws under any sequence of calls, against a store of fingerprints.

The store does what the ops say and nothing else; a cell holds a fingerprint of what was written there:
(layer, head, position, all tokens so far) for content that follows from the tokens alone, and
(layer, head, position, stamp) for what an edited sequence or an edit wrote. After every step each sequence must
read at each live position exactly what was written for it, each findable block must hold the content
that its hash promises, and everything nobody may read is poisoned.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvassay.cache.ledger import Ledger
from kvassay.cache.ops import CopyBlock, GroupSpec
from kvassay.errors import IllegalEdit, PoolExhausted

POISON = -1
WINDOW = 6
MAX_SEQUENCES = 5
SAME_SIZE = (GroupSpec(0, (0, 2), (2, 1), 4), GroupSpec(1, (1,), (2,), 4, WINDOW))
TWO_SIZES = (GroupSpec(0, (0, 2), (2, 1), 2), GroupSpec(1, (1,), (2,), 4, WINDOW))


class Store:
    """Fingerprints by layer, block, offset and head; executes ops in order."""

    def __init__(self, groups, num_blocks: int) -> None:
        self.groups = groups
        self.cells = {
            layer: np.full((num_blocks, group.block_size, group.heads(layer)), POISON)
            for group in groups
            for layer in group.layers
        }
        self.segments: dict[int, list[dict[int, int]]] = {}

    def run(self, ops) -> None:
        for op in ops:
            if isinstance(op, CopyBlock):
                for layer in self.groups[op.group].layers:
                    self.cells[layer][op.dst] = self.cells[layer][op.src]
            else:
                flat = self.cells[op.layer].reshape(-1, self.cells[op.layer].shape[2])
                flat[op.dst, op.head] = flat[op.src, op.head].copy()


@dataclass
class Expected:
    """What one sequence must read: fingerprints by layer, head and position."""

    tokens: list[int]
    committed: int
    salt: bytes
    content: dict[int, list[dict[int, int]]]
    dense: bool = True

    def copy(self) -> Expected:
        content = {layer: [dict(head) for head in heads] for layer, heads in self.content.items()}
        return Expected(list(self.tokens), self.committed, self.salt, content, self.dense)


class LedgerMachine(RuleBasedStateMachine):
    groups = SAME_SIZE

    @initialize(num_blocks=st.integers(12, 40))
    def start(self, num_blocks: int) -> None:
        self.ledger = Ledger(self.groups, num_blocks)
        self.store = Store(self.groups, num_blocks)
        self.expected: dict[int, Expected] = {}
        self.prints: dict[tuple, int] = {}
        self.stamps = count()
        self.known_hashes: dict[bytes, tuple[int, bytes, tuple[int, ...]]] = {}
        self.layers = {layer: group for group in self.groups for layer in group.layers}

    # -- helpers -------------------------------------------------------------------------------------

    def pick(self, choice: int) -> int:
        return list(self.expected)[choice % len(self.expected)]

    def fingerprint(self, seq: int, layer: int, head: int, position: int) -> int:
        e = self.expected[seq]
        if e.dense:
            return self.dense_print(e.salt, layer, head, e.tokens[: position + 1])
        return self.prints.setdefault((layer, head, position, "stamp", next(self.stamps)), len(self.prints))

    def dense_print(self, salt: bytes, layer: int, head: int, tokens) -> int:
        key = (layer, head, len(tokens) - 1, salt, tuple(tokens))
        return self.prints.setdefault(key, len(self.prints))

    def snapshot(self):
        pool = self.ledger.pool
        state = [pool.free_order(), [pool.ref(i) for i in range(pool.num_blocks)], pool.counts(), list(pool.events)]
        for seq in self.ledger.sequences():
            tables = [self.ledger.table(seq, group.index) for group in self.groups]
            live = [[head.tolist() for head in self.ledger.live(seq, layer)] for layer in self.layers]
            segments = [
                (view.id, view.alive.tolist()) for layer in self.layers for view in self.ledger.segments(seq, layer)
            ]
            counts = self.ledger.uncommitted(seq), self.ledger.is_dense(seq)
            state.append((seq, self.ledger.tokens(seq), counts, tables, live, segments))
        return state

    def attempt(self, method, *args, **options):
        """The call's result, or None if it was refused, and then nothing at all may have changed."""
        before = self.snapshot()
        try:
            return method(*args, **options)
        except (PoolExhausted, IllegalEdit) as error:
            assert any(char.isdigit() for char in str(error)), error
            assert self.snapshot() == before
            return None

    def write(self, seq: int, layer: int, positions: list[list[int]]) -> None:
        """Write fresh content where the ledger says that these live positions are."""
        view = self.ledger.slots(seq, layer, queries=len(self.expected[seq].tokens))
        content, cells = self.expected[seq].content[layer], self.store.cells[layer]
        for head, wanted in enumerate(positions):
            column_of = {position: column for column, position in enumerate(view.positions[head].tolist())}
            for position in wanted:
                at = view.block_ids[head, column_of[position]], view.offsets[head, column_of[position]], head
                cells[at] = content[head][position] = self.fingerprint(seq, layer, head, position)

    def write_new(self, seq: int, first: int) -> None:
        new = list(range(first, len(self.expected[seq].tokens)))
        for layer, group in self.layers.items():
            self.write(seq, layer, [new] * group.heads(layer))

    def learn_hashes(self) -> None:
        for seq, e in self.expected.items():
            for group in self.groups:
                for i, block_id in enumerate(self.ledger.table(seq, group.index)):
                    end = (i + 1) * group.block_size
                    found = self.ledger.pool.hash_of(block_id)
                    if found is not None and end <= e.committed:
                        meaning = (group.index, e.salt, tuple(e.tokens[:end]))
                        assert self.known_hashes.setdefault(found, meaning) == meaning

    def append_tokens(self, seq: int, tokens: list[int], committed: bool, lookahead: int = 0) -> bool:
        e, first = self.expected[seq], len(self.expected[seq].tokens)
        ops = self.attempt(self.ledger.append, seq, tokens, committed, lookahead)
        if ops is None:
            return False
        self.store.run(ops)
        e.tokens += tokens
        e.committed += len(tokens) * committed
        self.write_new(seq, first)
        self.check_chunk_window(seq, first)
        self.learn_hashes()
        return True

    def read(self, seq: int, layer: int, queries: int = 1) -> list[dict[int, int]]:
        """Per head, what is found at each live position, in slots and in segments."""
        view = self.ledger.slots(seq, layer, queries)
        cells, heads = self.store.cells[layer], []
        for head, n in enumerate(view.counts):
            positions = view.positions[head].tolist()
            assert positions[n:] == [-1] * (len(positions) - n)
            assert positions[:n] == sorted(set(positions[:n]))
            assert 0 not in view.block_ids[head, :n]
            found = cells[view.block_ids[head, :n], view.offsets[head, :n], head]
            heads.append(dict(zip(positions, found.tolist(), strict=False)))
        if view.uniform:
            assert (view.slots == view.slots[0]).all()
        if view.is_identity:
            assert view.uniform and (np.diff(view.logical[0]) == 1).all()
        for segment in self.ledger.segments(seq, layer, queries):
            for head, column in zip(*np.nonzero(segment.alive), strict=True):
                position = int(segment.positions[head, column])
                assert position not in heads[head]
                heads[head][position] = self.store.segments[segment.id][head][position]
        assert [sorted(head) for head in heads] == [head.tolist() for head in self.ledger.live(seq, layer, queries)]
        return heads

    def check_chunk_window(self, seq: int, first: int) -> None:
        """The new tokens, as queries, find the whole window of the first of them."""
        e = self.expected[seq]
        for layer, group in self.layers.items():
            low = 0 if group.window is None else max(0, first - group.window + 1)
            want = [{p: value for p, value in head.items() if p >= low} for head in e.content[layer]]
            assert self.read(seq, layer, queries=len(e.tokens) - first) == want

    def some_positions(self, seq: int, layer: int, seed: int, share: float) -> list[list[int]]:
        """Per head a random part of what is live, uncommitted tokens included now and then."""
        rng = np.random.default_rng(seed)
        return [[p for p in head.tolist() if rng.random() < share] for head in self.ledger.live(seq, layer)]

    # -- life ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.expected) < MAX_SEQUENCES)
    @rule(
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, 2), max_size=5),
        salt=st.sampled_from([b"", b"", b"s"]),
        split=st.integers(1, 30),
    )
    def create(self, shared: int, own: list[int], salt: bytes, split: int) -> None:
        tokens = [i % 5 for i in range(shared)] + own or [7]
        seq, cached = self.ledger.create(tokens, salt)
        assert 0 <= cached < len(tokens)
        e = Expected(tokens[:cached], cached, salt, {})
        self.expected[seq] = e
        for layer, group in self.layers.items():
            e.content[layer] = [
                {p: self.dense_print(salt, layer, head, tokens[: p + 1]) for p in range(cached)}
                for head in range(group.heads(layer))
            ]
        for part in (tokens[cached : cached + split], tokens[cached + split :]):
            if part and not self.append_tokens(seq, part, committed=True):
                self.ledger.free(seq)
                del self.expected[seq]
                return

    @precondition(lambda self: self.expected)
    @rule(
        choice=st.integers(0, 99),
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=7),
        lookahead=st.sampled_from([0, 0, 0, 3, 9]),
    )
    def append(self, choice: int, tokens: list[int], lookahead: int) -> None:
        seq = self.pick(choice)
        appended = self.append_tokens(seq, tokens, True, lookahead)
        assert not (appended and self.ledger.uncommitted(seq))

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=7))
    def speculate(self, choice: int, tokens: list[int]) -> None:
        self.append_tokens(self.pick(choice), tokens, committed=False)

    @precondition(lambda self: any(len(e.tokens) > e.committed for e in self.expected.values()))
    @rule(choice=st.integers(0, 99), accept=st.sampled_from([0, 0, 1, 3, 7]), reject=st.integers(1, 7))
    def settle(self, choice: int, accept: int, reject: int) -> None:
        pending = [seq for seq, e in self.expected.items() if len(e.tokens) > e.committed]
        seq = pending[choice % len(pending)]
        e = self.expected[seq]
        accept = min(accept, len(e.tokens) - e.committed)
        self.ledger.commit(seq, accept)
        e.committed += accept
        self.learn_hashes()
        reject = min(reject, len(e.tokens) - e.committed)
        self.ledger.rollback(seq, reject)
        del e.tokens[len(e.tokens) - reject :]
        for heads in e.content.values():
            for head in heads:
                for position in [p for p in head if p >= len(e.tokens)]:
                    del head[position]

    @precondition(lambda self: 0 < len(self.expected) < MAX_SEQUENCES)
    @rule(choice=st.integers(0, 99))
    def fork(self, choice: int) -> None:
        seq, free = self.pick(choice), self.ledger.pool.num_free
        child = self.ledger.fork(seq)
        assert self.ledger.pool.num_free == free
        self.expected[child] = self.expected[seq].copy()

    @precondition(lambda self: len(self.expected) > 1)
    @rule(choice=st.integers(0, 99))
    def free(self, choice: int) -> None:
        seq = self.pick(choice)
        self.ledger.free(seq)
        del self.expected[seq]

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99))
    def diverge(self, choice: int) -> None:
        seq = self.pick(choice)
        self.ledger.diverge(seq)
        self.expected[seq].dense = False

    # -- edits ---------------------------------------------------------------------------------------

    def forget(self, seq: int, layer: int, positions: list[list[int]]) -> None:
        e = self.expected[seq]
        assert all(p < e.committed for head in positions for p in head), "uncommitted tokens were evicted"
        for content, gone in zip(e.content[layer], positions, strict=True):
            for position in gone:
                del content[position]
        e.dense = e.dense and not any(positions)

    @precondition(lambda self: self.expected)
    @rule(
        choice=st.integers(0, 99),
        layer=st.sampled_from([0, 1, 2]),
        seed=st.integers(0, 9999),
        share=st.sampled_from([0.2, 0.7, 0.95]),
    )
    def evict_by_mask(self, choice: int, layer: int, seed: int, share: float) -> None:
        seq = self.pick(choice)
        view = self.ledger.slots(seq, layer)
        dead = (np.random.default_rng(seed).random(view.positions.shape) < share) & (view.positions >= 0)
        gone = [view.positions[head][dead[head]].tolist() for head in range(len(dead))]
        if self.attempt(self.ledger.evict, seq, layer, dead, allow_window=True) is not None:
            self.forget(seq, layer, gone)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99), layer=st.sampled_from([0, 1, 2]), seed=st.integers(0, 9999))
    def evict_anywhere(self, choice: int, layer: int, seed: int) -> None:
        seq = self.pick(choice)
        gone = self.some_positions(seq, layer, seed, 0.4)
        if self.attempt(self.ledger.evict_positions, seq, layer, gone, allow_window=True) is not None:
            self.forget(seq, layer, gone)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99), start=st.integers(0, 24), length=st.integers(1, 12), spare=st.booleans())
    def evict_range_and_reclaim(self, choice: int, start: int, length: int, spare: bool) -> None:
        """The same range at every layer and head of the full group, or, with `spare`, all but one head."""
        seq = self.pick(choice)
        for layer in self.groups[0].layers:
            heads = [[p for p in head.tolist() if start <= p < start + length] for head in self.ledger.live(seq, layer)]
            if spare and layer == 2:
                heads[-1] = []
            if self.attempt(self.ledger.evict_positions, seq, layer, heads) is not None:
                self.forget(seq, layer, heads)
        self.reclaim(choice)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99))
    def reclaim(self, choice: int) -> None:
        """Exactly the full blocks in which no slot of any layer and head is live go, counted from the views."""
        seq = self.pick(choice)
        e, dead = self.expected[seq], []
        for group in self.groups:
            table = self.ledger.table(seq, group.index)
            full = (self.ledger.used_slots(seq, group.index) - len(e.tokens) + e.committed) // group.block_size
            held = {i for i in range(full) if table[i]}
            for layer in group.layers:
                logical = self.ledger.slots(seq, layer, queries=max(len(e.tokens), 1)).logical
                held -= set((logical[logical >= 0] // group.block_size).tolist())
            dead += [(group.index, table[i]) for i in held]
        alone = sum(self.ledger.pool.ref(block_id) == 1 for _, block_id in dead)
        assert self.ledger.reclaim(seq) == (len(dead), alone)
        for group, block_id in dead:
            assert block_id not in self.ledger.table(seq, group)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99), layer=st.sampled_from([0, 1, 2]), seed=st.integers(0, 9999))
    def write_in_place(self, choice: int, layer: int, seed: int) -> None:
        seq = self.pick(choice)
        targets = self.some_positions(seq, layer, seed, 0.3)
        ops = self.attempt(self.ledger.begin_write, seq, layer, targets, allow_window=True)
        if ops is None:
            return
        self.store.run(ops)
        self.expected[seq].dense = self.expected[seq].dense and not any(targets)
        self.write(seq, layer, targets)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99), seed=st.integers(0, 9999), token=st.integers(0, 2), same=st.booleans())
    def replace(self, choice: int, seed: int, token: int, same: bool) -> None:
        """Evict one token (of each head its own, unless `same`) and give its slot to the next."""
        seq, rng = self.pick(choice), np.random.default_rng(seed)
        e, victims = self.expected[seq], dict[int, list[int]]()
        common = int(rng.integers(max(len(e.tokens), 1)))
        for layer in self.groups[0].layers:
            heads = [head.tolist() for head in self.ledger.live(seq, layer)]
            if any(len(head) < 2 for head in heads):
                return
            victims[layer] = [common if same else int(rng.choice(head)) for head in heads]
            gone = [[v] if v in head else [] for v, head in zip(victims[layer], heads, strict=True)]
            if self.attempt(self.ledger.evict_positions, seq, layer, gone) is None:
                return
            self.forget(seq, layer, gone)
        first = len(e.tokens)
        ops = self.attempt(self.ledger.reuse_slot, seq, {0: common if same else victims}, token)
        if ops is not None:
            self.store.run(ops)
            e.tokens.append(token)
            e.committed += 1
            self.write_new(seq, first)
            self.check_chunk_window(seq, first)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99))
    def compact(self, choice: int) -> None:
        seq = self.pick(choice)
        ops = self.attempt(self.ledger.compact, seq, 0)
        if ops is not None:
            self.store.run(ops)
            widest = max(int(self.ledger.slots(seq, layer).counts.max()) for layer in self.groups[0].layers)
            assert self.ledger.used_slots(seq, 0) == widest

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 99), layer=st.sampled_from([0, 1, 2]), seed=st.integers(0, 9999))
    def encode(self, choice: int, layer: int, seed: int) -> None:
        seq = self.pick(choice)
        e, chosen = self.expected[seq], self.some_positions(seq, layer, seed, 0.4)
        segment = self.attempt(self.ledger.encode, seq, layer, chosen, 8, "test", allow_window=True)
        if segment is None:
            return
        e.dense = False
        self.store.segments[segment] = [
            {p: self.fingerprint(seq, layer, head, p) for p in positions} for head, positions in enumerate(chosen)
        ]
        for head, written in enumerate(self.store.segments[segment]):
            assert all(p < e.committed for p in written), "uncommitted tokens were encoded"
            e.content[layer][head].update(written)

    @rule(choice=st.integers(0, 99))
    def decode(self, choice: int) -> None:
        owned = [
            (seq, layer, view)
            for seq in self.expected
            for layer in self.layers
            for view in self.ledger.segments(seq, layer, queries=max(len(self.expected[seq].tokens), 1))
        ]
        if not owned:
            return
        seq, layer, view = owned[choice % len(owned)]
        ops = self.attempt(self.ledger.decode, seq, view.id, allow_window=True)
        if ops is not None:
            self.store.run(ops)
            self.write(seq, layer, [row[alive].tolist() for row, alive in zip(view.positions, view.alive, strict=True)])

    # -- the laws ------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        if self.expected:
            self.ledger.check()
            counts = self.ledger.pool.counts()
            assert counts.null + counts.free_clean + counts.free_cached + counts.referenced == counts.total

    @invariant()
    def everyone_reads_what_was_written(self) -> None:
        for seq, e in self.expected.items():
            assert self.ledger.tokens(seq) == tuple(e.tokens)
            assert self.ledger.is_dense(seq) == e.dense
            for layer, group in self.layers.items():
                found = self.read(seq, layer)
                if group.window is None:
                    assert found == e.content[layer]
                    continue
                # The position that only the last token sees may be gone before the next one is appended.
                low = max(0, len(e.tokens) - group.window)
                for have, content in zip(found, e.content[layer], strict=True):
                    want = {p: value for p, value in content.items() if p >= low}
                    have.setdefault(low, want.get(low, POISON)) if low in want else None
                    assert have == want

    @invariant()
    def findable_blocks_hold_what_their_hash_promises(self) -> None:
        if not self.expected:
            return
        pool = self.ledger.pool
        for block_id in range(1, pool.num_blocks):
            if (found := pool.hash_of(block_id)) is None:
                continue
            index, salt, tokens = self.known_hashes[found]
            group = self.groups[index]
            for offset in range(group.block_size):
                upto = tokens[: len(tokens) - group.block_size + offset + 1]
                for layer in group.layers:
                    for head in range(group.heads(layer)):
                        want = self.dense_print(salt, layer, head, upto)
                        assert self.store.cells[layer][block_id, offset, head] == want

    @invariant()
    def poison_what_nobody_may_read(self) -> None:
        """Evicted is not zeroed: a slot that nobody may read turns to poison here, and is never read."""
        if not hasattr(self, "ledger"):
            return
        pool = self.ledger.pool
        for layer in self.layers:
            cells = self.store.cells[layer]
            readable = np.zeros(cells.shape, dtype=bool)
            readable[[i for i in range(pool.num_blocks) if pool.hash_of(i) is not None]] = True
            for seq, e in self.expected.items():
                view = self.ledger.slots(seq, layer, queries=len(e.tokens) - e.committed + 1)
                for head, n in enumerate(view.counts):
                    readable[view.block_ids[head, :n], view.offsets[head, :n], head] = True
            cells[~readable] = POISON


class TwoBlockSizes(LedgerMachine):
    groups = TWO_SIZES


FAST = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestOneBlockSize = LedgerMachine.TestCase
TestOneBlockSize.settings = FAST
TestTwoBlockSizes = TwoBlockSizes.TestCase
TestTwoBlockSizes.settings = FAST


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [LedgerMachine, TwoBlockSizes])
def test_long_runs(machine: type[RuleBasedStateMachine]) -> None:
    long = settings(FAST, max_examples=400, stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(machine, settings=long)
