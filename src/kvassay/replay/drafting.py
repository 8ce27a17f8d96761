"""One verify round of many pairs at once: drafters propose, targets verify, both keep what was accepted.

Whatever a lane is fed here is uncommitted until its round is settled; then the accepted tokens are committed,
the others rolled back, and only then is a policy asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvassay.measure.acceptance import Round
from kvassay.measure.rejection import expected_acceptance, verify_greedy
from kvassay.replay.engine import Engine
from kvassay.replay.feeding import feed
from kvassay.replay.lane import Lane
from kvassay.replay.ngram import prompt_lookup


@dataclass(frozen=True)
class Speculation:
    """How drafting is done, equal for all arms."""

    k: int = 8
    """Most draft tokens per round."""
    tokens: int = 16
    """Rounds per question teacher-forced, and tokens emitted per question free-running, at most."""
    ngram_min: int = 2
    """Shortest end of the text that prompt lookup looks for, tokens."""
    ngram_max: int = 4
    """Longest."""


class Proposal(NamedTuple):
    """Draft tokens and the distributions [tokens, vocab] they are the most likely of; None: they were certain."""

    tokens: list[int]
    probabilities: Tensor | None


@dataclass
class Speaker:
    """A lane that drafts or verifies, and the tokens of its text that it has not been fed."""

    engine: Engine
    lane: Lane
    pending: list[int]

    def settle(self, draft: Sequence[int], accepted: int, then: int) -> None:
        """Go on after `accepted` tokens of the draft and one more; commit what has been fed of them."""
        known = [*self.pending, *draft[:accepted]]
        keep = min(self.lane.uncommitted, len(known))
        self.engine.settle(self.lane, keep)
        self.pending = [*known[keep:], then]

    def free(self) -> None:
        """Give the lane back."""
        self.lane.free()


@dataclass
class Lookup:
    """A drafter that looks its own text up."""

    text: list[int]
    shortest: int
    longest: int

    def lookup(self, k: int) -> list[int]:
        """Up to `k` tokens that followed the same text before."""
        return prompt_lookup(self.text, k, self.shortest, self.longest)

    def settle(self, draft: Sequence[int], accepted: int, then: int) -> None:
        """Go on after `accepted` tokens of the draft and one more."""
        self.text += [*draft[:accepted], then]

    def free(self) -> None:
        """Nothing is held."""


Drafter = Speaker | Lookup


@dataclass
class Pair:
    """One drafter and one target on the same text, and what their rounds have come to."""

    drafter: Drafter
    target: Speaker
    rounds: list[Round] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    """Tokens of the free-running text so far."""

    def free(self) -> None:
        """Give both back."""
        self.drafter.free()
        self.target.free()


def teacher_forced(pairs: Sequence[Pair], k: int, answer: Sequence[int]) -> None:
    """A round from each position of `answer`, over the recorded tokens before it; nothing drafted is kept."""
    for token in answer:
        for pair, (tokens, _) in zip(pairs, verified(pairs, k), strict=True):
            _settle(pair, tokens, 0, token)


def free_running(pairs: Sequence[Pair], k: int, limit: int) -> None:
    """Greedy speculative decoding until each pair has emitted at least `limit` tokens."""
    while running := [pair for pair in pairs if len(pair.emitted) < limit]:
        for pair, (tokens, emitted) in zip(running, verified(running, k), strict=True):
            pair.emitted += emitted
            _settle(pair, tokens, len(emitted) - 1, emitted[-1])


def verified(pairs: Sequence[Pair], k: int) -> list[tuple[list[int], tuple[int, ...]]]:
    """Draft and verify greedily, and note the round; per pair the draft, and the tokens the round emits.

    Everything fed stays uncommitted.
    """
    proposals = propose([pair.drafter for pair in pairs], k)
    logits = _fed([pair.target for pair in pairs], [proposal.tokens for proposal in proposals])
    found = []
    for pair, proposal, rows in zip(pairs, proposals, logits, strict=True):
        outcome = verify_greedy(proposal.tokens, rows.argmax(-1).tolist())
        reached = min(outcome.accepted + 1, len(proposal.tokens))
        overlap = _overlap(proposal, torch.softmax(rows[:reached].double(), -1))
        pair.rounds.append(Round(len(proposal.tokens), outcome.accepted, overlap))
        found.append((proposal.tokens, outcome.tokens))
    return found


def propose(drafters: Sequence[Drafter], k: int) -> list[Proposal]:
    """Up to `k` draft tokens of each; lanes draft greedily, those of one engine in step."""
    speakers = {at: one for at, one in enumerate(drafters) if isinstance(one, Speaker)}
    drafted = dict(zip(speakers, _drafted(list(speakers.values()), k), strict=True))
    return [
        Proposal(one.lookup(k), None) if isinstance(one, Lookup) else drafted[at] for at, one in enumerate(drafters)
    ]


def _drafted(speakers: Sequence[Speaker], k: int) -> list[Proposal]:
    if not speakers:
        return []
    engine, lanes = speakers[0].engine, [one.lane for one in speakers]
    tokens: list[list[int]] = [[] for _ in speakers]
    rows: list[list[Tensor]] = [[] for _ in speakers]
    for at in range(k):
        ids = [one.pending if at == 0 else drafts[-1:] for one, drafts in zip(speakers, tokens, strict=True)]
        for row, logits in enumerate(feed(engine, lanes, ids, last=1, committed=False)):
            rows[row].append(logits[-1])
            tokens[row].append(int(logits[-1].argmax()))
    return [Proposal(ids, torch.softmax(torch.stack(of).double(), -1)) for ids, of in zip(tokens, rows, strict=True)]


def _fed(targets: Sequence[Speaker], drafts: Sequence[list[int]]) -> list[Tensor]:
    """Logits [draft + 1, vocab] of each target after its text and after each draft token."""
    ids = [[*one.pending, *draft] for one, draft in zip(targets, drafts, strict=True)]
    logits: dict[int, Tensor] = {}
    for length in {len(draft) for draft in drafts}:
        rows = [row for row, draft in enumerate(drafts) if len(draft) == length]
        lanes, tokens = [targets[row].lane for row in rows], [ids[row] for row in rows]
        logits.update(zip(rows, feed(targets[0].engine, lanes, tokens, last=length + 1, committed=False), strict=True))
    return [logits[row] for row in range(len(targets))]


def _settle(pair: Pair, draft: Sequence[int], accepted: int, then: int) -> None:
    for side in (pair.drafter, pair.target):
        side.settle(draft, accepted, then)


def _overlap(proposal: Proposal, target: Tensor) -> tuple[float, ...]:
    """sum(min(p, q)) at each row of `target` [reached, vocab]; of a certain draft token that is p of it."""
    if proposal.probabilities is None:
        return tuple(float(p[token]) for p, token in zip(target, proposal.tokens, strict=False))
    return tuple(expected_acceptance(target, proposal.probabilities[: len(target)]).tolist())


def forked(engine: Engine, lanes: Iterable[Lane], pending: int) -> list[Speaker]:
    """A fork of each lane that has yet to be fed the token `pending`."""
    return [Speaker(engine, lane.fork(), [pending]) for lane in lanes]
