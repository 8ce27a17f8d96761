"""Metric cards of speculative acceptance, apart from what counts it: other words are no other measurement."""

from __future__ import annotations

from kvassay.measure.metrics import MetricCard

_CARDS = (
    MetricCard(
        "greedy_acceptance",
        "first token",
        "fraction",
        "higher",
        "first draft tokens that are the target's greedy token / first draft tokens",
    ),
    MetricCard(
        "expected_acceptance",
        "expected",
        "fraction",
        "higher",
        "sum(min(p, q)) of target and drafter at temperature 1, mean over first draft tokens",
    ),
    MetricCard(
        "acceptance_rate",
        "rate",
        "fraction",
        "higher",
        "accepted tokens / draft tokens, greedy (vLLM's draft acceptance rate)",
    ),
    MetricCard(
        "accepted_length",
        "accepted",
        "tokens per draft",
        "higher",
        "accepted tokens / drafts; the target's own token is not counted (vLLM's mean acceptance length is 1 more)",
    ),
    MetricCard(
        "emitted_length",
        "emitted",
        "tokens per round",
        "higher",
        "accepted tokens and one recovered or bonus token per round / rounds, those without a draft included",
    ),
)

ACCEPTANCE_CARDS: dict[str, MetricCard] = {card.field: card for card in _CARDS}
"""The metrics of `Counters` by their property."""
