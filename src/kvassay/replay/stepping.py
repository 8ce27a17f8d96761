"""Feeding a lane recorded rows without a model: for measurements of time, where what is said does not matter."""

from __future__ import annotations

import time
from functools import cached_property
from math import lcm

import torch
from torch import Tensor

from kvassay.policy.base import interval_of
from kvassay.policy.card import When
from kvassay.policy.queries import Queries
from kvassay.replay.engine import QUERY_EVIDENCE, Engine
from kvassay.replay.evidence import index_keys
from kvassay.replay.indexing import Asked
from kvassay.replay.lane import Lane
from kvassay.trace.reader import Trace

STEPS = 32
"""Tokens over which what a policy does at its steps is spread: two blocks of the usual size, in whole intervals."""
LIMIT = 0.5
"""Wall seconds after which one whole round of intervals and blocks is enough: then every step is slow, and alike."""


class Recorded:
    """Keys, values and queries of a trace's first branch, row after row and then from the start again."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.branch = trace, trace.branches[0]
        self.tokens = self.branch.tokens

    @cached_property
    def ids(self) -> list[int]:
        """Token ids."""
        return [int(token) for token in self.branch.token_ids]

    @cached_property
    def _rows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Per storing layer keys and values [1, kv_heads, tokens, dim]."""
        sides = (self.branch.k, self.branch.v)
        return {
            layer.index: tuple(side(layer.index).transpose(0, 1)[None].float() for side in sides)  # type: ignore[misc]
            for layer in self.trace.layout.storing
        }

    def query(self, layer: int, at: int) -> Tensor:
        """The query of step `at`, [q_heads, 1, k_dim]."""
        row = at % self.tokens
        return self.branch.q(layer)[row : row + 1].transpose(0, 1).float()

    @cached_property
    def _index(self) -> dict[int, Tensor]:
        """Per layer with an index of its own its keys [tokens, dim]."""
        return index_keys(self.branch)

    def asked(self, lane: Lane, layer: int, at: int) -> Asked | None:
        """What the index that selects for a layer is asked with at step `at`; None where nothing is selected."""
        selector, row = self.trace.layout.selector(layer), at % self.tokens
        if selector is None or selector.index_keys is None:
            return None
        rows, index = slice(row, row + 1), selector.index
        weights = self.branch.index_weights(index)[rows].float() if selector.index_keys.weighted else None
        return Asked(self.branch.index_queries(index)[rows].transpose(0, 1).float(), weights, lane.index[index])

    def append(self, lane: Lane, at: int, *, committed: bool = True) -> None:
        """Give the lane the token of step `at`, with its keys and values in every layer."""
        row = at % self.tokens
        lane.extend([self.ids[row]], committed=committed)
        for layer, (k, v) in self._rows.items():
            lane.cache.write(layer, [lane.seq], k[:, :, row : row + 1], v[:, :, row : row + 1])
        for layer, keys in self._index.items():
            lane.index[layer] = torch.cat([lane.index[layer], keys[row : row + 1]])


def policy_seconds(engine: Engine, lane: Lane, recorded: Recorded) -> float:
    """Wall seconds per decoded token that the lane's policy spends on its steps: observing, summarising, deciding and
    what the cache does to carry that out, as implemented here. Choosing what to read is not among it. The lane itself
    is left as it is.
    """
    if not (lane.stepwise or lane.policy.decides_at(When.ON_WRITE)):
        return 0.0
    fork, whole = lane.fork(), _whole(lane)
    before, start = fork.seconds, time.perf_counter()
    layout = engine.cache.layout
    taps = lane.policy.taps_in(len(layout.layers))
    hidden = {layer: torch.zeros(1, layout.hidden_size) for layer in taps}
    fed = 0
    while fed < STEPS or fed % whole:
        # Uncommitted until the engine settles it, as a drafted token would be: then the policy acts.
        recorded.append(fork, fed, committed=False)
        fork.hold([recorded.ids[fed % recorded.tokens]], hidden)
        _note_queries(fork, recorded, fed)
        engine.settle(fork, 1)
        fed += 1
        if fed % whole == 0 and time.perf_counter() - start > LIMIT:
            break
    seconds = (fork.seconds - before) / fed
    fork.free()
    return seconds


def _whole(lane: Lane) -> int:
    """Tokens after which everything that comes every n tokens or with a full block has come equally often."""
    period = interval_of(lane.policy) if lane.policy.decides_at(When.EVERY_N) else 1
    return lcm(period, max(group.block_size for group in lane.cache.ledger.groups))


def _note_queries(lane: Lane, recorded: Recorded, at: int) -> None:
    """Keep a step's queries as the engine does, for policies that declare them."""
    if not lane.policy.card.evidence & QUERY_EVIDENCE:
        return
    for layer in lane.scope:
        lane.note_queries(layer, Queries(recorded.query(layer, at), torch.tensor([lane.length - 1])))
