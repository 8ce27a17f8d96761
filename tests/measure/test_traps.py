"""Ways in which an evaluation fools itself, each planted in otherwise sound results and caught by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvassay.measure.aggregate import aggregate
from kvassay.measure.checks import NAMES, ArmFacts, ContextFacts, Finding, SetFacts
from kvassay.measure.inspect import inspect
from kvassay.measure.result import BranchResult
from kvassay.policy.budget import Budget, Protection
from tests.rows import DENSE_BYTES, row

CONTEXTS, QUESTIONS, LENGTH, NEW = 6, 2, 2048, 9
QUARTER, HALF = Budget("keep_tokens", 0.25), Budget("keep_tokens", 0.5)
SNAP, WIDE, KNORM = "snapkv keep=0.25", "snapkv keep=0.5", "knorm keep=0.25"
ARMS = {
    "dense": ArmFacts("dense", "dense"),
    "dense'": ArmFacts("dense'", "dense"),
    SNAP: ArmFacts(SNAP, "snapkv", {"window": 32}, QUARTER, evicts_only=True),
    WIDE: ArmFacts(WIDE, "snapkv", {"window": 32}, HALF, evicts_only=True),
    KNORM: ArmFacts(KNORM, "knorm", {}, QUARTER, evicts_only=True),
}
FACTS = SetFacts(
    arms=ARMS,
    contexts=[ContextFacts(f"t{n}", (2, 100 + n, 7, 8), (2,), 2) for n in range(CONTEXTS)],
    query_aware=False,
    free_tokens=16,
    block_size=16,
    protection=Protection(4, 32),
)
LOSS = {"dense": 0.0, "dense'": 0.001, SNAP: 0.4, WIDE: 0.2, KNORM: 0.8}
FRACTION = {
    "dense": 1.0,
    "dense'": 1.0,
    **{arm: (ARMS[arm].budget.tokens(LENGTH) + NEW) / (LENGTH + NEW) for arm in (SNAP, WIDE, KNORM)},  # type: ignore[union-attr]
}


def sound() -> list[BranchResult]:
    """Every arm holds what its budget says and loses as LOSS says, with a little scatter."""
    rows = []
    for context in range(CONTEXTS):
        for branch in range(QUESTIONS):
            for number, arm in enumerate(ARMS):
                fraction = FRACTION[arm]
                scatter = 0.01 * ((3 * context + 5 * branch + 7 * number) % 4)
                held = {"retained_bytes": fraction * DENSE_BYTES, "retained_bytes_scope": fraction * DENSE_BYTES}
                rows.append(
                    row(
                        arm, f"t{context}", branch, **held,
                        retained_fraction=fraction, retained_fraction_scope=fraction, read_bytes=fraction * 900 * 1024,
                        read_fraction=fraction, selected_tokens=fraction * (LENGTH + NEW), generated_tokens=6,
                        nll=0.5 + LOSS[arm] + scatter, kl=LOSS[arm], generated=f" {1234 + number} {context}{branch}",
                    )
                )  # fmt: skip
    return rows


def change(arm: str, how: Callable[[BranchResult], dict[str, Any]]) -> list[BranchResult]:
    return [replace(r, **how(r)) if r.arm == arm else r for r in sound()]


def found(rows: list[BranchResult], facts: SetFacts = FACTS) -> list[tuple[str, str, str | None]]:
    return [(f.name, f.severity, f.arm) for f in everything(rows, facts)]


def everything(rows: list[BranchResult], facts: SetFacts = FACTS) -> tuple[Finding, ...]:
    findings = inspect(rows, aggregate(rows).cells, facts)
    assert {f.name for f in findings} <= set(NAMES)
    assert all("\n" not in f.message for f in findings)
    return findings


def test_sound_results_give_no_finding() -> None:
    assert found(sound()) == []


def test_an_arm_given_the_question_by_mistake() -> None:
    rows = change(SNAP, lambda r: {"query_aware": True})
    assert found(rows) == [("question_visible", "invalid", SNAP)]
    assert everything(rows)[0].message.endswith("in 12 of 12 questions, first t0 question 0")


def test_an_arm_whose_context_holds_the_question_whatever_it_is_called() -> None:
    longer = change(SNAP, lambda r: {"context_tokens": LENGTH + 6, "question_tokens": 0} if r.branch else {})
    assert ("question_visible", "invalid", SNAP) in found(longer)


def test_an_arm_with_another_prefill_path() -> None:
    assert found(change(SNAP, lambda r: {"prefill": "own"})) == [("other_prefill", "invalid", SNAP)]
    declared = replace(FACTS, arms={**ARMS, SNAP: replace(ARMS[SNAP], own_prefill=True)})
    assert found(change(SNAP, lambda r: {"prefill": "own"}), declared) == [("other_prefill", "note", SNAP)]
    assert found(sound(), declared) == [("other_prefill", "invalid", SNAP)]  # declared, and not done


@pytest.mark.parametrize(
    ("ids", "opening", "message"),
    [
        ((2, 2, 2, 7), (2,), "t3 begins with 3 times the special token 2, the tokenizer puts [2] in front"),
        ((2, 2, 2, 7), (), "t3 begins with 3 times the special token 2, the tokenizer puts [] in front"),
        ((7, 8, 9, 7), (2,), "t3 begins with [7], the tokenizer begins every text with [2]"),
    ],
)
def test_three_bos_tokens_or_none(ids: tuple[int, ...], opening: tuple[int, ...], message: str) -> None:
    contexts = [ContextFacts(f"t{n}", (*opening, 7, 8), opening, 2) for n in range(CONTEXTS)]
    contexts[3] = replace(contexts[3], first_ids=ids)
    (finding,) = everything(sound(), replace(FACTS, contexts=contexts))
    assert finding == Finding("bos", "invalid", None, f"{message} (1 of 6 contexts)")


def test_a_chat_template_that_spells_its_marker_once_is_no_double_bos() -> None:
    contexts = [ContextFacts("t0", (1, 520, 198), (), 1)]
    assert found(sound(), replace(FACTS, contexts=contexts)) == []


def test_a_stop_word_that_cuts_the_answer() -> None:
    cut = change(SNAP, lambda r: {"generated": " 12", "generated_tokens": 2} if r.trace == "t0" else {})
    (finding,) = everything(cut)
    assert (finding.name, finding.severity, finding.arm) == ("answer_cut", "invalid", SNAP)
    assert "stop after 2 tokens without an end token (a stop word?), the answer has 4, in 2 of 12" in finding.message


def test_a_stop_word_that_cuts_every_arms_answer() -> None:
    rows = [replace(r, generated_tokens=3) for r in sound()]
    assert [(name, arm) for name, _, arm in found(rows)] == [("answer_cut", arm) for arm in ARMS]


def test_a_reply_that_the_model_ends_itself_is_no_cut() -> None:
    rows = change(SNAP, lambda r: {"generated_tokens": 2, "ended": "end_token"})
    assert found(rows) == [("answer_cut", "note", SNAP)]


def test_answers_longer_than_the_protocol_generates_are_noted() -> None:
    assert ("answer_cut", "note", None) in found(sound(), replace(FACTS, free_tokens=3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"retained_fraction": 0.5},  # of some other total
        {"retained_fraction_scope": 0.5},
        {"read_fraction": 0.25},  # 0.2533 is right: the budget's name is not the fraction read
    ],
)
def test_a_mislabelled_denominator(wrong: dict[str, float]) -> None:
    assert ("denominator", "invalid", SNAP) in found(change(SNAP, lambda r: wrong))


def test_a_scope_smaller_than_the_model_is_told_from_a_wrong_one() -> None:
    """A quarter of the bytes lie outside the scope and stay; dense's in scope then are three quarters."""

    def half_scope(r: BranchResult) -> dict[str, float]:
        scope = r.retained_fraction * 0.75 * DENSE_BYTES
        whole = scope + 0.25 * DENSE_BYTES
        return {
            "retained_bytes": whole,
            "retained_bytes_scope": scope,
            "retained_fraction": whole / DENSE_BYTES,
            "retained_fraction_scope": r.retained_fraction,
        }

    assert found(change(SNAP, half_scope)) == []
    of_all = change(SNAP, lambda r: {**half_scope(r), "retained_fraction_scope": r.retained_fraction * 0.75})
    assert [f for f in found(of_all) if f[0] == "denominator"] == [("denominator", "invalid", SNAP)]


