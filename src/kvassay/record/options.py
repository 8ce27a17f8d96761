"""What to record, and how: the options of a recording and the trace header that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from kvassay.errors import RecordError, did_you_mean
from kvassay.layout.model import Layout
from kvassay.record.capture import BUCKET
from kvassay.record.load import LoadedModel
from kvassay.record.load import ModelIdentity as LoadedIdentity
from kvassay.trace.schema import (
    BranchEntry,
    LogitsSpec,
    ModelIdentity,
    PrefixEntry,
    Recipe,
    Tap,
    TraceHeader,
    Versions,
)
from kvassay.workload.sample import Branch, Sample

StoredDtype = Literal["float32", "float16"]
LogitsKind = Literal["none", "topk", "full"]
TapName = Literal["output", "lse", "hidden", "layer_input", "bucket"]
GREEDY_K = 2


@dataclass(frozen=True)
class RecordOptions:
    """Parameters of a recording; `RecordError` for a value that is not allowed.

    `prefill_chunk`: tokens per forward pass, of the context and of branches longer than that.
    `q_tail`: keep queries of the last so many context tokens (and of all branch tokens); at or above the
    context's length it keeps all. `dtype`: of stored rows. `taps`: extra evidence, of `tap_layers` (None: of
    all layers); `output` goes with the queries, the others are kept for every token; `bucket` is the number of
    positions in a bucket, for the tap of that name.
    `logits`: `full` rows, the `logits_k` largest, or `none` but the two largest, so that greedy next ids and
    their margins are always there. `allow_beyond_native`: record past the model's native context.
    """

    prefill_chunk: int = 512
    q_tail: int = 64
    dtype: StoredDtype = "float32"
    taps: tuple[TapName, ...] = ()
    tap_layers: tuple[int, ...] | None = None
    bucket: int = BUCKET
    logits: LogitsKind = "topk"
    logits_k: int = 64
    allow_beyond_native: bool = False

    def __post_init__(self) -> None:
        for name, least in (("prefill_chunk", 1), ("q_tail", 0), ("bucket", 1), ("logits_k", GREEDY_K)):
            if getattr(self, name) < least:
                raise RecordError(f"{name} is {getattr(self, name)}, it must be at least {least}")
        for name, value, kind in (("dtype", self.dtype, StoredDtype), ("logits", self.logits, LogitsKind)):
            if value not in get_args(kind):
                raise RecordError(f"{name} '{value}' is not one of {', '.join(get_args(kind))}")
        for tap in self.taps:
            if tap not in get_args(TapName):
                raise RecordError(f"no tap is called '{tap}'{did_you_mean(tap, get_args(TapName))}")

    def logits_spec(self, vocab_size: int) -> LogitsSpec:
        """The header's description of the logits kept."""
        if self.logits == "full":
            return LogitsSpec(kind="full")
        k = GREEDY_K if self.logits == "none" else self.logits_k
        return LogitsSpec(kind="topk", k=min(k, vocab_size))

    def header_taps(self, layout: Layout, q_from: int) -> tuple[Tap, ...]:
        """The header's list of taps; `RecordError` for a layer the layout does not have."""
        layers = range(len(layout.layers)) if self.tap_layers is None else self.tap_layers
        for layer in layers:
            if not 0 <= layer < len(layout.layers):
                raise RecordError(f"tap_layers names layer {layer}; the model has {len(layout.layers)} layers")
        return tuple(
            Tap(
                kind=kind,
                layer=layer,
                first=q_from if kind == "output" else 0,
                size=self.bucket if kind == "bucket" else None,
            )
            for kind in dict.fromkeys(self.taps)
            for layer in dict.fromkeys(layers)
        )


def bucket_size(header: TraceHeader) -> int:
    """Positions per bucket of the trace's bucket tap; the default if it has none."""
    return next((tap.size for tap in header.taps if tap.size is not None), BUCKET)


def make_header(loaded: LoadedModel, sample: Sample, options: RecordOptions) -> TraceHeader:
    """Return the header of the trace that recording `sample` gives; its shards are filled in by the writer."""
    context = len(sample.context_ids)
    q_from = max(context - options.q_tail, 0)
    return TraceHeader(
        layout=loaded.layout,
        model=model_record(loaded.identity),
        recipe=recipe_record(sample),
        versions=Versions.current(),
        dtype=options.dtype,
        prefill_chunk=options.prefill_chunk,
        q_from=q_from,
        taps=options.header_taps(loaded.layout, q_from),
        logits=options.logits_spec(loaded.layout.vocab_size),
        created=datetime.now(UTC),
        prefix=PrefixEntry(tokens=context),
        branches=tuple(branch_entry(branch) for branch in sample.branches),
    )


def model_record(identity: LoadedIdentity) -> ModelIdentity:
    """The header's record of a model."""
    return ModelIdentity(
        name=identity.name,
        weights_sha256=identity.weights_sha256,
        tokenizer_sha256=identity.tokenizer_sha256,
        licence=identity.licence or "unknown",
    )


def recipe_record(sample: Sample) -> Recipe:
    """The header's record of a sample's text."""
    return Recipe(
        name=sample.workload,
        seed=sample.seed,
        index=sample.index,
        length=len(sample.context_ids),
        params=recipe_params(sample.meta),
        query_aware=sample.query_aware,
    )


def branch_entry(branch: Branch) -> BranchEntry:
    """The header's record of a teacher-forced branch."""
    own: dict[str, Any] = {
        "question_text": branch.question_text,
        "scored": list(branch.scored),
        "depth": branch.depth,
    }
    return BranchEntry(
        tokens=len(branch.token_ids),
        question_tokens=len(branch.question_ids),
        answer_text=branch.answer_text,
        meta={**branch.meta, **own},
    )


def recipe_params(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a sample's recipe says beyond the fields that `Recipe` has of its own; empty without a recipe."""
    own = ("workload", "length", "seed", "index", "query_aware")
    return {key: value for key, value in meta.get("recipe", {}).items() if key not in own}
