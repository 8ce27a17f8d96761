"""Policies on vLLM's blocks: what edits do to our ledger is carried out on vLLM's live manager, which must end
up with the same tables, reference counts, hashes, free order and events, and go on from there.

The ledger's whole test suite, its state machine over every edit included, also runs on vLLM's block pool:
`KVASSAY_POOL=vllm pytest tests/cache`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvassay.cache.ops import CopyBlock, GroupSpec
from kvassay.cache.protocol import Removed
from kvassay.cache.reclaim import count
from kvassay.errors import CacheError, IllegalEdit, PoolExhausted
from tests.cache.backends import NEEDS_VLLM, Contents, make

pytestmark = NEEDS_VLLM

FULL = GroupSpec(0, (0, 1), (2, 1), 4)
SLIDING = GroupSpec(1, (2,), (1,), 4, 6)
ALL = {0: 2, 1: 1}
"""KV heads by full layer."""


class Pair:
    """Our manager and vLLM's, kept in step."""

    def __init__(self, groups=(FULL,), num_blocks: int = 40) -> None:
        self.ours = make("ours", groups, num_blocks)
        self.theirs = make("vllm", groups, num_blocks)

    def both(self, call: str, *args, **options):
        mine, other = (getattr(manager, call)(*args, **options) for manager in (self.ours, self.theirs))
        assert mine == other
        return mine

    @property
    def ledger(self):
        return self.ours.ledger

    def edit(self, request: str, method: str, *args, **options):
        """An edit of our ledger, followed by vLLM's manager."""
        from kvassay.cache.vllm.edits import follow

        result = getattr(self.ledger, method)(self.ours.sequence(request), *args, **options)
        follow(self.ours, self.theirs, request)
        self.agree(request)
        return result

    def evict(self, request: str, positions, layers=(0, 1)) -> None:
        for layer in layers:
            self.edit(request, "evict_positions", layer, np.asarray(positions))

    def agree(self, *requests: str) -> None:
        for request in requests:
            self.both("tables", request)
        assert self.ours.state() == self.theirs.state()
        self.ledger.check()


def kept(tokens: int, gone, layers=(0, 1)) -> dict[int, np.ndarray]:
    keep = {layer: np.ones((heads, tokens), dtype=bool) for layer, heads in ALL.items()}
    for layer in layers:
        keep[layer][:, list(gone)] = False
    return keep