def better(r: BranchResult) -> dict[str, Any]:
    return {"nll": 0.3 + 0.01 * ((int(r.trace[1:]) + r.branch) % 3), "kl": 0.2}


def test_a_policy_that_beats_dense_is_suspect_and_the_leak_checks_rerun() -> None:
    (finding,) = everything(change(SNAP, better))
    assert (finding.name, finding.severity, finding.arm) == ("beats_dense", "suspect", SNAP)
    assert finding.message.endswith("leak checks ran, none fired: question_visible, future_query, other_prefill")
    assert "nll -0.2" in finding.message


def test_references_that_beat_dense_too_are_named() -> None:
    """A reference sees which tokens matter and leaves the others out: then that alone can answer better here."""
    facts = replace(FACTS, arms={**ARMS, KNORM: replace(ARMS[KNORM], reference=True)})
    rows = [replace(r, **better(r)) if r.arm == KNORM else r for r in change(SNAP, better)]
    (finding,) = [f for f in everything(rows, facts) if f.arm == SNAP]
    assert finding.severity == "suspect"
    assert finding.message.endswith(f"; so are references, which only leave tokens out: {KNORM}")


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        (lambda r: {"query_aware": True}, "question_visible"),
        (lambda r: {"prefill": "own"}, "other_prefill"),
        (lambda r: {"blocks_freed": {**r.blocks_freed, "compaction": 90.0 + r.branch}}, "future_query"),
    ],
)
def test_it_is_invalid_only_if_a_leak_check_fires(leak: Callable[[BranchResult], dict[str, Any]], name: str) -> None:
    rows = change(SNAP, lambda r: {**better(r), **leak(r)})
    assert found(rows) == [(name, "invalid", SNAP), ("beats_dense", "invalid", SNAP)]
    elsewhere = [replace(r, **leak(r)) if r.arm == KNORM else r for r in change(SNAP, better)]
    assert found(elsewhere) == [(name, "invalid", KNORM), ("beats_dense", "suspect", SNAP)]


