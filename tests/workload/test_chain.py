from __future__ import annotations

import re
from typing import Any

import pytest

from kvassay.errors import WorkloadError
from kvassay.workload.registry import build


def decode(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("index", range(5))
def test_every_intermediate_value_is_exact(index: int, plain: Any) -> None:
    sample = build("chain", plain, 2400, seed=1, index=index, worked=7, steps=2)
    text = decode(plain, sample.context_ids)
    plan = {t: (s, int(a)) for t, s, a in re.findall(r"^(\w+) = (\w+) \+ (\d)\.$", text, flags=re.M)}
    assert len(plan) == 7 + 6
    values = {name: int(v) for name, v in re.findall(r"^(\w+): (\d{3})\.$", text, flags=re.M)}
    worked = re.findall(r"(\w+) = (\w+) \+ (\d)\. (\w+): (\d+)\. (\w+): (\d+)\.", text)
    assert len(worked) == 7
    for target, source, add, again, before, target_again, after in worked:
        assert (source, target) == (again, target_again)
        assert plan[target] == (source, int(add))
        assert values[source] == int(before)
        values[target] = int(after)
        assert int(after) == int(before) + int(add)
    assert len({source for source, _ in plan.values()}) == len(plan)  # no source twice
    for branch in sample.branches:
        full = branch.question_text + branch.answer_text
        lines = full.split("\n")
        assert len(lines) == 2
        for line, target, value in zip(lines, branch.meta["targets"], branch.meta["values"], strict=True):
            source, add = plan[target]
            assert target not in values  # not worked in the context
            assert line == f"{target} = {source} + {add}. {source}: {values[source]}. {target}: {value}."
            assert value == values[source] + add


def test_scored_tokens_are_recalled_from_more_than_512_tokens_back(with_bos: Any) -> None:
    for index in range(4):
        sample = build("chain", with_bos, 2048, index=index)
        for branch in sample.branches:
            pieces = [decode(with_bos, [i]) for i in branch.answer_ids]
            scored = "".join(pieces[i] for i in branch.scored).replace(" ", "")
            recalled = re.findall(r"= (\w+) \+ (\d)\. \w+: (\d+)", branch.question_text + branch.answer_text)
            assert scored == "".join("".join(part) for part in recalled)
            derived = "".join(pieces[i] for i in branch.meta["derived"]).strip()
            assert derived == "".join(str(value) for value in branch.meta["values"])
            assert not set(branch.meta["derived"]) & set(branch.scored)
            # independent count: cut the context after the statement, and encode what is cut off
            text = decode(with_bos, sample.context_ids)
            for source, _, value in recalled:
                rest = text.split(f"{source}: {value}.")[-1]
                assert len(with_bos.encode(rest, add_special_tokens=False)) > 512
            assert min(branch.meta["recall_tokens_back"]) > 512


def test_some_recalled_values_are_results_of_earlier_steps(plain: Any) -> None:
    from_steps = total = 0
    for index in range(6):
        sample = build("chain", plain, 4000, index=index)
        text = decode(plain, sample.context_ids)
        for branch in sample.branches:
            for source, value in re.findall(r"\. (\w+): (\d+)\. \w+: \d+\.", branch.answer_text):
                total += 1
                from_steps += f"{source} = " in text and f". {source}: {value}." in text
    assert total == 36
    assert 12 <= from_steps <= 18  # half, where enough steps lie far enough back


def test_step_ends_close_the_answer_and_lie_on_line_ends(plain: Any) -> None:
    branch = build("chain", plain, 2048, steps=3).branches[0]
    ends = branch.meta["step_ends"]
    assert len(ends) == 3
    assert ends[-1] == len(branch.answer_ids)
    assert [decode(plain, branch.answer_ids[:end]).count("\n") for end in ends] == [0, 1, 2]
    assert all(decode(plain, branch.answer_ids[:end]).endswith(".") for end in ends)


def test_too_short_a_context_says_what_it_takes(plain: Any) -> None:
    with pytest.raises(WorkloadError, match=r"the plan would end about \d+ tokens before the end, 2049 are needed"):
        build("chain", plain, 2048, far=2000)


def test_a_scratchpad_is_the_chain_cut_where_generation_begins(plain: Any) -> None:
    whole = build("chain", plain, 1536, seed=4, questions=1, worked=8, steps=4)
    cut = build("scratchpad", plain, 512, seed=4, generated=1024)
    # the same draws need the same workload name, so compare the structure, and the cut alone exactly
    assert len(cut.context_ids) == 512
    assert len(whole.context_ids) == 1536
    branch = cut.branches[0]
    document = decode(plain, [*cut.context_ids, *branch.question_ids])
    assert document.count("The plan:") == 1
    assert "The plan:" in decode(plain, cut.context_ids)
    worked = re.findall(r"(\w+) = (\w+) \+ (\d)\. (\w+): (\d+)\. (\w+): (\d+)\.", decode(plain, branch.question_ids))
    assert len(worked) == 8  # every worked step is generated
    assert decode(plain, branch.question_ids) == branch.question_text
    recalled = re.findall(r"\. (\w+): (\d+)\. \w+: \d+\.", branch.answer_text)
    in_prompt = [f"{name}: {value}." in decode(plain, cut.context_ids) for name, value in recalled]
    in_generated = [f". {name}: {value}." in branch.question_text for name, value in recalled]
    assert len(recalled) == 4
    assert [a or b for a, b in zip(in_prompt, in_generated, strict=True)] == [True] * 4
    assert any(in_generated)
    for name, value in recalled:
        rest = document.split(f"{name}: {value}.")[-1]
        assert len(plain.encode(rest, add_special_tokens=False)) > 512


def test_a_scratchpad_without_generated_text_is_refused(plain: Any) -> None:
    with pytest.raises(WorkloadError, match="generated=0 must be at least 1"):
        build("scratchpad", plain, 2048, generated=0)


def test_a_scratchpad_has_no_preview_to_show(plain: Any) -> None:
    with pytest.raises(WorkloadError, match="query_aware must be false"):
        build("scratchpad", plain, 1024, query_aware=True)