class TestReclaim:
    """18 tokens in 5 blocks; one block is 4 tokens x 3 (layer, head) slots."""

    def test_a_block_goes_only_when_every_head_of_every_layer_has_dropped_it(self) -> None:
        pair = Pair()
        pair.both("admit", "a", range(18))
        free = len(pair.theirs.state().free)
        pair.evict("a", range(4, 8), layers=[0])
        pair.edit("a", "reclaim")
        assert pair.theirs.tables("a") == ((1, 2, 3, 4, 5),)
        counted = count(kept(18, range(4, 8), layers=[0]), [FULL])
        assert [counted[mode].blocks for mode in ("whole_block", "per_layer_tables", "per_head_tables")] == [
            0,
            2 / 3,
            2 / 3,
        ]
        pair.evict("a", range(4, 8), layers=[1])
        assert pair.edit("a", "reclaim") == (1, 1)
        assert pair.theirs.tables("a") == ((1, 0, 3, 4, 5),)
        assert len(pair.theirs.state().free) - free == 1 == count(kept(18, range(4, 8)), [FULL])["whole_block"].blocks

    def test_a_shared_block_is_only_let_go(self) -> None:
        pair = Pair()
        pair.both("admit", "a", range(18))
        pair.both("admit", "b", [*range(16), 90, 91])
        free = len(pair.theirs.state().free)
        pair.evict("a", range(4, 8))
        assert pair.edit("a", "reclaim") == (1, 0)
        counted = count(kept(18, range(4, 8)), [FULL], shared_by=2, prefix_tokens=16)
        assert len(pair.theirs.state().free) - free == 0 == counted["whole_block"].blocks
        assert pair.theirs.tables("b") == ((1, 2, 3, 4, 6),)
        assert pair.theirs.state().refs[2] == 1
        pair.evict("b", range(4, 8))
        pair.edit("b", "reclaim")
        assert len(pair.theirs.state().free) - free == 1
        # It was never written, so it can still be found.
        assert pair.both("lookup", range(17)).tokens == 16

    def test_compaction_frees_the_tail_of_a_live_request_and_it_goes_on(self) -> None:
        pair = Pair()
        pair.both("admit", "a", range(18))
        gone = [1, 2, 6, 7, 8, 9, 13, 14]
        counted = count(kept(18, gone), [FULL])["compaction"]
        free = len(pair.theirs.state().free)
        pair.evict("a", gone)
        pair.edit("a", "compact", 0)
        assert pair.theirs.tables("a") == ((1, 2, 3),)
        assert len(pair.theirs.state().free) - free == counted.blocks == 2
        # 4 was let go as it was, so it can still be found; the three written ones cannot
        assert [i for i, hashed in enumerate(pair.theirs.state().hashed) if hashed] == [4]
        # ten slots are in use: two more tokens fit, the third takes a block
        pair.both("append", "a", [50, 51])
        assert pair.both("tables", "a") == ((1, 2, 3),)
        pair.both("append", "a", [52])
        assert pair.both("tables", "a") == ((1, 2, 3, 5),)
        pair.agree("a")

    def test_slot_reuse_takes_no_block(self) -> None:
        pair = Pair()
        pair.both("admit", "a", range(16))
        pair.evict("a", [5, 6])
        for victim, token in ((5, 70), (6, 71)):
            pair.edit("a", "reuse_slot", {0: victim}, token)
            assert pair.theirs.tables("a") == ((1, 2, 3, 4),)
        assert [pair.theirs.state().hashed[i] for i in (1, 2, 3, 4)] == [True, False, True, True]
        pair.both("append", "a", [72])
        assert pair.both("tables", "a") == ((1, 2, 3, 4, 5),)

    def test_vllm_cannot_hold_groups_of_different_lengths(self) -> None:
        pair = Pair([FULL, SLIDING])
        pair.both("admit", "a", range(18))
        pair.evict("a", range(4, 8))
        with pytest.raises(CacheError, match=r"groups use \[14, 18\] slots, vLLM keeps one length"):
            pair.edit("a", "compact", 0)


class TestWrites:
    def test_a_sole_owner_writes_in_place_and_the_hash_goes(self) -> None:
        pair = Pair()
        pair.both("admit", "a", range(18))
        pair.theirs.take_events()
        assert not pair.theirs.pool.is_block_writable(pair.theirs.pool.blocks[2])
        assert pair.edit("a", "begin_write", 0, np.array([4, 5])) == []
        assert pair.theirs.tables("a") == ((1, 2, 3, 4, 5),)
        assert pair.theirs.pool.is_block_writable(pair.theirs.pool.blocks[2])
        (event,) = pair.theirs.take_events()
        assert event == Removed(0, pair.theirs.keys("a", 0)[1])
        assert pair.both("lookup", range(17)).tokens == 4

    def test_a_shared_block_is_copied_and_stays_as_it_was(self) -> None:
        pair = Pair()
        pair.both("admit", "a", range(18))
        pair.both("admit", "b", [*range(16), 90, 91])
        pair.theirs.take_events()
        assert pair.edit("a", "begin_write", 1, np.array([9])) == [CopyBlock(0, 3, 7)]
        assert pair.theirs.tables("a") == ((1, 2, 7, 4, 5),)
        assert pair.theirs.tables("b") == ((1, 2, 3, 4, 6),)
        assert pair.theirs.pool.is_block_writable(pair.theirs.pool.blocks[7])
        assert not pair.theirs.pool.is_block_writable(pair.theirs.pool.blocks[3])
        assert pair.theirs.take_events() == []
        assert pair.both("lookup", range(17)).tokens == 16, "b still vouches for the content"

    def test_what_an_edited_request_fills_is_not_hashed(self) -> None:
        pair = Pair([FULL, SLIDING])
        pair.both("admit", "a", range(18))
        pair.edit("a", "begin_write", 0, np.array([17]))
        pair.theirs.take_events()
        pair.both("append", "a", range(18, 30))
        assert pair.theirs.take_events() == []
        pair.agree("a")