def test_what_goes_on_compressing_may_free_more_after_a_longer_answer() -> None:
    facts = replace(FACTS, arms={**ARMS, SNAP: replace(ARMS[SNAP], decides_later=True)})
    rows = change(SNAP, lambda r: {"blocks_freed": {**r.blocks_freed, "compaction": 90.0 + r.branch}})
    assert found(rows, facts) == [] and found(rows) == [("future_query", "invalid", SNAP)]
    (finding,) = everything(change(SNAP, better), facts)  # nor is that check said to have found nothing
    assert finding.message.endswith("leak checks ran, none fired: question_visible, other_prefill")


def test_a_reference_may_beat_dense_and_see_the_future() -> None:
    facts = replace(FACTS, arms={**ARMS, SNAP: replace(ARMS[SNAP], reference=True)})
    rows = change(SNAP, lambda r: {**better(r), "blocks_freed": {"compaction": 1.0 * r.branch}})
    assert found(rows, facts) == [("beats_dense", "note", SNAP)]


def copy_of(other: str) -> Callable[[BranchResult], dict[str, Any]]:
    answers = {(r.trace, r.branch): r for r in sound() if r.arm == other}

    def answer(r: BranchResult) -> dict[str, Any]:
        base = answers[r.trace, r.branch]
        return {"generated": base.generated, "nll": base.nll, "kl": base.kl}

    return answer


