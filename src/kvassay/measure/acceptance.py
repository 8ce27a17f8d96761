"""How acceptance in speculative decoding is counted, and the record of one question.

Counters and ratios are those of `vllm.v1.spec_decode.metrics` (`SpecDecodingStats`), tokens are called accepted,
recovered and bonus as in `vllm.v1.sample.rejection_sampler`; p is the target's distribution and q the drafter's,
as in Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvassay.errors import ExperimentError

COMPRESSED, NGRAM = "compressed", "ngram"
"""The drafters that are no second model: the arm's own cache, and prompt lookup."""

Mode = Literal["teacher_forced", "free_running"]
"""`teacher_forced`: a draft from every recorded position, the same positions for all arms; nothing drafted stays.
`free_running`: speculative decoding from the question on; what is accepted stays, so arms take their own paths. The
last round counts whole, also where it emits more than was asked for."""


@dataclass(frozen=True)
class Round:
    """One verify round under greedy decoding, as it happened."""

    drafted: int
    """Tokens proposed; 0 where the drafter had nothing to propose."""
    accepted: int
    overlap: tuple[float, ...]
    """sum(min(p, q)) at each draft position that was reached, i.e. whose earlier drafts were all accepted."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What rounds of at most `k` draft tokens add up to. Sums only, so that questions pool by addition."""

    k: int
    """Most draft tokens per round."""
    rounds: int
    """Target forward passes: drafts verified, and plain steps where there was nothing to verify."""
    num_drafts: int
    """Rounds with at least one draft token, as vLLM counts drafts."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    """Drafts accepted up to and including draft position 0..k-1, [k]."""
    num_draft_tokens_per_pos: tuple[int, ...]
    """Drafts that had a token at position 0..k-1, [k]; below `num_drafts` where drafts were shorter than k."""
    reached_per_pos: tuple[int, ...]
    """Drafts that had a token at position 0..k-1 and whose earlier tokens were all accepted, [k]."""
    overlap_per_pos: tuple[float, ...]
    """sum(min(p, q)) of target and drafter at temperature 1, added up over `reached_per_pos`, [k]."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / draft tokens; higher is better; None without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def accepted_length(self) -> float | None:
        """Accepted tokens / drafts, the target's own token left out; higher is better."""
        return _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def mean_acceptance_length(self) -> float:
        """vLLM's figure: 1 + accepted tokens / drafts; 1 without drafts; higher is better."""
        return 1 + (self.accepted_length or 0.0)

    @property
    def emitted_tokens(self) -> int:
        """Accepted tokens and one recovered or bonus token per round."""
        return self.num_accepted_tokens + self.rounds

    @property
    def emitted_length(self) -> float | None:
        """Emitted tokens / rounds, rounds without a draft included; higher is better."""
        return _ratio(self.emitted_tokens, self.rounds)

    @property
    def greedy_acceptance(self) -> float | None:
        """First draft tokens that are the target's greedy token / first draft tokens; higher is better."""
        return _ratio(self.num_accepted_tokens_per_pos[0], self.num_draft_tokens_per_pos[0])

    @property
    def expected_acceptance(self) -> float | None:
        """Mean sum(min(p, q)) over first draft tokens, temperature 1; higher is better."""
        return self.expected_per_pos[0]

    @property
    def accepted_per_pos(self) -> tuple[float | None, ...]:
        """vLLM's figure per draft position: accepted there / drafts."""
        return tuple(_ratio(n, self.num_drafts) for n in self.num_accepted_tokens_per_pos)

    @property
    def expected_per_pos(self) -> tuple[float | None, ...]:
        """Mean sum(min(p, q)) per draft position over the drafts that reached it, along greedy drafts."""
        return tuple(_ratio(s, n) for s, n in zip(self.overlap_per_pos, self.reached_per_pos, strict=True))


@dataclass(frozen=True, kw_only=True)
class AcceptanceResult(Counters):
    """One question, one arm, one drafter: counters of greedy verification at one `k`. Measured."""

    trace: str
    """Name of the trace folder (one context)."""
    workload: str
    branch: int
    """Ordinal of the question within its context."""
    arm: str
    """The arm the row is about: whose cache drafts (drafter `compressed`), or whose cache verifies."""
    mode: Mode
    """Where rounds start; see `Mode`. Rows of two modes are never averaged together."""
    drafter: str
    """`compressed` (the arm's own cache), `ngram` (prompt lookup), or the name of a draft model."""
    target: str
    """Label of the arm that verifies: `dense` where the compressed cache drafts, else the arm itself."""
    context_tokens: int


def tally(rounds: Sequence[Round], k: int) -> Counters:
    """Counters of rounds cut to their first `k` draft tokens.

    Greedy drafts and prompt lookup propose the same first tokens whatever k is, so a round of many draft tokens
    that starts at a given position (teacher-forced) also says what a shorter one from there would have given.
    """
    drafted = [min(r.drafted, k) for r in rounds]
    accepted = [min(r.accepted, k) for r in rounds]
    pairs = list(zip(drafted, accepted, strict=True))
    reached = [[r for r, (d, a) in zip(rounds, pairs, strict=True) if at < d and at <= a] for at in range(k)]
    return Counters(
        k=k,
        rounds=len(rounds),
        num_drafts=sum(d > 0 for d in drafted),
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=tuple(sum(a > at for a in accepted) for at in range(k)),
        num_draft_tokens_per_pos=tuple(sum(d > at for d in drafted) for at in range(k)),
        reached_per_pos=tuple(len(there) for there in reached),
        overlap_per_pos=tuple(sum(r.overlap[at] for r in there) for at, there in enumerate(reached)),
    )


def pooled(parts: Sequence[Counters]) -> Counters:
    """The counters of several questions as one; `ExperimentError` if there are none, or their `k` differ."""
    if len({part.k for part in parts}) != 1:
        raise ExperimentError(f"counters of k = {sorted({part.k for part in parts})} do not add up")
    return Counters(
        k=parts[0].k,
        rounds=sum(part.rounds for part in parts),
        num_drafts=sum(part.num_drafts for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
        num_accepted_tokens_per_pos=_added([part.num_accepted_tokens_per_pos for part in parts]),
        num_draft_tokens_per_pos=_added([part.num_draft_tokens_per_pos for part in parts]),
        reached_per_pos=_added([part.reached_per_pos for part in parts]),
        overlap_per_pos=tuple(sum(at) for at in zip(*(part.overlap_per_pos for part in parts), strict=True)),
    )


def _added(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(at) for at in zip(*rows, strict=True))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
