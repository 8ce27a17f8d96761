"""What an engine needs before it can run a policy, derived from the card and the way blocks are reclaimed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from kvassay.policy.card import Effect, Evidence, When


class CardFacts(Protocol):
    """What is asked of a card, or of the arm in a manifest that was described from one."""

    @property
    def effects(self) -> Collection[str]:
        """`Effect`s."""

    @property
    def when(self) -> Collection[str]:
        """`When`s."""

    @property
    def evidence(self) -> Collection[str]:
        """`Evidence`."""

    @property
    def acts_on(self) -> Collection[str]:
        """Layer kinds."""

    @property
    def approximates(self) -> Collection[str]:
        """`Approximates`."""


@dataclass(frozen=True)
class Need:
    """One thing the engine must have."""

    name: str
    what: str


TABLES = {
    "whole_block": Need("shared block table", "nothing new: a block goes when every head of its group has dropped it"),
    "per_layer_tables": Need(
        "per-layer block tables", "a table and reference counts per layer, not per KV cache group"
    ),
    "per_head_tables": Need(
        "per-head block tables", "a table, lengths and reference counts per layer and KV head; kernels index by head"
    ),
    "slot_reuse": Need("slot reuse", "new tokens go into dead slots; positions are kept beside slots, masks per head"),
    "compaction": Need(
        "compaction", "kept tokens are moved together (a copy kernel, new blocks first), heads padded to the widest"
    ),
}
"""By way of reclaiming."""


def engine_needs(card: CardFacts, reclaim: Collection[str]) -> tuple[Need, ...]:
    """Everything, in the order in which one would build it.

    reclaim: ways of reclaiming by which the arm passed its gate; empty if it frees nothing that counts
    """
    needs = [need for mode, need in TABLES.items() if mode in reclaim]
    if Effect.EVICT in card.effects:
        needs.append(
            Need("validity masks", "evicted slots are masked, not zeroed, and positions survive when neighbours leave")
        )
    return (*needs, *_kernel(card), *_side(card), *_hooks(card))


def _kernel(card: CardFacts) -> list[Need]:
    found = []
    if Effect.SELECT in card.effects:
        found.append(Need("block-list attention", "the decode kernel reads a list of blocks or slots per KV head"))
    if Effect.MERGE in card.effects or "logits" in card.approximates:
        found.append(Need("bias in the kernel", "a log-weight per slot is added to its logit"))
    if Effect.QUANTIZE in card.effects:
        found.append(Need("packed storage", "a cache of codes with scales, and dequantisation inside the kernel"))
    if Effect.LOW_RANK in card.effects:
        found.append(
            Need("low-rank rebuild", "keys or values are rebuilt from coefficients in the kernel, then rotated")
        )
    return found


def _side(card: CardFacts) -> list[Need]:
    found = []
    if When.BLOCK_FULL in card.when:
        found.append(Need("side cache", "a summary per full block, allocated, shared and freed with its block"))
    if When.OFFLINE in card.when:
        found.append(Need("offline artefact", "fitted on calibration text per model, loaded with the weights"))
    return found


def _hooks(card: CardFacts) -> list[Need]:
    asked = {
        Evidence.ATTENTION: "attention rows of the last queries, which fused kernels do not keep: a second, small pass",
        Evidence.ROW_LSE: "the row log-sum-exp that the attention kernel computes and drops",
        Evidence.QUERIES: "the last prompt queries, kept until prefill ends",
        Evidence.QUERY: "this step's query before attention runs",
        Evidence.HIDDEN: "hidden states of tapped layers",
        Evidence.LAYER_INPUT: "the input of the layer's projections",
        Evidence.KEYS_UNROTATED: "keys before rotation",
        Evidence.BUCKET: "scores of queries against keys of their own bucket",
    }
    found = [Need(f"hook: {name}", what) for name, what in asked.items() if name in card.evidence]
    moments = {
        When.AFTER_PREFILL: "once per request, between prefill and the first decode step",
        When.ON_WRITE: "as tokens are written, before they are read",
        When.EVERY_STEP: "in every decode step",
        When.EVERY_N: "every n decode steps",
        When.BLOCK_FULL: "whenever a block fills",
    }
    calls = [text for moment, text in moments.items() if moment in card.when]
    if calls and set(card.effects) - {Effect.NONE}:
        found.append(Need("policy call", f"the policy is called {'; '.join(calls)}"))
    return found