def test_two_arms_with_identical_outputs() -> None:
    (finding,) = everything(change(KNORM, copy_of(SNAP)))
    assert (finding.name, finding.severity) == ("identical_arms", "suspect")
    assert "'snapkv keep=0.25' and 'knorm keep=0.25'" in finding.message
    # A policy that reports a quarter of the bytes and answers like dense to the last bit was never applied.
    (finding,) = everything(change(KNORM, copy_of("dense")))
    assert (finding.name, finding.severity) == ("identical_arms", "invalid")


def test_an_arm_that_does_nothing_and_holds_state_for_it_was_not_applied() -> None:
    idle = copy_of("dense")
    base = {(r.trace, r.branch): r for r in sound() if r.arm == "dense"}

    def waiting(r: BranchResult, more: float) -> dict[str, Any]:
        mine = base[r.trace, r.branch]
        amounts = {"read_bytes": mine.read_bytes, "read_fraction": 1.0, "selected_tokens": mine.selected_tokens}
        share = dict.fromkeys(("retained_fraction", "retained_fraction_scope"), 1.0 + more)
        held = dict.fromkeys(("retained_bytes", "retained_bytes_scope"), mine.retained_bytes * (1 + more))
        return {**idle(r), **amounts, **held, **share}

    (finding,) = [f for f in everything(change(KNORM, lambda r: waiting(r, 0.2))) if f.name == "identical_arms"]
    assert finding.severity == "suspect" and finding.message.endswith("some hold more beside: not applied")
    (finding,) = [f for f in everything(change(KNORM, lambda r: waiting(r, -0.2))) if f.name == "identical_arms"]
    assert finding.severity == "invalid"


def test_one_bit_apart_is_not_identical() -> None:
    copied = copy_of(SNAP)
    rows = change(KNORM, lambda r: {**copied(r), "nll": copied(r)["nll"] + (1e-15 if r.trace == "t5" else 0)})
    assert found(rows) == []


def test_identical_arms_that_have_a_reason_are_notes() -> None:
    assert found(change("dense'", copy_of("dense"))) == [("identical_arms", "note", None)]
    arms = dict(ARMS)
    arms[SNAP] = replace(ARMS[SNAP], policy="recency", parameters={})
    arms[WIDE] = replace(ARMS[WIDE], policy="other")
    arms[KNORM] = replace(ARMS[KNORM], policy="streaming", parameters={"sink": 4})
    assert found(change(KNORM, copy_of(SNAP)), replace(FACTS, arms=arms)) == [("identical_arms", "note", None)]
    arms[KNORM] = replace(arms[KNORM], parameters={"sink": 64})
    assert found(change(KNORM, copy_of(SNAP)), replace(FACTS, arms=arms)) == [("identical_arms", "suspect", None)]


def test_a_budget_that_changes_nothing() -> None:
    (finding,) = everything(change(WIDE, copy_of(SNAP)))
    assert (finding.name, finding.severity) == ("no_effect", "invalid")
    assert finding.message.startswith("budget of snapkv (snapkv keep=0.25, snapkv keep=0.5): the same answers")
    one = {r.trace + str(r.branch): r for r in sound() if r.arm == SNAP}
    same = change(WIDE, lambda r: {**vars(one[r.trace + str(r.branch)]), "arm": WIDE})
    assert ("no_effect", "suspect", None) in found(same)


def test_a_parameter_that_changes_nothing() -> None:
    arms = {**ARMS, KNORM: replace(ARMS[SNAP], label=KNORM, parameters={"window": 64})}
    (finding,) = everything(change(KNORM, copy_of(SNAP)), replace(FACTS, arms=arms))
    assert (finding.name, finding.severity) == ("no_effect", "suspect")
    assert finding.message.startswith("window of snapkv (snapkv keep=0.25, knorm keep=0.25)")


def test_a_sweep_within_noise_is_noted() -> None:
    def unsteady(r: BranchResult) -> dict[str, Any]:
        n = int(r.trace[1:])
        return {"nll": 0.9 + 0.3 * n + (0.01 if r.arm == SNAP else 0.0), "kl": 0.4 + 0.1 * n}

    rows = [replace(r, **unsteady(r)) if r.arm in (SNAP, WIDE) else r for r in sound()]
    (finding,) = everything(rows)
    assert (finding.name, finding.severity) == ("no_effect", "note")
    assert finding.message.endswith("task, top1, nll, kl differ by less than noise")


