"""Were all arms asked the same, in the same way? Checks of what went in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from kvassay.measure.aggregate import DENSE
from kvassay.measure.checks import ContextFacts, Finding, Rows, SetFacts, some


def question_visible(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """An arm whose context held the question though the experiment's does not (or the other way round)."""
    for arm, mine in rows.items():
        other = [key for key, row in mine.items() if row.query_aware != facts.query_aware]
        if other:
            seen = "held" if not facts.query_aware else "did not hold"
            yield Finding(
                "question_visible", "invalid", arm, f"its context {seen} the question in {some(other, len(mine))}"
            )
        longer = [key for key, row in mine.items() if not _same_prompt(rows, arm, key)]
        if longer and not other:
            key = longer[0]
            base = rows[DENSE][key]
            yield Finding(
                "question_visible", "invalid", arm,
                f"compressed {mine[key].context_tokens} tokens and was then fed {mine[key].question_tokens}, dense "
                f"{base.context_tokens} and {base.question_tokens}, in {some(longer, len(mine))}",
            )  # fmt: skip


def _same_prompt(rows: Rows, arm: str, key: tuple[str, int]) -> bool:
    base, row = rows.get(DENSE, {}).get(key), rows[arm][key]
    if base is None:
        return True
    return (row.context_tokens, row.question_tokens) == (base.context_tokens, base.question_tokens)


def other_prefill(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """An arm whose rows say another prefill than the one declared; a declared one of its own is noted."""
    for arm, mine in rows.items():
        declared = "own" if facts.arms[arm].own_prefill else "shared_dense"
        other = [key for key, row in mine.items() if row.prefill != declared]
        if other:
            yield Finding(
                "other_prefill", "invalid", arm,
                f"prefilled '{mine[other[0]].prefill}' and not '{declared}' as declared, in {some(other, len(mine))}",
            )  # fmt: skip
        elif declared == "own":
            yield Finding(
                "other_prefill", "note", arm,
                "prefilled with its policy in the loop: its difference from dense is not the policy's reading alone",
            )  # fmt: skip


def future_query(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """A context compressed once keeps the same whatever is asked later; references may look ahead, and what an arm
    that goes on compressing frees is counted after the answer."""
    for arm, mine in rows.items():
        if facts.arms[arm].reference or facts.arms[arm].decides_later:
            continue
        first: dict[str, dict[str, float]] = {}
        other = [key for key, row in mine.items() if first.setdefault(key[0], row.blocks_freed) != row.blocks_freed]
        if other:
            yield Finding(
                "future_query", "invalid", arm,
                f"the blocks freed in a context depend on the question asked afterwards, in {some(other, len(mine))}",
            )  # fmt: skip


def bos(facts: SetFacts) -> Iterator[Finding]:
    """Contexts that begin with other special tokens than the tokenizer's, or with one too many."""
    wrong = [(context.trace, message) for context in facts.contexts if (message := _opening(context))]
    if wrong:
        yield Finding(
            "bos", "invalid", None,
            f"{wrong[0][0]} {wrong[0][1]} ({len(wrong)} of {len(facts.contexts)} contexts)",
        )  # fmt: skip


def _opening(context: ContextFacts) -> str | None:
    opening, ids = context.opening, context.first_ids
    if ids[: len(opening)] != opening:
        return f"begins with {list(ids[: len(opening)])}, the tokenizer begins every text with {list(opening)}"
    special = opening[-1] if opening else context.bos
    if special is None:
        return None
    run = len(list(takewhile(lambda token: token == special, ids[max(0, len(opening) - 1) :])))
    allowed = 1  # without an opening, a chat template may spell its own marker, which some models use as BOS
    if run <= allowed:
        return None
    return f"begins with {run} times the special token {special}, the tokenizer puts {list(opening)} in front"


def answer_cut(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """Replies shorter than the protocol's though the model did not end them; then what ended early by itself."""
    dense = rows.get(DENSE, {})
    longest: dict[tuple[str, int], int] = {}
    for mine in rows.values():
        for key, row in mine.items():
            longest[key] = max(longest.get(key, 0), row.generated_tokens)
    for arm, mine in rows.items():
        cut, ended = [], []
        for key, row in mine.items():
            allowed = max(longest[key], min(facts.free_tokens, row.answer_tokens))
            if row.generated_tokens < allowed and row.ended == "length":
                cut.append(key)
            elif row.ended == "end_token" and key in dense and row.generated_tokens < dense[key].generated_tokens:
                ended.append(key)
        if cut:
            row = mine[cut[0]]
            yield Finding(
                "answer_cut", "invalid", arm,
                f"replies stop after {row.generated_tokens} tokens without an end token (a stop word?), the answer "
                f"has {row.answer_tokens}, in {some(cut, len(mine))}",
            )  # fmt: skip
        if ended:
            yield Finding("answer_cut", "note", arm, f"ends its reply before dense does in {some(ended, len(mine))}")
    yield from _longer_answers(rows, facts)


def _longer_answers(rows: Rows, facts: SetFacts) -> Iterator[Finding]:
    """Answers that the protocol never lets an arm finish."""
    longest = max(row.answer_tokens for mine in rows.values() for row in mine.values())
    if 0 < facts.free_tokens < longest:
        yield Finding(
            "answer_cut", "note", None,
            f"answers have up to {longest} tokens and {facts.free_tokens} are generated: the task score of such an "
            "answer stays below full marks",
        )  # fmt: skip
