"""Why SnapKV at a half answers worse than random: in how many (layer, KV head) pairs a token of an answer survives.

    python studies/01/surprises.py runs/study-01-exact

Random drops half of the tokens of every head, another half in each, so nearly every token is left somewhere. SnapKV's
heads agree: what the last queries of the context do not look at is dropped by all of them, and no question has been
asked yet.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from kvassay.policy.budget import Budget, Protection
from kvassay.policy.registry import make
from kvassay.record.load import load
from kvassay.replay.arms import Arm
from kvassay.replay.closed import Replay
from kvassay.replay.lane import Lane
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace

PROTECTION = Protection(4, 32)
NAMES = ("random", "snapkv", "hindsight")
RARE = 0.1


def answers_in(trace: Trace) -> list[int]:
    """Positions in the context of the tokens that answer its questions."""
    context, found = trace.prefix.token_ids.tolist(), set[int]()
    for branch in trace.branches:
        answer = branch.token_ids.tolist()[branch.question_tokens :]
        starts = [at for at in range(len(context)) if context[at : at + 4] == answer[:4]]
        found |= {at + i for at in starts for i in range(len(answer)) if at + i < len(context)}
    return sorted(found)


def survival(lane: Lane, tokens: int) -> Tensor:
    """Share of (layer, KV head) pairs that still hold each token: [tokens]."""
    rows = [row for layer in sorted(lane.scope) for row in lane.cache.layer(lane.seq, layer).positions]
    return torch.stack([torch.zeros(tokens).index_fill_(0, row[row >= 0], 1.0) for row in rows]).mean(0)


def main(run: Path) -> None:
    """One line per workload, context and policy."""
    arms = [Arm(make("dense"), None, PROTECTION)]
    arms += [Arm(make(name), Budget("keep_tokens", 0.5), PROTECTION) for name in NAMES]
    loaded = load("smollm2-135m")
    for folder in sorted((run / "traces").glob("smollm2-135m-kv-short-*")):
        trace = Trace.open(folder)
        where, replay = answers_in(trace), Replay(loaded, trace, arms, Protocol(free_tokens=0))
        for arm in arms[1:]:
            share = survival(replay.compressed(arm).lane, trace.prefix.tokens)
            lost = (share[where] < RARE).float().mean()
            print(
                f"{folder.name[:26]}  {arm.label:18}  any token {share.mean():.2f}, a token of an answer "
                f"{share[where].mean():.2f} of the heads; {lost:.0%} of these in under {RARE:.0%}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
