"""One layer of a long row under one arm: the record, and what its numbers may be used for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LongRow:
    """Open loop: one layer of one context under one arm, all KV heads together.

    Bytes are at the layout's `kv_dtype` and of this one layer; times are of this machine's CPU and of the policy's own
    work alone, not of attention.
    """

    source: str
    """`synthetic`: no model produced the rows; or the name of a recorded trace."""
    statistics: str
    """Whose statistics synthetic rows have; empty for recorded ones."""
    row: str
    """Model whose layer shape it is."""
    tokens: int
    """Length of the context."""
    layer: int
    kind: str
    """Kind of layer: here always one whose state grows with the context; see `sliding_bytes`."""
    layers_like_it: int
    """Layers of this kind in the model, of which `layers_replayed` were replayed."""
    layers_replayed: int
    arm: str
    judges: bool
    """Whether the quality fields may be used to judge: False for synthetic rows whose ordering of policies was not
    found to agree with recorded ones of this shape; they are empty then."""

    retained_bytes: float
    """Held after compressing the context: K, V, codes, metadata, side data; this layer."""
    retained_fraction: float
    """`retained_bytes` / dense's of the same layer; lower is better. Window-bounded layers are not in it."""
    sliding_bytes: float
    """Bounded state of the model's sliding layers at this length, whole model, from its layout: the same for all
    arms, and in no other field."""
    blocks_total: int
    """Blocks the layer's context holds before compression."""
    blocks_freed_layer: float
    """Blocks freed if the layer had a table of its own, net of encoded segments. What vLLM's shared table frees is at
    most this."""
    blocks_freed_head: float
    """The same with a table per KV head, in equivalents of whole blocks."""
    read_bytes: float
    """KV bytes that one query reads of this layer, scan included, mean over the question's queries."""
    read_fraction: float
    """`read_bytes` / dense's for the same queries; lower is better."""
    scan_bytes: float
    """Those of `read_bytes` that were read to choose."""
    policy_bytes: float
    """Bytes touched once by the policy to score and edit the context."""
    decide_seconds: float
    """Wall seconds to score, decide and edit the layer's context once, all KV heads."""
    summarize_seconds: float
    """Wall seconds to make side data of the context's blocks, all KV heads."""
    select_seconds: float
    """Wall seconds to choose what one query reads, all KV heads, mean over the question's queries."""
    peak_rss_bytes: int
    """Largest resident size of the process that replayed the layer under all arms."""

    output_error: float | None = None
    """||arm - dense|| / ||dense|| of the attention output; lower is better."""
    retained_mass: float | None = None
    """Share of dense's attention mass on tokens that the arm may read; higher is better."""
    target_recall: float | None = None
    """Share of the question's (query head, query) pairs with a known target that may read it; higher is better; None
    also where no head looked for one."""
