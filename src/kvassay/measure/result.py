"""The record of one question under one arm: every number with its unit, denominator and direction.

One `BranchResult` is written for each (trace, branch, arm) of a closed-loop replay. Nothing here is an
average over questions; averages, intervals and comparisons are made from these rows. All numbers are
measured unless the field says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

KEPT_BINS = 64
"""Stretches of the context of which `BranchResult.kept` says how much is held."""
FREE_RUNNING = ("task", "generated_tokens")
"""Metrics of the generated text: not measured where nothing was generated."""
NOT_GENERATED = "not measured: nothing was generated (free_tokens = 0)"
RECLAIM_MODES = ("whole_block", "per_layer_tables", "per_head_tables", "slot_reuse", "compaction")


@dataclass(frozen=True)
class BranchResult:
    """One question asked of one compressed context."""

    trace: str
    """Name of the trace folder (one context)."""
    workload: str
    branch: int
    """Ordinal of the question within its context."""
    arm: str
    """Label of the arm: policy, parameters, budget, prefill mode."""
    query_aware: bool
    """Whether the question was visible when the cache was compressed."""

    context_tokens: int
    question_tokens: int
    answer_tokens: int

    # Teacher-forced: the recorded answer is fed, whatever the arm would have said.
    nll: float
    """Mean negative log-likelihood of the scored answer tokens, nats per token; lower is better."""
    top1: float
    """Fraction of scored answer tokens that are the arm's most likely token; higher is better."""
    kl: float
    """Mean KL(dense || arm) over scored answer tokens, nats per token; lower is better; 0 for dense."""
    agree: float
    """Fraction of scored answer tokens where the arm's top-1 token is dense's; higher is better."""

    # Free-running: greedy decoding from the question on.
    task: float | None
    """The workload's score in [0, 1] of the generated text, over the part of the answer that the protocol's
    `free_tokens` covers; higher is better. None if nothing was generated."""
    divergence: int | None
    """First generated token that differs from dense's (or is missing beside it), None if none does or nothing was
    generated."""
    wrong_step: int | None
    """For answers made of steps (reasoning-shaped workloads): the first step, 0-based, in which the generated
    tokens leave the recorded answer; None if they never do, or the answer has no steps. Higher is better."""
    generated: str
    """The generated text."""
    generated_tokens: int
    """Tokens of the reply, its end token included; 0 where the protocol generates none."""

    # How much, never one number. Bytes at the layout's kv_dtype; encoded data as really held.
    retained_bytes: float
    """Bytes held for the whole model after the last answer token: K, V, encoded data, metadata, padding,
    side data and policy state; window-bounded layers included."""
    retained_fraction: float
    """`retained_bytes` / dense's at the same moment; lower is better."""
    retained_bytes_scope: float
    """The same over the layers the policy may act on."""
    retained_fraction_scope: float
    peak_bytes: float
    """Most bytes held after any teacher-forced step (the dense context before compression excluded)."""
    selected_tokens: float
    """Mean tokens read per KV head in a decode step by a layer that reads a cache in scope, its own or one it shares,
    of those visible to dense (tokens)."""

    blocks_total: int
    """Blocks that dense holds in the shared tables of the KV cache groups that no window bounds (as vLLM plans them),
    when the arm's are counted: of the context before compression, or, of an arm that edits the cache while decoding,
    of context and answer at its end. Window-bounded groups hold a bounded number beside, which no policy here frees."""
    blocks_freed: dict[str, float] = field(default_factory=dict)
    """Blocks freed of `blocks_total`, as sole owner, by reclaim mode (`RECLAIM_MODES`), net of the blocks that encoded
    segments fill; finer modes are given as the equivalent number of shared-table blocks. Higher is better."""

    read_bytes: float = 0.0
    """KV read traffic of one decoded token, mean over the teacher-forced tokens after the context: K, V, side
    data, metadata and scoring scan, bytes."""
    read_fraction: float = 0.0
    """`read_bytes` / dense's for the same token; lower is better."""
    read_bytes_growing: float = 0.0
    """Those of `read_bytes` that are read in layers which no window bounds."""
    policy_bytes: float = 0.0
    """Bytes touched once by the policy to score and edit the context (not per token)."""
    artefact_bytes: float = 0.0
    """Bytes of what the policy learnt offline and needs when it reads; once per model, not per sequence, and so
    not in `retained_bytes`."""
    index_bytes: float = 0.0
    """Those of `retained_bytes` that are keys of the model's own selection index: of tokens that some KV head of their
    layer still holds, and of compressed entries."""
    index_read_bytes: float = 0.0
    """Those of `read_bytes` that are keys of the model's own selection index, which scores all that are held."""
    pooled_bytes: float = 0.0
    """Those of `retained_bytes` that are compressed entries, one per several tokens; no policy here touches them."""
    prefill: str = "shared_dense"
    """How this arm's context was prefilled: `shared_dense` (a fork of the one dense prefill) or `own`."""
    ended: str = "length"
    """What ended the reply: `length` (as many tokens as the protocol generates) or `end_token` (the model's own)."""
    policy_seconds: float = 0.0
    """Wall seconds the policy and the cache spent on scoring and editing the context, on this machine."""
    facts: str = "{}"
    """What the policy reports of its own last decision, as a JSON object of numbers (shares, counts)."""
    kept: tuple[float, ...] = ()
    """Where in the context what is held lies: for each of `KEPT_BINS` equal stretches of it (one per token, if it has
    fewer), the tokens still held after compressing, in slots or encoded / the stretch's tokens, mean over the KV heads
    of the layers the policy may act on, in [0, 1]. Given with a context's first question, empty with the others."""
    context_sha256: str = ""
    """What the context is, however it was recorded: sha256 of the model's weights and the context's tokens."""
    question_sha256: str = ""
    """What was asked of it: sha256 of the question's and the answer's tokens, and of which of them are scored."""


def measured(rows: Iterable[BranchResult], names: Iterable[str]) -> tuple[str, ...]:
    """Those of the metrics `names` that all of `rows` have: all, or without those of a text that was not generated."""
    silent = any(row.generated_tokens == 0 for row in rows)
    return tuple(name for name in names if not (silent and name in FREE_RUNNING))


@dataclass(frozen=True)
class LayerFidelity:
    """Open loop: one layer of one branch under one arm, against dense on the same recorded queries."""

    trace: str
    workload: str
    branch: int
    arm: str
    layer: int
    output_error: float
    """||arm - dense|| / ||dense|| of the attention output over the branch's queries; lower is better."""
    retained_mass: float
    """Share of dense's attention mass on tokens that lies on those the arm may read (the branch's own tokens are
    always among them), mean over queries and query heads, in [0, 1]; higher is better. A sink's mass is left out."""
    in_scope: bool = True
    """Whether the arm may act on this layer, or on the one whose cache it reads."""
    read_bytes: float = 0.0
    """Bytes that one query reads of this layer, mean over the branch's queries: K, V, side data, metadata and scoring
    scan, at the layout's `kv_dtype`; lower is better."""
    scan_bytes: float = 0.0
    """Those of `read_bytes` that were read to choose: side data, or keys, of what may not be chosen."""
    dense_bytes: float = 0.0
    """Bytes that dense reads for the same queries, mean."""
    head_errors: tuple[float, ...] = ()
    """`output_error` of each query head alone."""
