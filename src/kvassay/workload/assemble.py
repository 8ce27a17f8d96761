"""From a draft (what to hide, what to ask) to a sample of exactly `length` context tokens.

Whole sentences of prose fill the room that the inserts leave; one fragment in front makes the length exact.
The context is encoded as one text, so its ids are what the tokenizer gives for the prompt as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvassay.errors import WorkloadError
from kvassay.workload import checks
from kvassay.workload.framing import Framing
from kvassay.workload.haystack import Haystack, sentences
from kvassay.workload.sample import Branch, Sample

FRAGMENTS_TRIED = 100
WORDS_CUT = 8


@dataclass(frozen=True)
class Insert:
    """Text to hide at `depth` (0 = start of the prose, 1 = its end), after `joiner`."""

    text: str
    depth: float
    joiner: str = " "


@dataclass(frozen=True)
class Question:
    """What is asked after the context.

    `evidence` must stand in the context exactly once ("" = none to look for), as must the answer where `unique`.
    `scored_text` are the character ranges of `answer` that count; None means all of it. `recalls` are texts
    of the context that the answer needs; each must end more than `far` tokens before the context does.
    `derived` ranges follow from the recalled ones; `step_ends` are the ends (characters) of its steps.
    """

    text: str
    answer: str
    evidence: str
    unique: bool = True
    scored_text: tuple[tuple[int, int], ...] | None = None
    recalls: tuple[str, ...] = ()
    far: int = 0
    derived: tuple[tuple[int, int], ...] = ()
    step_ends: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """Everything a workload decides. `keys` must be distinct; `preview` tells compression what will be asked.

    The last `generated` tokens of the document are not context: they follow it in every branch, before the question.
    """

    questions: tuple[Question, ...]
    inserts: tuple[Insert, ...] = ()
    closing: str = ""
    preview: str = ""
    keys: tuple[str, ...] = ()
    prose: tuple[str, ...] | None = None
    generated: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Name, seed and settings shared by everything that is assembled for one sample."""

    workload: str
    length: int
    seed: int
    index: int
    questions: int
    query_aware: bool
    framing: Framing
    haystack: Haystack

    def rng(self, purpose: str = "") -> random.Random:
        """A generator of its own for each purpose, so that one draw more does not shift the others."""
        return random.Random(f"{self.workload}/{self.seed}/{self.index}/{purpose}")


def assemble(job: Job, draft: Draft) -> Sample:
    """Build, fit and check one sample. Raises `WorkloadError` where it does not fit or a check fails."""
    checks.distinct(draft.keys, job.workload)
    job = replace(job, length=job.length + draft.generated)
    text = _fit(job, draft)
    context_ids = job.framing.context_ids(text)
    branches = tuple(_branch(job, text, question) for question in draft.questions)
    meta = {
        **draft.meta,
        **job.framing.provenance(),
        "haystack": job.haystack.provenance(),
        "canonical": _canonical(job.framing, text, context_ids, branches),
    }
    sample = Sample(job.workload, job.seed, job.index, tuple(context_ids), branches, job.query_aware, meta)
    preview = draft.preview if job.query_aware else ""
    checks.check_sample(sample, job.framing, job.length, draft.questions, preview)
    return _hand_over(sample, job.framing, draft.generated) if draft.generated else sample


def _hand_over(sample: Sample, framing: Framing, generated: int) -> Sample:
    """Move the last tokens of the context in front of every question: the model is to write them itself."""
    ids = sample.context_ids[-generated:]
    text = framing.decode(ids)
    branches = tuple(
        replace(branch, question_ids=(*ids, *branch.question_ids), question_text=text + branch.question_text)
        for branch in sample.branches
    )
    meta = {**sample.meta, "generated": generated}
    return replace(sample, context_ids=sample.context_ids[:-generated], branches=branches, meta=meta)


def _fit(job: Job, draft: Draft) -> str:
    """The context text whose encoding has exactly `length` tokens."""
    framing = job.framing
    ending = draft.closing + (f"\n\n{draft.preview}" if job.query_aware and draft.preview else "") + "\n"
    fixed = framing.head + "".join(f"{insert.joiner}{insert.text}" for insert in draft.inserts) + ending
    room = job.length - len(framing.context_ids(fixed))
    if room < 1:
        raise WorkloadError(
            f"{job.workload}: length {job.length} is too short, the inserted text alone takes "
            f"{job.length - room} tokens"
        )
    source = iter(draft.prose if draft.prose is not None else job.haystack.paragraphs(job.rng("haystack")))
    units, spare = _take(framing, source, room)
    while True:
        rest = "".join(joiner + text for joiner, text in _place(units, draft.inserts)) + ending
        missing = job.length - len(framing.context_ids(framing.head + rest))
        if missing >= 1 or not units:
            return _exact(job, rest, [*spare, *source], missing)
        # Paragraphs that start anew after an inserted block took a few tokens more: give up a sentence.
        spare.append(units.pop()[1])


