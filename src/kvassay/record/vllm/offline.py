"""Recording a workload through vLLM's own engine, in this process: the context first, then its questions as a batch.

The questions repeat the context, which they find in the engine's prefix cache; what they recompute of it (vLLM
shares whole blocks) is not stored again.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvassay.errors import RecordError
from kvassay.layout.model import Layout
from kvassay.record.load import ModelFiles
from kvassay.record.options import GREEDY_K, RecordOptions, branch_entry, recipe_record
from kvassay.record.vllm.assemble import Account, assemble
from kvassay.record.vllm.capture import Capture, Cost
from kvassay.record.vllm.install import install
from kvassay.record.vllm.limits import Limits
from kvassay.record.vllm.recorder import Recorder
from kvassay.record.vllm.sequences import Conversation, Request, Sequences
from kvassay.trace.reader import Trace
from kvassay.trace.schema import BranchEntry, Sampling
from kvassay.workload.sample import Branch, Sample

CPU_BLOCK_MULTIPLE = 32
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class VllmOptions:
    """Parameters that only this recorder has; `RecordError` for a value that is not allowed.

    `block_size`: tokens per block, on a CPU a multiple of 32. `generate`: so many answer tokens of the model's own,
    chosen greedily, in place of the workload's answers; 0 for these. `layers`, `kv_heads`, `steps`: as in `Limits`.
    """

    block_size: int = 128
    generate: int = 0
    layers: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    steps: tuple[int, int | None] = (0, None)

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size % CPU_BLOCK_MULTIPLE:
            raise RecordError(
                f"block_size {self.block_size} is not a multiple of {CPU_BLOCK_MULTIPLE}, as vLLM's attention on a CPU "
                "needs; record with 32 and lay other sizes over the trace with `kvassay trace reblock`"
            )
        if self.generate < 0:
            raise RecordError(f"generate is {self.generate}, it must be at least 0")
        if self.steps[0]:
            raise RecordError(f"steps begin at {self.steps[0]}: a trace needs its context, so they begin at 0")


class Recorded(NamedTuple):
    """One recording and what it cost."""

    trace: Trace
    cost: Cost


def check_importable() -> None:
    """`RecordError` that says what to do if vLLM is not in this environment."""
    if importlib.util.find_spec("vllm") is None:
        raise RecordError(
            "vLLM is not in this environment: run `make vllm-setup` once, then this command with "
            "`.venv-vllm/bin/kvassay` in place of `kvassay`"
        )


def check_options(options: RecordOptions) -> None:
    """`RecordError` for an option that this recorder cannot honour."""
    if other := [tap for tap in options.taps if tap != "output"]:
        raise RecordError(f"tap '{other[0]}' cannot be had from vLLM; this recorder has the tap 'output'")
    if options.tap_layers is not None:
        raise RecordError("tap layers are not chosen apart with vLLM; limit the layers recorded (--layers)")
    if options.logits == "full":
        raise RecordError("full logits are not recorded with vLLM; choose topk or none (--logits)")


def record_samples(
    files: ModelFiles,
    samples: Sequence[tuple[Sample, Path]],
    options: RecordOptions,
    own: VllmOptions,
    *,
    overwrite: bool = False,
) -> Iterator[Recorded]:
    """Record each sample into its new folder, all with one engine.

    Raises `RecordError` if vLLM is missing, a sample does not fit the model, or an option cannot be honoured.
    """
    check_importable()
    check_options(options)
    for sample, _ in samples:
        _check_fits(files, sample, options, own)
    recorder = Recorder()
    with _engine(files, [sample for sample, _ in samples], options, own, recorder) as llm:
        for sample, folder in samples:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".capture-", dir=folder.parent) as scratch:
                recorder.start(scratch, _limits(sample, options, own))
                _ask(llm, sample, own)
                recorder.stop()
                capture = Capture(scratch)
                trace = _trace(capture, files, sample, options, own, folder, overwrite)
                yield Recorded(trace, capture.cost())


def _ask(llm: Any, sample: Sample, own: VllmOptions) -> None:
    """Send the context, then all branches at once, through an empty prefix cache."""
    if not llm.reset_prefix_cache():
        raise RecordError("vLLM does not let go of its prefix cache between two contexts")
    _generate(llm, [list(sample.context_ids)], 1)
    _generate(llm, [_prompt(sample, branch, own) for branch in sample.branches], own.generate + 1)


def _prompt(sample: Sample, branch: Branch, own: VllmOptions) -> list[int]:
    return [*sample.context_ids, *(branch.question_ids if own.generate else branch.token_ids)]


def _generate(llm: Any, prompts: Sequence[list[int]], tokens: int) -> None:
    """One output token is sampled at least; the last one is never fed, so it is not in the trace."""
    sampling = importlib.import_module("vllm").SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)


def _limits(sample: Sample, options: RecordOptions, own: VllmOptions) -> Limits:
    context = len(sample.context_ids)
    return Limits(
        layers=own.layers,
        kv_heads=own.kv_heads,
        steps=own.steps,
        q_from=max(context - options.q_tail, 0),
        output="output" in options.taps,
        logits_k=GREEDY_K if options.logits == "none" else options.logits_k,
        logits_from=context,
    )


def _trace(
    capture: Capture,
    files: ModelFiles,
    sample: Sample,
    options: RecordOptions,
    own: VllmOptions,
    folder: Path,
    overwrite: bool,
) -> Trace:
    sequences, context = Sequences(capture), len(sample.context_ids)
    asked = list(sequences.requests.values())
    prompts = [list(sample.context_ids), *(_prompt(sample, branch, own) for branch in sample.branches)]
    if any(list(request.arrived.prompt_ids) != prompt for request, prompt in zip(asked, prompts, strict=False)):
        raise RecordError("vLLM took the requests in another order than they were given")
    if lost := [request.arrived.id for request in asked if request.preempted]:
        raise RecordError(
            f"request {lost[0]} was preempted, for want of KV cache: set VLLM_CPU_KVCACHE_SPACE (GiB) higher"
        )
    reached = [(r, b) for r, b in zip(asked[1:], sample.branches, strict=False) if len(r.tokens) > context]
    if not asked or len(asked[0].tokens) < context or not reached:
        raise RecordError(f"steps end at {own.steps[1]}, before the context and the first question are computed")
    account = Account(
        files=files,
        identity=files.identity(),
        recipe=recipe_record(sample),
        sampling=Sampling(mode="greedy", max_new_tokens=own.generate) if own.generate else Sampling(),
        entries=tuple(_entry(branch, request, context, files.tokenizer) for request, branch in reached),
    )
    conversation = Conversation(context, tuple(r.arrived.id for r, _ in reached), asked[0].arrived.id)
    return assemble(capture, sequences, conversation, account, folder, dtype=options.dtype, overwrite=overwrite)


def _entry(branch: Branch, request: Request, context: int, tokenizer: Any) -> BranchEntry:
    """The branch as given, if that is what ran; else with the answer that did: generated, or cut off."""
    tokens = tuple(request.tokens[context:])
    given = branch_entry(branch)
    if tokens == branch.token_ids:
        return given
    question = min(len(branch.question_ids), len(tokens))
    answer = tokens[question:]
    return given.model_copy(
        update={
            "tokens": len(tokens),
            "question_tokens": question,
            "answer_text": tokenizer.decode(answer),
            "meta": {**given.meta, "scored": list(range(len(answer))), "expected_text": branch.answer_text},
        }
    )


def _check_fits(files: ModelFiles, sample: Sample, options: RecordOptions, own: VllmOptions) -> None:
    longest, native = _longest(sample, own), files.layout.native_context
    if longest > native and not options.allow_beyond_native:
        raise RecordError(
            f"{sample.workload}: {longest} tokens with the question, the answer and the one vLLM samples after it "
            f"exceed the native context of {files.name}, {native}; shorten the sample, or allow it (--beyond-native)"
        )


def _longest(sample: Sample, own: VllmOptions) -> int:
    return max(len(_prompt(sample, branch, own)) for branch in sample.branches) + own.generate + 1


@contextmanager
def _engine(
    files: ModelFiles, samples: Sequence[Sample], options: RecordOptions, own: VllmOptions, recorder: Recorder
) -> Iterator[Any]:
    """vLLM on the CPU in float32, warmed up, with `recorder` in it."""
    longest = max(_longest(sample, own) for sample in samples)
    branches = max(len(sample.branches) for sample in samples)
    with _environment(_settings(files.layout, longest, branches, own, options)):
        vllm = importlib.import_module("vllm")
        with install(recorder):
            llm = vllm.LLM(
                model=files.place,
                enforce_eager=True,
                dtype="float32",
                block_size=own.block_size,
                max_model_len=longest,
                max_num_batched_tokens=options.prefill_chunk,
                max_num_seqs=min(branches, options.prefill_chunk),
                enable_prefix_caching=True,
                async_scheduling=False,
                seed=0,
            )
            try:
                _generate(llm, [list(samples[0].context_ids[:WARM_UP_TOKENS])], 1)
                yield llm
            finally:
                llm.llm_engine.engine_core.shutdown()
                importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory()


def _settings(
    layout: Layout, longest: int, branches: int, own: VllmOptions, options: RecordOptions
) -> Mapping[str, str]:
    """What vLLM reads from the environment; what the user has set stays, but for the one process it needs."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib(layout, longest, branches, own.block_size)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if options.allow_beyond_native:
        wanted["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    kept = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return {**kept, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def cache_gib(layout: Layout, longest: int, branches: int, block_size: int) -> int:
    """GiB of float32 KV cache in which the context and all branches fit, even with nothing shared or dropped."""
    per_token = 4 * sum(layer.kv.elements for layer in layout.storing)
    tokens = (branches + 1) * (longest + block_size)
    return math.ceil(2 * tokens * per_token / 2**30)  # twice: groups and pages are padded


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
