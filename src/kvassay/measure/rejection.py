"""What a target accepts of a draft, by its mathematics.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), who write p for the
target and q for the draft; accepted, recovered and bonus tokens as in `vllm.v1.sample.rejection_sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvassay.errors import ExperimentError


class Verified(NamedTuple):
    """One verify round's outcome."""

    accepted: int
    """Draft tokens accepted."""
    tokens: tuple[int, ...]
    """What the round emits: the accepted drafts, then one token of the target's own, recovered where a draft was
    rejected and a bonus where none was. Always `accepted + 1` tokens."""


def expected_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Probability that a token drawn from `draft` is accepted: sum(min(p, q)) over the last dimension.

    target, draft: probabilities [..., vocab]; returns [...]. One minus the total variation distance
    (arXiv 2211.17192, theorem 3.5).
    """
    return torch.minimum(target, draft).sum(-1)


def acceptance_probability(target: Tensor, draft: Tensor, token: int) -> float:
    """min(1, p(token) / q(token)) for probabilities [vocab]; 1 for a token that the draft cannot have drawn."""
    p, q = float(target[token]), float(draft[token])
    return 1.0 if q <= p else p / q


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """What a recovered token is drawn from: max(p - q, 0), normalised, [vocab].

    Where p never exceeds q the two are equal and nothing is rejected; the target itself is returned.
    """
    left = (target - draft).clamp(min=0)
    total = left.sum()
    return left / total if float(total) > 0 else target


def verify_greedy(draft: Sequence[int], best: Sequence[int]) -> Verified:
    """Accept the drafts that are the target's own greedy tokens, up to the first that is not.

    best: the target's most likely token at each draft position and after the last, `len(draft) + 1` of them.
    """
    _check_lengths(len(draft), len(best))
    accepted = next((at for at, token in enumerate(draft) if token != best[at]), len(draft))
    return Verified(accepted, (*draft[:accepted], best[accepted]))


def verify_sampled(
    draft: Sequence[int], draft_probabilities: Tensor, target_probabilities: Tensor, rng: torch.Generator
) -> Verified:
    """Rejection sampling (arXiv 2211.17192, algorithm 1): what is emitted is distributed as the target's own.

    draft_probabilities: [k, vocab], what each draft was drawn from (one-hot for a drafter without chance)
    target_probabilities: [k + 1, vocab]
    """
    _check_lengths(len(draft), len(target_probabilities))
    for at, token in enumerate(draft):
        p, q = target_probabilities[at], draft_probabilities[at]
        if float(torch.rand((), generator=rng, dtype=torch.float64)) >= acceptance_probability(p, q, token):
            return Verified(at, (*draft[:at], _draw(residual(p, q), rng)))
    return Verified(len(draft), (*draft, _draw(target_probabilities[-1], rng)))


def _draw(probabilities: Tensor, rng: torch.Generator) -> int:
    return int(torch.multinomial(probabilities, 1, generator=rng))


def _check_lengths(drafts: int, rows: int) -> None:
    if rows != drafts + 1:
        raise ExperimentError(f"{drafts} draft tokens are verified by {drafts + 1} rows of the target, not {rows}")
