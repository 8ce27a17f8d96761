"""Metric cards: what each number of a result counts, over what, in which unit and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvassay.measure.result import RECLAIM_MODES
from kvassay.measure.statistics import Better as Direction


@dataclass(frozen=True)
class MetricCard:
    """One metric in words. `field` is the attribute of `BranchResult` it is the mean of."""

    field: str
    title: str
    unit: str
    better: Direction
    formula: str
    """Numerator, denominator and what the mean runs over."""
    quality: bool = False
    """Gets an interval and a paired difference to dense."""
    how: Literal["measured", "modelled"] = "measured"
    bounds: tuple[float, float] | None = None
    """Least and greatest value of one question; None where there is no greatest."""

    @property
    def paired_bounds(self) -> tuple[float, float] | None:
        """The same for a difference between two arms on one question."""
        return None if self.bounds is None else (self.bounds[0] - self.bounds[1], self.bounds[1] - self.bounds[0])

    @property
    def sentence(self) -> str:
        """The card on one line."""
        direction = {"higher": "higher is better", "lower": "lower is better", "none": "no direction"}[self.better]
        return f"{self.title} ({self.unit}; {direction}; {self.how}): {self.formula}"


_CARDS = (
    MetricCard(
        "top1",
        "top-1",
        "fraction",
        "higher",
        "scored answer tokens that are the arm's most likely token / scored answer tokens, teacher-forced, "
        "mean over questions",
        quality=True,
        bounds=(0.0, 1.0),
    ),
    MetricCard(
        "task",
        "task",
        "score 0 to 1",
        "higher",
        "the workload's score of the greedily generated text, free-running, mean over questions",
        quality=True,
        bounds=(0.0, 1.0),
    ),
    MetricCard(
        "nll",
        "NLL",
        "nats per token",
        "lower",
        "-log p(answer token), mean over scored answer tokens, teacher-forced, then over questions",
        quality=True,
    ),
    MetricCard(
        "kl",
        "KL",
        "nats per token",
        "lower",
        "KL(dense || arm), mean over scored answer tokens, teacher-forced, then over questions; 0 for dense",
        quality=True,
    ),
    MetricCard(
        "agree",
        "agreement",
        "fraction",
        "higher",
        "scored answer tokens where arm and dense have the same top-1 token / scored answer tokens, "
        "mean over questions",
        quality=True,
        bounds=(0.0, 1.0),
    ),
    MetricCard(
        "generated_tokens",
        "generated",
        "tokens",
        "none",
        "tokens generated free-running, mean over questions",
        quality=True,
    ),
    MetricCard(
        "retained_fraction",
        "held",
        "fraction of dense",
        "lower",
        "bytes of what is retained (live tokens, codes, metadata, padding, side data, policy state), whole model, "
        "after the last answer token, whatever blocks it lies in (see freed) "
        "/ dense's at the same moment",
    ),
    MetricCard(
        "retained_fraction_scope",
        "held in scope",
        "fraction of dense",
        "lower",
        "the same over the layers the policy may act on / dense's in those layers",
    ),
    MetricCard("retained_bytes", "bytes held", "bytes", "lower", "numerator of held, mean over questions"),
    MetricCard("retained_bytes_scope", "bytes held in scope", "bytes", "lower", "numerator of held in scope"),
    MetricCard(
        "peak_bytes",
        "peak bytes",
        "bytes",
        "lower",
        "most bytes held at any step since the context was compressed, the largest over questions",
    ),
    MetricCard(
        "selected_tokens",
        "selected",
        "tokens",
        "lower",
        "tokens read per KV head and layer that reads a cache in scope, in a decode step, mean",
    ),
    MetricCard(
        "read_fraction",
        "read",
        "fraction of dense",
        "lower",
        "KV bytes read to decode one answer token (K, V, side data, metadata, scoring scan) / dense's for that token",
    ),
    MetricCard("read_bytes", "bytes read", "bytes per token", "lower", "numerator of read, mean over answer tokens"),
    MetricCard(
        "read_bytes_growing",
        "bytes read in growing layers",
        "bytes per token",
        "lower",
        "those of the bytes read that are read in layers which no window bounds, mean over answer tokens",
    ),
    MetricCard(
        "index_bytes",
        "index keys held",
        "bytes",
        "lower",
        "those of the bytes held that are keys of the model's own selection index",
    ),
    MetricCard(
        "index_read_bytes",
        "index keys read",
        "bytes per token",
        "lower",
        "those of the bytes read that are keys of the model's own selection index, mean over answer tokens",
    ),
    MetricCard(
        "pooled_bytes",
        "compressed entries held",
        "bytes",
        "lower",
        "those of the bytes held that are compressed entries, one per several tokens",
    ),
    MetricCard(
        "policy_bytes",
        "policy bytes",
        "bytes",
        "lower",
        "bytes touched once to score, edit and summarise the context, mean over questions",
    ),
    MetricCard(
        "policy_seconds",
        "policy seconds",
        "wall seconds",
        "lower",
        "time spent scoring and editing the context on this machine, mean over questions",
    ),
    MetricCard(
        "blocks_total",
        "blocks",
        "blocks",
        "none",
        "blocks the dense context holds in the shared tables of the KV cache groups that no window bounds",
    ),
)

CARDS: dict[str, MetricCard] = {card.field: card for card in _CARDS}
"""Every metric by its field name."""

QUALITY = tuple(card.field for card in _CARDS if card.quality)
"""Metrics with an interval and a paired difference to dense."""

AMOUNTS = tuple(card.field for card in _CARDS if not card.quality and card.field != "peak_bytes")
"""Metrics that are plain means: bytes, traffic, tokens, blocks."""

STATES = ("index_bytes", "index_read_bytes", "pooled_bytes")
"""Amounts that are a part of another one, and 0 in models that keep no such state."""

RECLAIM_TEXT: dict[str, str] = {
    "whole_block": "shared tables (vLLM today): a block goes only if every head of every layer of its group drops it",
    "per_layer_tables": "one block table per layer: a block goes if every head of the layer drops it",
    "per_head_tables": "one block table per layer and KV head",
    "slot_reuse": "shared tables, freed slots refilled; heads and layers padded to the widest",
    "compaction": "shared tables, kept tokens moved together; heads and layers padded to the widest, copies charged",
}
"""What frees a block in each reclaim mode. Blocks freed / dense's blocks; higher is better."""

if set(RECLAIM_TEXT) != set(RECLAIM_MODES):  # pragma: no cover
    raise AssertionError("a reclaim mode has no description")