def holding(fraction: float) -> Callable[[BranchResult], dict[str, Any]]:
    names = ("retained_fraction", "retained_fraction_scope")
    held = {"retained_bytes": fraction * DENSE_BYTES, "retained_bytes_scope": fraction * DENSE_BYTES}
    return lambda r: {**dict.fromkeys(names, fraction), **held}


@pytest.mark.parametrize(
    ("tokens", "base"),
    [
        (0.75 * LENGTH, "the share removed"),  # "compression ratio" read the other way round
        (0.25 * (LENGTH - 36) + 36 + 10, None),  # within one block and 5%: rounding
    ],
)
def test_a_budget_in_percent_of_the_wrong_thing(tokens: float, base: str | None) -> None:
    rows = change(SNAP, holding((tokens + NEW) / (LENGTH + NEW)))
    if base is None:
        assert found(rows) == []
    else:
        (finding,) = everything(rows)
        assert (finding.name, finding.severity, finding.arm) == ("budget_base", "suspect", SNAP)
        assert finding.message.endswith(f"keep=0.25 asks for 512: as if it were {base}")


def test_a_budget_of_the_question_too() -> None:
    """A long question: a quarter of context and question is 200 tokens more than a quarter of the context."""
    rows = [replace(r, question_tokens=800, answer_tokens=4) for r in sound()]
    kept = (0.25 * (LENGTH + 803) + 803) / (LENGTH + 803)
    plain = (0.25 * LENGTH + 803) / (LENGTH + 803)
    half = (0.5 * LENGTH + 803) / (LENGTH + 803)
    kinds = {SNAP: kept, KNORM: plain, WIDE: half}
    rows = [replace(r, **holding(kinds[r.arm])(r)) if r.arm in kinds else r for r in rows]
    (finding,) = everything(rows)
    assert (finding.name, finding.severity, finding.arm) == ("budget_base", "suspect", SNAP)
    assert finding.message.endswith("as if it were a share of context, question and answer")


def test_a_budget_of_the_whole_model() -> None:
    """Half of the bytes lie outside the scope; the arm empties its scope until the model holds 70%."""
    arms = {**ARMS, SNAP: replace(ARMS[SNAP], budget=Budget("keep_tokens", 0.7))}
    whole = (0.7 * LENGTH + NEW) / (LENGTH + NEW)
    scope = whole - 0.5
    amounts = {
        "retained_bytes": whole * DENSE_BYTES,
        "retained_fraction": whole,
        "retained_bytes_scope": scope * DENSE_BYTES,
        "retained_fraction_scope": scope / 0.5,
    }
    (finding,) = everything(change(SNAP, lambda r: amounts), replace(FACTS, arms=arms))
    assert (finding.name, finding.severity, finding.arm) == ("budget_base", "suspect", SNAP)
    assert finding.message.endswith("as if it were a share of the whole model's cache")


def test_a_selection_that_reads_far_more_than_its_budget() -> None:
    arms = {**ARMS, SNAP: ArmFacts(SNAP, "snapkv", {"window": 32}, Budget("read_tokens", 0.25))}
    facts = replace(FACTS, arms=arms)
    more = change(SNAP, lambda r: {"selected_tokens": 700.0})
    assert found(more, facts) == [("budget_base", "note", SNAP)]  # 1.4 times, of nothing that we know
    most = change(SNAP, lambda r: {"selected_tokens": 1300.0})
    assert found(most, facts) == [("budget_base", "suspect", SNAP)]


def test_too_few_samples() -> None:
    few = [r for r in sound() if r.trace in ("t0", "t1", "t2", "t3")]
    (finding,) = everything(few)
    assert (finding.name, finding.severity, finding.arm) == ("underpowered", "note", None)
    assert finding.message == "4 contexts only: no intervals, and no test (they need 5)"