def _take(framing: Framing, source: Iterator[str], room: int) -> tuple[list[tuple[str, str, int]], list[str]]:
    """Whole sentences within `room` tokens as (joiner, text, tokens); what is left of the last paragraph."""
    units: list[tuple[str, str, int]] = []
    for paragraph in source:
        joiner = "\n\n"
        parts = sentences(paragraph)
        for i, sentence in enumerate(parts):
            cost = len(framing.encode(joiner + sentence))
            if cost >= room:
                return units, parts[i:]
            units.append((joiner, sentence, cost))
            room -= cost
            joiner = " "
    return units, []


def _place(units: Sequence[tuple[str, str, int]], inserts: Sequence[Insert]) -> list[tuple[str, str]]:
    """Put each insert at the sentence boundary nearest to its depth, counted in tokens of prose."""
    total = sum(cost for _, _, cost in units)
    waiting = sorted(inserts, key=lambda insert: insert.depth)
    body: list[tuple[str, str]] = []
    seen = 0
    for joiner, text, cost in units:
        after = joiner
        while waiting and waiting[0].depth * total < seen + cost / 2:
            insert = waiting.pop(0)
            body.append((insert.joiner, insert.text))
            # A paragraph goes on after an inserted sentence; after an inserted line or block it starts anew.
            after = insert.joiner if joiner == " " else joiner
        body.append((after, text))
        seen += cost
    body.extend((insert.joiner, insert.text) for insert in waiting)
    return body


def _exact(job: Job, rest: str, spare: Sequence[str], missing: int) -> str:
    """Put an end of spare text in front so that the whole encodes to exactly `length` tokens."""
    framing = job.framing
    tried = 0
    for words in _candidates(spare):
        fragment = _ending(framing, words, missing)
        if fragment is None:
            continue
        text = framing.head + fragment + rest
        off = job.length - len(framing.context_ids(text))
        if off == 0:
            return text
        # Tokens may merge or split where the fragment meets the rest: aim past that with the next paragraph.
        missing = max(missing + off, 1)
        tried += 1
        if tried == FRAGMENTS_TRIED:
            break
    why = f"{tried} fragments tried" if tried else "the haystack is used up: pass text_path="
    raise WorkloadError(f"{job.workload}: cannot reach exactly {job.length} tokens ({why})")


def _candidates(spare: Sequence[str]) -> Iterator[list[str]]:
    """Words of spare text to take an end of: whole sentences first, then with the last words cut off.

    The latter only matter where all paragraphs end alike, so that no end has the size that is missing.
    """
    for cut in range(WORDS_CUT):
        for i in range(len(spare)):
            words = " ".join(spare[i : i + 2]).split(" ")
            yield words[: len(words) - cut]


def _ending(framing: Framing, words: list[str], tokens: int) -> str | None:
    """The end of a text that takes exactly `tokens` tokens, if it has one."""
    low, high = 0, len(words) - 1
    while low <= high:
        middle = (low + high) // 2
        text = " ".join(words[middle:])
        size = len(framing.encode(text))
        if size == tokens:
            return text
        low, high = (middle + 1, high) if size > tokens else (low, middle - 1)
    return None


def _branch(job: Job, context: str, question: Question) -> Branch:
    """Encode one question with its answer and find which answer tokens count."""
    framing = job.framing
    asked = question.text + framing.tail
    question_ids, answer_ids = framing.question_and_answer(asked, question.answer)
    # The space in front belongs to the evidence's first token.
    before = context[: max(context.find(question.evidence), 0)].rstrip(" ")
    tokens_before = len(framing.context_ids(before))
    meta = {**question.meta, "evidence": question.evidence, "evidence_token": tokens_before}
    if question.recalls:
        meta["recall_tokens_back"] = [
            job.length - len(framing.context_ids(context[: context.rfind(text) + len(text)]))
            for text in question.recalls
        ]
    ends = _token_ends(framing, question_ids, answer_ids)
    if question.derived:
        meta["derived"] = _overlapping(question.answer, ends, question.derived)
    if question.step_ends:
        meta["step_ends"] = [sum(end <= limit for end in ends) for limit in question.step_ends]
    return Branch(
        tuple(question_ids),
        tuple(answer_ids),
        asked,
        question.answer,
        tuple(_overlapping(question.answer, ends, question.scored_text or ((0, len(question.answer)),))),
        round(tokens_before / job.length, 4),
        meta,
    )


def _token_ends(framing: Framing, question_ids: Sequence[int], answer_ids: Sequence[int]) -> list[int]:
    """For each answer token, where its text ends in the answer (characters)."""
    start = len(framing.decode(question_ids))
    return [len(framing.decode([*question_ids, *answer_ids[: i + 1]])) - start for i in range(len(answer_ids))]


def _overlapping(text: str, ends: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of tokens that overlap a range and are not only white space."""
    starts = [0, *ends[:-1]]
    return [
        i
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        if text[start:end].strip() and any(low < end and start < high for low, high in ranges)
    ]


def _canonical(framing: Framing, text: str, context_ids: Sequence[int], branches: Sequence[Branch]) -> bool:
    """Whether encoding context, question and answer as one text gives the very same ids."""
    return all(
        framing.context_ids(text + branch.question_text + branch.answer_text) == [*context_ids, *branch.token_ids]
        for branch in branches
    )
