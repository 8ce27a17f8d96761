"""All workloads by name, and `build`: the one way to make a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from kvassay.errors import WorkloadError, did_you_mean
from kvassay.workload import chain, copying, haystack, jsonl, kv, needle, prose, scratchpad, tracking, words
from kvassay.workload.assemble import Draft, Job, assemble
from kvassay.workload.framing import Tokenizer, frame
from kvassay.workload.sample import Sample

QUESTIONS = 3
TEXT_OPTIONS = ("template", "split", "text_path")
"""Keywords of `build` that may stand among a workload's parameters in an experiment file."""


@dataclass(frozen=True)
class Workload:
    """One entry. `role`: `promote` = may speak for a policy, `veto` = only against, `context` = neither.

    `scorer` names the free-running score in `kvassay.measure.task`; teacher-forced NLL and top-1 on the scored
    answer tokens are taken for every workload. `most_questions` = 0 means as many as the parameters allow.
    """

    name: str
    summary: str
    role: str
    scorer: str
    params: type
    draft: Callable[[Job, Any], Draft] | None
    most_questions: int = 0


_ALL = (
    Workload("needle_single", "one pass code hidden in prose", "veto", "first_integer",
             needle.SingleParams, needle.draft_single, 1),
    Workload("needle_multikey", "several pass codes that must be told apart", "promote", "first_integer",
             needle.NeedleParams, needle.draft),
    Workload("needle_generated", "several pass codes, all in text fed token by token as if generated", "veto",
             "first_integer", needle.GeneratedParams, needle.draft_generated),
    Workload("copy", "go on with a list of random words", "promote", "prefix_words",
             copying.CopyParams, copying.draft),
    Workload("kv_short", "value of a key in a block of pairs, short digits or hex", "promote", "starts_with",
             kv.KvParams, kv.draft_short),
    Workload("kv_uuid", "the same with UUID keys and values", "promote", "starts_with",
             kv.UuidParams, kv.draft_uuid),
    Workload("tracking", "follow scattered links to a number", "promote", "prefix_words",
             tracking.TrackingParams, tracking.draft),
    Workload("words", "the word that one writer uses most often", "promote", "starts_with",
             words.WordsParams, words.draft),
    Workload("prose", "plain prose goes on; hardly sees eviction", "context", "prefix_words",
             prose.ProseParams, prose.draft),
    Workload("prose_numbered", "the same with sentences that hold numbers; what policies are fitted on", "context",
             "prefix_words", prose.NumberedParams, prose.draft_numbered),
    Workload("chain", "generated derivation, reasoning-shaped; steps need values far back", "promote",
             "prefix_words", chain.ChainParams, chain.draft),
    Workload("scratchpad", "the same, most of it fed token by token as if generated", "promote",
             "prefix_words", scratchpad.ScratchpadParams, scratchpad.draft, 1),
    Workload("jsonl", "imported traces of a reasoning model, teacher-forced", "promote", "prefix_words",
             jsonl.JsonlParams, None, 1),
)  # fmt: skip

WORKLOADS: Mapping[str, Workload] = MappingProxyType({entry.name: entry for entry in _ALL})


def names() -> tuple[str, ...]:
    """All workload names, in the order of the table."""
    return tuple(WORKLOADS)


