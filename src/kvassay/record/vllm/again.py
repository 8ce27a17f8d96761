"""Recording the text of a trace through vLLM, whichever recorder made it: the rows must be the same."""

from __future__ import annotations

from pathlib import Path

from kvassay.errors import RecordError
from kvassay.record.again import check_recipe, options_of, sample_again
from kvassay.record.load import describe
from kvassay.record.vllm.offline import VllmOptions, check_importable, record_samples
from kvassay.trace.reader import Trace
from kvassay.trace.schema import TraceHeader


def rerecord_in_vllm(header: TraceHeader, out_dir: Path, *, model: str | Path | None = None) -> Trace:
    """Record the text of the trace that `header` describes in vLLM, on the CPU, into `out_dir`.

    `model` says where the model is if not under the header's name. Raises `RecordError` if vLLM is missing, the trace
    holds a part of its model only or what vLLM cannot be asked for, or the model or the text is another one.
    """
    check_importable()
    check_recipe(header)
    if header.subset is not None:
        raise RecordError("the trace holds a part of the model only; record it with `kvassay record --engine vllm`")
    files = describe(str(header.model.name if model is None else model))
    sample = sample_again(header, files.identity(), files.tokenizer)
    own = VllmOptions(generate=header.sampling.max_new_tokens or 0)
    (made,) = record_samples(files, [(sample, out_dir)], options_of(header), own)
    return made.trace
