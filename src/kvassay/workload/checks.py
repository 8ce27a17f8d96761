"""Checks that every sample passes before anybody sees it. Each raises `WorkloadError` with the numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvassay.errors import WorkloadError
from kvassay.workload.framing import Framing
from kvassay.workload.sample import Branch, Sample


class Asked(Protocol):
    """What the checks need to know of a question; `assemble.Question` is one."""

    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def answer(self) -> str: ...  # noqa: D102
    @property
    def evidence(self) -> str: ...  # noqa: D102
    @property
    def unique(self) -> bool: ...  # noqa: D102
    @property
    def recalls(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def far(self) -> int: ...  # noqa: D102


def check_sample(sample: Sample, framing: Framing, length: int, questions: Sequence[Asked], preview: str = "") -> None:
    """Run every check on a finished sample."""
    exact_length(sample, length)
    special_tokens(sample, framing)
    text = framing.decode(sample.context_ids)
    for question, branch in zip(questions, sample.branches, strict=True):
        if question.evidence:
            evidence_once(text, question, sample.workload)
        no_leak(question, preview, sample.workload)
        if question.unique:
            answer_once(text, question.answer, sample.workload)
        continuation(branch, framing, sample.workload)
        far_enough(text, question, branch, sample.workload)


def exact_length(sample: Sample, length: int) -> None:
    """The context has exactly `length` tokens, special tokens included."""
    if len(sample.context_ids) != length:
        raise WorkloadError(f"{sample.workload}: context has {len(sample.context_ids)} tokens, not {length}")


def special_tokens(sample: Sample, framing: Framing) -> None:
    """The tokenizer's own prefix stands in front once, and BOS nowhere else outside a chat template."""
    prefix = framing.prefix_ids
    ids = sample.context_ids
    if ids[: len(prefix)] != prefix:
        raise WorkloadError(
            f"{sample.workload}: the context starts with {list(ids[: len(prefix)])}, but the tokenizer puts "
            f"{list(prefix)} in front"
        )
    bos = framing.tokenizer.bos_token_id
    if bos is None or framing.template != "none":
        # A template may spell out its own markers (SmolLM2's turn marker is its BOS); only a double is wrong.
        if bos is not None and ids[:2] == (bos, bos):
            raise WorkloadError(f"{sample.workload}: BOS ({bos}) is doubled at the start")
        return
    wanted = prefix.count(bos)
    found = sum(ids.count(bos) for ids in _all_ids(sample))
    if found != wanted:
        raise WorkloadError(
            f"{sample.workload}: BOS ({bos}) stands {found} times in the prompt, the tokenizer adds {wanted}"
        )


def _all_ids(sample: Sample) -> list[tuple[int, ...]]:
    return [sample.context_ids, *(branch.token_ids for branch in sample.branches)]


def evidence_once(text: str, question: Asked, workload: str) -> None:
    """The evidence is found, whole and once, in the decoded context."""
    found = text.count(question.evidence)
    if found != 1:
        raise WorkloadError(
            f"{workload}: the evidence {question.evidence!r} stands {found} times in the decoded context, not 1"
        )


def no_leak(question: Asked, preview: str, workload: str) -> None:
    """Neither the question nor the preview of questions says the answer."""
    for place, text in (("question", question.text), ("preview of the questions", preview)):
        if count_whole(text, question.answer):
            raise WorkloadError(f"{workload}: the {place} gives the answer {question.answer.strip()!r} away")


def answer_once(text: str, answer: str, workload: str) -> None:
    """The answer stands once in the context: twice, and a policy may keep either."""
    found = count_whole(text, answer)
    if found != 1:
        raise WorkloadError(f"{workload}: the answer {answer.strip()!r} stands {found} times in the context, not 1")


def count_whole(text: str, phrase: str) -> int:
    """How often a phrase stands in a text, not inside a longer word or number."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text))


def distinct(keys: Sequence[str], workload: str) -> None:
    """No key is used twice, else two answers are right."""
    double = [key for key, count in Counter(keys).items() if count > 1]
    if double:
        raise WorkloadError(f"{workload}: the key {double[0]!r} is used {keys.count(double[0])} times")


def continuation(branch: Branch, framing: Framing, workload: str) -> None:
    """The ids of question and answer decode to exactly their texts."""
    wanted = branch.question_text + branch.answer_text
    got = framing.decode(branch.token_ids)
    if got != wanted:
        raise WorkloadError(f"{workload}: question and answer decode to {got!r}, not {wanted!r}")


def far_enough(text: str, question: Asked, branch: Branch, workload: str) -> None:
    """What the answer recalls is in the context, and ends more than `far` tokens before its end."""
    missing = [recall for recall in question.recalls if recall not in text]
    if missing:
        raise WorkloadError(f"{workload}: the recalled text {missing[0]!r} is not in the context")
    for recall, back in zip(question.recalls, branch.meta.get("recall_tokens_back", ()), strict=True):
        if back <= question.far:
            raise WorkloadError(
                f"{workload}: {recall!r} ends {back} tokens before the end of the context, not over {question.far}"
            )
