"""What a test sees of a replay under way: logits, lanes after every step; all laws proven, dead slots poisoned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvassay.cache.paged import PagedCache
from kvassay.measure.result import BranchResult
from kvassay.replay import closed
from kvassay.replay.arms import Arm
from kvassay.replay.closed import Replay
from kvassay.replay.engine import Engine
from kvassay.replay.lane import Lane
from kvassay.replay.protocol import Protocol
from tests.replay.worlds import World


class Watch:
    """Installed on the replay for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[tuple[str, int], Tensor] = {}
        """Teacher-forced logits [answer tokens, vocab] by arm's label and branch."""
        self.each: Callable[[Lane], None] = lambda lane: None
        """Called with every lane after every step."""
        self.compressed: dict[int, dict[int, tuple[Tensor, Tensor, Tensor]]] = {}
        """Contents of the dense context and of each compressed one, by sequence, when they were finished."""
        self.replay: Replay
        self.proving = True
        """Whether laws are checked and dead slots poisoned after every step."""
        self.steps = 0
        """Forward passes checked."""
        monkeypatch.setattr(closed, "PagedCache", partial(PagedCache, poison=True))
        monkeypatch.setattr(closed, "branch_result", self._results(closed.branch_result))
        monkeypatch.setattr(Engine, "forward", self._forward(Engine.forward))
        monkeypatch.setattr(Replay, "__init__", self._init(Replay.__init__))
        monkeypatch.setattr(Replay, "compressed", self._compressed(Replay.compressed))

    def run(self, world: World, arms: Sequence[Arm], free: int = 0, **more: Any) -> list[BranchResult]:
        """Replay the world's trace."""
        return closed.replay_trace(world.loaded, world.trace, arms, Protocol(free_tokens=free), **more)

    def _init(self, init: Any) -> Any:
        def wrapped(replay: Replay, *args: Any, **kwargs: Any) -> None:
            self.replay = replay
            init(replay, *args, **kwargs)
            self.compressed = {replay.dense: contents(replay.cache, replay.dense)}

        return wrapped

    def _compressed(self, compressed: Any) -> Any:
        def wrapped(replay: Replay, arm: Arm) -> Any:
            found = compressed(replay, arm)
            prove(replay.cache)
            self.compressed[found.lane.seq] = contents(replay.cache, found.lane.seq)
            return found

        return wrapped

    def _forward(self, forward: Any) -> Any:
        def wrapped(engine: Engine, lanes: Sequence[Lane], *args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = forward(engine, lanes, *args, **kwargs)
            if self.proving:
                prove(engine.cache)
            assert torch.isfinite(logits).all()
            self.steps += 1
            for lane in lanes:
                self.each(lane)
            return logits

        return wrapped

    def _results(self, result: Any) -> Any:
        def wrapped(tokenizer: Any, trace: Any, index: int, branch: Any, gold: Any, arm: Any, dense: Any) -> Any:
            self.logits[arm.lane.arm.label, index] = arm.logits
            return result(tokenizer, trace, index, branch, gold, arm, dense)

        return wrapped


def prove(cache: PagedCache) -> None:
    """Check every law, then fill each slot that no sequence reads with NaN: evicted must mean masked."""
    cache.check()
    ledger = cache.ledger
    for group in ledger.groups:
        owned = {block for seq in ledger.sequences() for block in ledger.table(seq, group.index) if block}
        if not owned:
            continue
        blocks = np.array(sorted(owned))
        for layer in group.layers:
            dead = torch.ones(cache.store.keys(layer).shape[:3], dtype=torch.bool)
            for seq in ledger.sequences():
                view = ledger.slots(seq, layer)
                head, column = np.nonzero(view.positions >= 0)
                dead[view.block_ids[head, column], head, view.offsets[head, column]] = False
            unowned = torch.ones(dead.shape[0], dtype=torch.bool)
            unowned[blocks] = False
            dead[unowned] = False
            cache.store.keys(layer)[dead] = torch.nan
            cache.store.values(layer)[dead] = torch.nan


def contents(cache: PagedCache, seq: int) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Positions, keys and values of every layer, copied."""
    found = {}
    for layer in sorted(layer for group in cache.ledger.groups for layer in group.layers):
        data = cache.layer(seq, layer)
        found[layer] = data.positions.clone(), data.k.clone(), data.v.clone()
    return found


def same(a: Mapping[int, tuple[Tensor, ...]], b: Mapping[int, tuple[Tensor, ...]]) -> bool:
    """Bit-identical."""
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for layer in a for x, y in zip(a[layer], b[layer], strict=True)
    )
