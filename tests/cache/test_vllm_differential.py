"""Our manager and vLLM's, driven with the same operations, must agree after every step on everything visible:
block tables, reference counts, hashed blocks, the order of free blocks, hits, and events by content.

Block ids are compared as they are: both hand out the same ones. `KVASSAY_STEPS` sets the number of steps
(10,000 unless set), `KVASSAY_SEED` the seed, which is printed. The known differences are in
`docs/vllm-differences.md` and tested in `test_vllm_differences.py`.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvassay.cache.ops import GroupSpec
from tests.cache.backends import NEEDS_VLLM, Contents, make

pytestmark = NEEDS_VLLM

STEPS = int(os.environ.get("KVASSAY_STEPS", "10000"))
SEED = int(os.environ.get("KVASSAY_SEED", str(random.SystemRandom().randrange(2**32))))
STEPS_PER_EXAMPLE = 50
MAX_TOKENS = 60
MAX_REQUESTS = 6


def group(index: int, block_size: int = 4, window: int | None = None) -> GroupSpec:
    return GroupSpec(index, (index,), (1,), block_size, window)


# name: groups, retention interval, groups with latents
VARIANTS = {
    "full": ((group(0),), None, frozenset()),
    "latent": ((group(0),), None, frozenset({0})),
    "sliding": ((group(0, window=7),), None, frozenset()),
    "full and sliding": ((group(0), group(1, window=6)), None, frozenset()),
    "two windows": ((group(0, window=6), group(1), group(2, window=14), group(3, window=6)), None, frozenset()),
    "two windows, sparse": ((group(0, window=6), group(1), group(2, window=14)), 0, frozenset()),
    "every 8 tokens": ((group(0), group(1, window=4)), 8, frozenset()),
    "two block sizes": ((group(0, 8), group(1, 4, 6), group(2, 4, 11)), None, frozenset()),
    "two block sizes, sparse": ((group(0, 8), group(1, 2, 5)), 0, frozenset()),
}


class Request:
    def __init__(self, tokens: list[int], computed: int) -> None:
        self.tokens, self.prompt, self.computed = tokens, len(tokens), computed

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.computed :]


class Differential(RuleBasedStateMachine):
    steps = short = hits = 0

    @initialize(variant=st.sampled_from(sorted(VARIANTS)), num_blocks=st.integers(8, 60))
    def start(self, variant: str, num_blocks: int) -> None:
        from kvassay.cache.vllm.api import api, takes

        groups, interval, latents = VARIANTS[variant]
        self.sparse = takes(api().KVCacheConfig, "prefix_cache_retention_interval")  # with it came the boundary
        if not self.sparse:
            interval = None
        self.groups = groups
        self.ours = make("ours", groups, num_blocks, MAX_TOKENS, retention_interval=interval)
        self.theirs = make("vllm", groups, num_blocks, MAX_TOKENS, retention_interval=interval, latents=latents)
        self.contents = Contents(groups, removed_per_copy=False), Contents(groups, removed_per_copy=True)
        self.requests: dict[str, Request] = {}
        self.names = 0
        self.fresh = 1000

    def both(self, call, *args, **options):
        """The same call on both; they must answer the same."""
        mine, other = (getattr(manager, call)(*args, **options) for manager in (self.ours, self.theirs))
        if not self.sparse and hasattr(mine, "boundary"):
            mine = mine._replace(boundary=other.boundary)
        assert mine == other, f"{call}{args}{options}: ours {mine}, vLLM {other}"
        return mine

    def pick(self, choice: int) -> str:
        return list(self.requests)[choice % len(self.requests)]

    def unique(self, n: int) -> list[int]:
        self.fresh += n
        return list(range(self.fresh - n, self.fresh))

    def prompt(self, family: int, shared: int, own: int) -> list[int]:
        """`shared` tokens that every prompt of the family begins with, and `own` of this one alone."""
        return ([family * 100 + i for i in range(shared)] + self.unique(own))[: MAX_TOKENS - 10]

    def admit(self, name: str, tokens: list[int], prompt: int, part: float, lookahead: int) -> bool:
        hit = self.both("lookup", tokens)
        Differential.hits += hit.tokens > 0
        uncached = len(tokens) - hit.tokens
        count = max(1, round(uncached * part))
        admitted = self.both("admit", name, tokens, count, prompt_tokens=prompt, lookahead=lookahead)
        if admitted is None:
            Differential.short += 1
            return False
        self.requests[name] = Request(tokens, admitted.cached_tokens + count)
        self.requests[name].prompt = prompt
        return True

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 45),
        own=st.integers(0, 12),
        part=st.sampled_from([0.2, 0.5, 1, 1]),
        lookahead=st.sampled_from([0, 0, 3, 9]),
    )
    def new_request(self, family: int, shared: int, own: int, part: float, lookahead: int) -> None:
        tokens = self.prompt(family, shared, max(own, shared == 0))
        self.names += 1
        self.admit(f"r{self.names}", tokens, len(tokens), part, lookahead)

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 5), n=st.integers(1, 9), lookahead=st.sampled_from([0, 0, 1, 4, 30]))
    def grow(self, choice: int, n: int, lookahead: int) -> None:
        """The next chunk of a prompt, or new tokens of which the last could be accepted drafts."""
        name = self.pick(choice)
        request = self.requests[name]
        tokens = request.pending[:n]
        if not tokens:
            tokens = self.unique(min(n, MAX_TOKENS - len(request.tokens)))
            if not tokens:
                return
            request.tokens += tokens
        if self.both("append", name, tokens, lookahead):
            request.computed += len(tokens)
        else:
            Differential.short += 1

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 5))
    def finish(self, choice: int) -> None:
        name = self.pick(choice)
        self.both("free", name)
        del self.requests[name]

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 5), part=st.sampled_from([0.5, 1]))
    def preempt(self, choice: int, part: float) -> None:
        """Free, then admit again with every token known."""
        name = self.pick(choice)
        request = self.requests.pop(name)
        self.both("free", name)
        self.admit(name, request.tokens, request.prompt, part, 0)

    @rule(at=st.integers(1, 59))
    def evict(self, at: int) -> None:
        block_id = 1 + at % (self.ours.num_blocks - 1)
        one_size = len({group.block_size for group in self.groups}) == 1
        # With several block sizes vLLM hashes a held block's prompt tail anew (docs/vllm-differences.md).
        if one_size or self.ours.state().refs[block_id] == 0:
            self.both("evict", [block_id])

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "ours"):
            return
        Differential.steps += 1
        for name, request in self.requests.items():
            self.both("tables", name)
            for manager, contents in zip((self.ours, self.theirs), self.contents, strict=True):
                contents.learn(manager, name, request.tokens)
        assert self.ours.state() == self.theirs.state()
        mine, other = (
            contents.translate(manager.take_events())
            for manager, contents in zip((self.ours, self.theirs), self.contents, strict=True)
        )
        assert mine == other
        self.ours.check()


@pytest.mark.timeout(3600)
def test_ours_and_vllms_manager_agree_at_every_step() -> None:
    print(f"seed {SEED}: KVASSAY_SEED={SEED} KVASSAY_STEPS={STEPS} repeats this")
    Differential.steps = Differential.short = Differential.hits = 0
    run_state_machine_as_test(
        seed(SEED)(Differential),
        settings=settings(
            max_examples=STEPS // STEPS_PER_EXAMPLE * 5 // 4 + 1,  # some are shorter
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(
        f"{Differential.steps} steps: {Differential.hits} admissions with a hit, {Differential.short} short of blocks"
    )
    assert Differential.steps >= STEPS
    assert Differential.short > STEPS / 100 and Differential.hits > STEPS / 100
