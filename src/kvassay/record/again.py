"""Recording a trace once more from its header: the text, the options and the model that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvassay.errors import RecordError
from kvassay.record.capture import ATTENTION_TAPS
from kvassay.record.load import ModelIdentity, load
from kvassay.record.options import RecordOptions, bucket_size
from kvassay.record.taps import STREAM_TAPS
from kvassay.record.transformers import record_sample
from kvassay.trace.reader import Trace
from kvassay.trace.schema import TraceHeader
from kvassay.workload.registry import rebuild
from kvassay.workload.sample import Sample

LEFT_TO_THE_RECORDING = ("versions", "created", "sinks", "shards")
"""Fields of a header that follow from the others and from when it was recorded."""


def options_of(header: TraceHeader) -> RecordOptions:
    """Return the options that a trace was recorded with."""
    kinds = tuple(dict.fromkeys(tap.kind for tap in header.taps))
    unknown = [kind for kind in kinds if kind not in (*ATTENTION_TAPS, *STREAM_TAPS)]
    if unknown:
        raise RecordError(f"the trace holds the tap '{unknown[0]}', which this recorder cannot make")
    spec = header.logits
    if spec is None:
        raise RecordError("the trace holds no logits, so this recorder did not make it")
    longest = header.prefix.tokens + max((branch.tokens for branch in header.branches), default=0)
    return RecordOptions(
        prefill_chunk=header.prefill_chunk,
        q_tail=header.prefix.tokens - header.q_from,
        dtype=header.dtype,
        taps=kinds,  # type: ignore[arg-type]  # narrowed by the check above
        tap_layers=tuple(dict.fromkeys(tap.layer for tap in header.taps)) or None,
        bucket=bucket_size(header),
        logits=spec.kind,
        logits_k=spec.k or RecordOptions.logits_k,
        allow_beyond_native=longest > header.layout.native_context,
    )


def check_same_recording(folder: Path, wanted: TraceHeader) -> None:
    """`RecordError` unless `folder` holds what recording `wanted` would give, whenever and by whatever versions."""
    found = Trace.open(folder).header
    names = [name for name in TraceHeader.model_fields if name not in LEFT_TO_THE_RECORDING]
    if other := [name for name in names if getattr(found, name) != getattr(wanted, name)]:
        raise RecordError(
            f"{folder}: holds another recording, which differs in {', '.join(other)}; pass --overwrite or another --out"
        )


def check_recipe(header: TraceHeader) -> None:
    """`RecordError` unless the header says how its text was made."""
    if not header.recipe.params:
        raise RecordError(f"the trace of '{header.recipe.name}' holds no recipe: its text was not made by a workload")


def sample_again(header: TraceHeader, model: ModelIdentity, tokenizer: Any) -> Sample:
    """The text of a trace, from its recipe; `RecordError` if the model is another one."""
    for what in ("weights_sha256", "tokenizer_sha256"):
        now, then = getattr(model, what), getattr(header.model, what)
        if now != then:
            raise RecordError(f"{header.model.name}: {what} is now {now}, the trace was made with {then}")
    recipe = header.recipe
    own = recipe.model_dump(include={"length", "seed", "index", "query_aware"})
    return rebuild({"workload": recipe.name, **own, **recipe.params}, tokenizer)


def rerecord(
    header: TraceHeader, out_dir: str | Path, *, model: str | Path | None = None, device: str = "cpu"
) -> Trace:
    """Record the trace that `header` describes again, from its recipe, into `out_dir`.

    `model` says where the model is if not under the header's name (a local folder). Raises `RecordError` if
    the model or the text that can be had now is not the one of the header, or the text has no recipe.
    """
    if header.versions.vllm is not None:
        raise RecordError(
            f"the trace was recorded in vLLM {header.versions.vllm}, whose block tables this recorder cannot make "
            "again; reproduce it with `--engine vllm`"
        )
    check_recipe(header)
    loaded = load(header.model.name if model is None else model, device=device)
    sample = sample_again(header, loaded.identity, loaded.tokenizer)
    return record_sample(loaded, sample, out_dir, options_of(header))
