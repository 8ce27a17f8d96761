from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvassay.errors import WorkloadError
from kvassay.workload import checks, haystack
from kvassay.workload.assemble import Draft, Insert, Job, Question, assemble
from kvassay.workload.framing import frame
from kvassay.workload.registry import build


def job(tokenizer: Any, length: int = 600, query_aware: bool = False, template: str = "none") -> Job:
    return Job("probe", length, 0, 0, 1, query_aware, frame(tokenizer, template), haystack.load())


FACT = "The pass code of Anna is 48213."
ASK = Question("The pass code of Anna is", " 48213", FACT)


def draft(question: Question = ASK, inserts: tuple[str, ...] = (FACT,), **more: Any) -> Draft:
    return Draft((question,), tuple(Insert(text, 0.5) for text in inserts), **more)


def test_a_sound_draft_passes(plain: Any) -> None:
    sample = assemble(job(plain), draft())
    assert len(sample.context_ids) == 600
    assert 0.3 < sample.branches[0].depth < 0.7


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (draft(inserts=()), r"the evidence .* stands 0 times"),
        (draft(inserts=(FACT, FACT)), r"the evidence .* stands 2 times"),
        (draft(inserts=(FACT, "Mind that 48213 is a number.")), "the answer '48213' stands 2 times"),
        (draft(replace(ASK, text="Is it 48213? The pass code of Anna is")), "the question gives the answer '48213'"),
        (draft(keys=("Anna", "Hugo", "Anna")), "the key 'Anna' is used 2 times"),
        (draft(replace(ASK, recalls=(FACT,), far=590)), r"ends \d+ tokens before the end of the context, not over 590"),
        (draft(replace(ASK, recalls=("nowhere",))), "the recalled text 'nowhere' is not in the context"),
    ],
)
def test_leaks_and_doubles_are_refused(bad: Draft, message: str, plain: Any) -> None:
    with pytest.raises(WorkloadError, match=message):
        assemble(job(plain), bad)


def test_a_longer_number_is_no_second_answer(plain: Any) -> None:
    assemble(job(plain), draft(inserts=(FACT, "Mind that 148213 is a number.")))


def test_a_preview_that_answers_is_a_leak_only_where_it_is_shown(plain: Any) -> None:
    leaking = draft(preview="Say the code 48213 of Anna.")
    assemble(job(plain), leaking)
    with pytest.raises(WorkloadError, match="the preview of the questions gives the answer '48213' away"):
        assemble(job(plain, query_aware=True), leaking)


def test_bos_is_never_doubled_nor_missing(with_bos: Any, plain: Any) -> None:
    sample = build("needle_single", with_bos, 600)
    framing = frame(with_bos)
    assert framing.prefix_ids == (0,)
    checks.special_tokens(sample, framing)
    with pytest.raises(WorkloadError, match=r"BOS \(0\) stands 2 times in the prompt, the tokenizer adds 1"):
        checks.special_tokens(replace(sample, context_ids=(0, *sample.context_ids)), framing)
    with pytest.raises(WorkloadError, match=r"but the tokenizer puts \[0\] in front"):
        checks.special_tokens(replace(sample, context_ids=sample.context_ids[1:]), framing)
    with pytest.raises(WorkloadError, match=r"stands 1 times in the prompt, the tokenizer adds 0"):
        checks.special_tokens(sample, frame(plain))


def test_a_needle_encoded_with_special_tokens_is_found_out(with_bos: Any) -> None:
    """gkamradt/needle-in-a-haystack #57: BOS inside the context, where the needle was put in as ids."""
    sample = build("needle_single", with_bos, 600)
    at = sample.branches[0].meta["evidence_token"]
    wrong = replace(sample, context_ids=(*sample.context_ids[:at], 0, *sample.context_ids[at:-1]))
    with pytest.raises(WorkloadError, match=r"BOS \(0\) stands 2 times"):
        checks.special_tokens(wrong, frame(with_bos))


def test_exact_length_counts(plain: Any) -> None:
    sample = build("needle_single", plain, 600)
    with pytest.raises(WorkloadError, match="context has 600 tokens, not 601"):
        checks.exact_length(sample, 601)


def test_a_token_across_the_boundary_is_refused(plain: Any) -> None:
    framing = frame(plain)
    question, answer = framing.question_and_answer("The pass code is", " the")
    assert framing.decode(question + answer) == "The pass code is the"
    with pytest.raises(WorkloadError, match="a token crosses from the question"):
        framing.question_and_answer("The pass code is ", "the")


def test_an_answer_that_is_not_the_continuation_is_refused(plain: Any) -> None:
    sample = build("needle_single", plain, 600)
    branch = replace(sample.branches[0], answer_text=" 99999")
    with pytest.raises(WorkloadError, match="question and answer decode to"):
        checks.continuation(branch, frame(plain), "probe")


def test_the_chat_template_is_applied_once_and_recorded(with_bos: Any) -> None:
    sample = build("needle_multikey", with_bos, 1200, template="chat")
    text = with_bos.decode(list(sample.context_ids))
    assert len(sample.context_ids) == 1200
    assert text.startswith("<bos><|turn|>user\n")
    assert text.count("<bos>") == 1
    for branch in sample.branches:
        assert branch.question_text.endswith("<|end|>\n<|turn|>assistant\n")
    assert sample.meta["template"] == "chat"
    assert len(sample.meta["template_sha256"]) == 64
    plain_sample = build("needle_multikey", with_bos, 1200)
    assert (plain_sample.meta["template"], plain_sample.meta["template_sha256"]) == ("none", None)
    assert plain_sample.meta["prefix_ids"] == [0]


def test_a_template_that_loses_the_text_is_refused(with_bos: Any) -> None:
    kept = with_bos.chat_template
    try:
        with_bos.chat_template = "{% for m in messages %}{{ m['content'] | lower }}{% endfor %}"
        with pytest.raises(WorkloadError, match="drops or rewrites"):
            frame(with_bos, "chat")
    finally:
        with_bos.chat_template = kept