MALICIOUS = {
    "evict everything": (lambda p: p.evict("a", range(18)), "leaves none"),
    "evict what is not there yet": (lambda p: p.evict("a", [18]), "position 18 is uncommitted or unknown"),
    "evict twice": (lambda p: (p.evict("a", [3]), p.evict("a", [3])), "position 3"),
    "name a position twice": (lambda p: p.evict("a", [3, 3]), "named twice"),
    "name a negative position": (lambda p: p.evict("a", [-2]), "-2 is negative"),
    "write where nothing lives": (
        lambda p: (p.evict("a", [3]), p.edit("a", "begin_write", 0, np.array([3]))),
        "position 3",
    ),
    "edit behind a window": (lambda p: p.edit("a", "begin_write", 2, np.array([17])), "bounded by a window of 6"),
    "compact a window": (lambda p: p.edit("a", "compact", 1), "window of 6"),
    "give a live slot away": (lambda p: p.edit("a", "reuse_slot", {0: 3}, 5), "position 3 holds no dead slot"),
    "give another head's slot away": (
        lambda p: (p.evict("a", [3], layers=[0]), p.edit("a", "reuse_slot", {0: 3}, 5)),
        "layer 1 head 0: position 3 holds no dead slot",
    ),
    "encode without bytes": (lambda p: p.edit("a", "encode", 0, np.array([3]), 0, "int4"), "0 bytes"),
    "decode what another owns": (lambda p: p.edit("a", "decode", 0), "does not own segment 0"),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_policy_changes_nothing(name: str) -> None:
    call, message = MALICIOUS[name]
    pair = Pair([FULL, SLIDING])
    pair.both("admit", "a", range(18))
    pair.both("admit", "b", [*range(16), 90, 91])
    tables, state = pair.both("tables", "b"), pair.ours.state()
    with pytest.raises(IllegalEdit, match=message):
        call(pair)
    pair.agree("a", "b")
    assert pair.theirs.tables("b") == tables
    assert pair.ours.state() == state
    assert pair.both("append", "a", [18])


class Edited(RuleBasedStateMachine):
    """Requests that share prefixes and are edited at random, on both managers."""

    groups = (FULL,)

    @initialize(num_blocks=st.integers(14, 40))
    def start(self, num_blocks: int) -> None:
        self.pair = Pair(self.groups, num_blocks)
        self.contents = Contents(self.groups, removed_per_copy=False), Contents(self.groups, removed_per_copy=True)
        self.live: list[str] = []
        self.dead: dict[str, list[int]] = {}
        self.names = 0

    def pick(self, choice: int) -> str:
        return self.live[choice % len(self.live)]

    def attempt(self, request: str, method: str, *args) -> bool:
        """An edit; no other request's table may move, and what it may write must be writable in vLLM."""
        others = {name: self.pair.theirs.tables(name) for name in self.live if name != request}
        try:
            self.pair.edit(request, method, *args)
        except (IllegalEdit, PoolExhausted):
            return False
        assert others == {name: self.pair.theirs.tables(name) for name in others}
        return True

    @precondition(lambda self: len(self.live) < 5)
    @rule(family=st.integers(0, 1), shared=st.integers(1, 20), own=st.integers(0, 6))
    def admit(self, family: int, shared: int, own: int) -> None:
        self.names += 1
        name = f"r{self.names}"
        tokens = [family * 100 + i for i in range(shared)] + [1000 * self.names + i for i in range(own)]
        if self.pair.both("admit", name, tokens) is not None:
            self.live.append(name)
            self.dead[name] = []

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), n=st.integers(1, 6))
    def append(self, choice: int, n: int) -> None:
        name = self.pick(choice)
        self.names += 1
        if not self.pair.both("append", name, [1000 * self.names + i for i in range(n)]):
            self.finish(choice)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99))
    def finish(self, choice: int) -> None:
        name = self.pick(choice)
        self.pair.both("free", name)
        self.live.remove(name)

    def positions(self, name: str, seed: int, share: float) -> np.ndarray:
        """Some of the positions that live in a slot at every full layer and head, a run of them or scattered."""
        seq, rng = self.pair.ours.sequence(name), np.random.default_rng(seed)
        live = set(range(self.pair.ledger.length(seq)))
        for layer in ALL:
            view = self.pair.ledger.slots(seq, layer)
            live &= set.intersection(*(set(row.tolist()) for row in view.positions))
        chosen = [p for p in sorted(live) if rng.random() < share]
        if seed % 2 and chosen:
            chosen = [p for p in sorted(live) if chosen[0] <= p < chosen[0] + 9]
        return np.array(chosen, dtype=np.int32)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), seed=st.integers(0, 9999), share=st.sampled_from([0.2, 0.6]))
    def evict(self, choice: int, seed: int, share: float) -> None:
        name = self.pick(choice)
        gone = self.positions(name, seed, share)
        gone_from = [self.attempt(name, "evict_positions", layer, gone) for layer in ALL]
        if all(gone_from):
            self.dead[name] += gone.tolist()
        self.attempt(name, "reclaim")

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), seed=st.integers(0, 9999), layer=st.integers(0, 1))
    def write(self, choice: int, seed: int, layer: int) -> None:
        name = self.pick(choice)
        where = self.positions(name, seed, 0.3)
        if not self.attempt(name, "begin_write", layer, where):
            return
        view = self.pair.ledger.slots(self.pair.ours.sequence(name), layer)
        for block_id in np.unique(view.block_ids[np.isin(view.positions, where)]):
            assert self.pair.theirs.pool.is_block_writable(self.pair.theirs.pool.blocks[block_id])

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), seed=st.integers(0, 9999), layer=st.integers(0, 1))
    def encode_and_back(self, choice: int, seed: int, layer: int) -> None:
        name = self.pick(choice)
        self.attempt(name, "encode", layer, self.positions(name, seed, 0.3), 8, "int4")
        if seed % 3 == 0 and (owned := self.pair.ledger.segments(self.pair.ours.sequence(name), layer)):
            self.attempt(name, "decode", owned[0].id)

    @precondition(lambda self: self.live and len(self.groups) == 1)
    @rule(choice=st.integers(0, 99))
    def compact(self, choice: int) -> None:
        self.attempt(self.pick(choice), "compact", 0)

    @precondition(lambda self: len(self.groups) == 1 and any(self.dead[name] for name in self.live))
    @rule(choice=st.integers(0, 99))
    def reuse(self, choice: int) -> None:
        able = [name for name in self.live if self.dead[name]]
        name = able[choice % len(able)]
        self.names += 1
        self.attempt(name, "reuse_slot", {0: self.dead[name].pop()}, 1000 * self.names)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        pair.agree(*self.live)
        for name in self.live:
            seq = pair.ours.sequence(name)
            if pair.ledger.is_dense(seq):
                for manager, contents in zip((pair.ours, pair.theirs), self.contents, strict=True):
                    contents.learn(manager, name, pair.ledger.tokens(seq))
        mine, other = (
            Counter(contents.translate(manager.take_events()))
            for manager, contents in zip((pair.ours, pair.theirs), self.contents, strict=True)
        )
        assert mine == other


class EditedHybrid(Edited):
    groups = (FULL, SLIDING)


LONG = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestEdited = Edited.TestCase
TestEdited.settings = LONG
TestEditedHybrid = EditedHybrid.TestCase
TestEditedHybrid.settings = LONG