def get(name: str) -> Workload:
    """One entry. Raises `WorkloadError` with the nearest name."""
    if name not in WORKLOADS:
        raise WorkloadError(f"unknown workload '{name}'{did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]


def check(name: str, params: Mapping[str, Any], questions: int | None = None) -> Any:
    """The workload's parameters as `build` would take them, checked without tokenizer or file.

    Raises `WorkloadError` for an unknown workload or parameter, a wrong type, a missing path, or too many questions.
    """
    entry = get(name)
    values = _params(entry, {key: value for key, value in params.items() if key not in TEXT_OPTIONS})
    _questions(entry, questions)
    if isinstance(values, jsonl.JsonlParams):
        jsonl.check(values)
    return values


def check_import(name: str, params: Mapping[str, Any], contexts: int) -> None:
    """Refuse an import whose file lacks one of `contexts` rows; other workloads read none. Raises `WorkloadError`."""
    values = check(name, params)
    if isinstance(values, jsonl.JsonlParams):
        jsonl.check_rows(values, contexts)


def build(
    name: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    seed: int = 0,
    index: int = 0,
    questions: int | None = None,
    query_aware: bool = False,
    template: str = "none",
    split: str = "test",
    text_path: str | None = None,
    **params: Any,
) -> Sample:
    """Make one sample of exactly `length` context tokens; the same arguments give the same ids.

    `questions` is the number of branches (3, or what the workload has). `query_aware` puts a preview of the
    questions at the end of the context, where compression sees it. `split` and `text_path` choose the prose.
    Other keywords are the workload's own parameters. Raises `WorkloadError` for anything that does not fit.
    """
    entry = get(name)
    values = _params(entry, params)
    asked = _questions(entry, questions)
    if length < 1:
        raise WorkloadError(f"{name}: length {length} must be at least 1")
    framing = frame(tokenizer, template)
    if entry.draft is None:
        sample = jsonl.build(framing, values, length=length, seed=seed, index=index)
    else:
        hay = haystack.load(split, text_path)
        job = Job(name, length, seed, index, asked, query_aware, framing, hay)
        draft = entry.draft(job, values)
        if query_aware and not draft.preview:
            raise WorkloadError(f"{name}: there is no question to show to compression, query_aware must be false")
        sample = assemble(job, draft)
    recipe = {
        "workload": name,
        "length": length,
        "seed": seed,
        "index": index,
        "questions": asked,
        "query_aware": query_aware,
        "template": template,
        "split": split,
        "text_path": text_path,
        "params": asdict(values),
        "text": dict(sample.meta["haystack"]),
    }
    branches = tuple(replace(b, meta={**b.meta, "scorer": entry.scorer}) for b in sample.branches)
    return replace(sample, branches=branches, meta={**sample.meta, "recipe": recipe})


def rebuild(recipe: Mapping[str, Any], tokenizer: Tokenizer) -> Sample:
    """Build the sample of a recorded recipe (`sample.meta["recipe"]`) again.

    Raises `WorkloadError` where the text is no longer the recorded one (another Python version, another file).
    """
    options = dict(recipe)
    params, text = options.pop("params"), options.pop("text", None)
    sample = build(options.pop("workload"), tokenizer, options.pop("length"), **options, **params)
    now = sample.meta["recipe"]["text"]
    if text is not None and text["sha256"] != now["sha256"]:
        raise WorkloadError(
            f"{sample.workload}: the text ({now['source']}) has sha256 {now['sha256']} under Python {now['python']}, "
            f"the recipe was made with {text['sha256']} under Python {text['python']}"
        )
    return sample


def _questions(entry: Workload, questions: int | None) -> int:
    most = entry.most_questions
    if questions is None:
        return min(QUESTIONS, most) if most else QUESTIONS
    if questions < 1 or (most and questions > most):
        allowed = f"between 1 and {most}" if most else "at least 1"
        raise WorkloadError(f"{entry.name}: questions={questions} must be {allowed}")
    return questions


def _params(entry: Workload, params: Mapping[str, Any]) -> Any:
    """The workload's parameter dataclass. Raises `WorkloadError` for an unknown name or a wrong type."""
    defaults = entry.params()
    known = {field.name: type(getattr(defaults, field.name)) for field in fields(defaults)}
    for key, value in params.items():
        if key not in known:
            raise WorkloadError(f"{entry.name}: unknown parameter '{key}'{did_you_mean(key, known)}")
        if type(value) is not known[key]:
            raise WorkloadError(f"{entry.name}: {key}={value!r} must be of type {known[key].__name__}")
    return entry.params(**params)
