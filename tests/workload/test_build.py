from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvassay.errors import WorkloadError
from kvassay.workload.haystack import sentences
from kvassay.workload.kv import KvParams
from kvassay.workload.registry import WORKLOADS, build, check, names, rebuild
from kvassay.workload.sample import Sample

GENERATED = [name for name in names() if name != "jsonl"]


def text_of(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", GENERATED)
def test_the_same_seed_gives_the_same_sample_and_another_index_another(name: str, plain: Any) -> None:
    first = build(name, plain, 1800, seed=3, index=1)
    assert build(name, plain, 1800, seed=3, index=1) == first
    assert build(name, plain, 1800, seed=3, index=2).context_ids != first.context_ids
    assert build(name, plain, 1800, seed=4, index=1).context_ids != first.context_ids


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("length", [1700, 2048, 3001])
def test_the_context_has_exactly_the_length_with_and_without_bos(
    name: str, length: int, plain: Any, with_bos: Any
) -> None:
    for tokenizer, opening in ((plain, None), (with_bos, 0)):
        sample = build(name, tokenizer, length, seed=0, index=length)
        assert len(sample.context_ids) == length
        assert (sample.context_ids[0] == opening) is (opening == 0)
        assert sample.context_ids.count(0) == (opening == 0)
        assert all(0 not in branch.token_ids for branch in sample.branches)


@pytest.mark.parametrize("name", GENERATED)
def test_the_parts_are_what_the_tokenizer_gives_for_the_whole_text(name: str, with_bos: Any) -> None:
    sample = build(name, with_bos, 2048)
    context = text_of(with_bos, sample.context_ids[1:])
    for branch in sample.branches:
        whole = with_bos.encode(context + branch.question_text + branch.answer_text)
        assert whole == [*sample.context_ids, *branch.token_ids]
    assert sample.meta["canonical"] is True


@pytest.mark.parametrize("name", GENERATED)
def test_json_gives_the_equal_sample_and_the_recipe_makes_it_again(name: str, plain: Any) -> None:
    sample = build(name, plain, 1800, seed=9, index=4)
    read = Sample.from_json(sample.to_json())
    assert read.to_json() == sample.to_json()
    assert read.context_ids == sample.context_ids
    assert [branch.scored for branch in read.branches] == [branch.scored for branch in sample.branches]
    assert rebuild(read.meta["recipe"], plain) == sample


def test_a_recipe_made_with_other_text_is_refused(plain: Any) -> None:
    recipe = dict(build("needle_multikey", plain, 900).meta["recipe"])
    recipe["text"] = {**recipe["text"], "sha256": "0" * 64, "python": "3.9.1"}
    with pytest.raises(WorkloadError, match=r"made with 0{64} under Python 3\.9\.1"):
        rebuild(recipe, plain)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(700, 4000), index=st.integers(0, 50), bos=st.booleans())
def test_needles_fit_any_length(length: int, index: int, bos: bool, plain: Any, with_bos: Any) -> None:
    tokenizer = with_bos if bos else plain
    sample = build("needle_multikey", tokenizer, length, index=index, query_aware=index % 2 == 0)
    assert len(sample.context_ids) == length
    text = text_of(tokenizer, sample.context_ids)
    assert len(re.findall(r"The pass code of \w+ is \d{5}\.", text)) == 6


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(64, 2000), generated=st.integers(400, 2000), index=st.integers(0, 50), bos=st.booleans())
def test_generated_needles_are_never_in_the_prompt(
    length: int, generated: int, index: int, bos: bool, plain: Any, with_bos: Any
) -> None:
    tokenizer = with_bos if bos else plain
    sample = build("needle_generated", tokenizer, length, index=index, generated=generated, questions=2)
    assert len(sample.context_ids) == length
    assert "pass code" not in text_of(tokenizer, sample.context_ids)
    for branch in sample.branches:
        fed = text_of(tokenizer, branch.question_ids)
        assert len(set(re.findall(r"The pass code of \w+ is \d{5}\.", fed))) == 4
        assert branch.meta["evidence"] in fed and branch.meta["evidence_token"] >= length


def test_generated_text_too_short_to_hold_needles_is_refused(plain: Any) -> None:
    with pytest.raises(WorkloadError, match="generated=255 must be at least 256"):
        build("needle_generated", plain, 512, generated=255)


def test_every_question_of_the_needle_has_its_own_answer_in_the_text(plain: Any) -> None:
    sample = build("needle_multikey", plain, 2048, seed=1)
    codes = dict(re.findall(r"The pass code of (\w+) is (\d{5})\.", text_of(plain, sample.context_ids)))
    assert len(codes) == 6
    assert len({branch.answer_text for branch in sample.branches}) == 3
    for branch in sample.branches:
        name = re.fullmatch(r"The pass code of (\w+) is", branch.question_text)
        assert name is not None
        assert branch.answer_text == f" {codes[name[1]]}"
        # " 48213" is a space and five digits here: only the digits count
        assert [text_of(plain, [branch.answer_ids[i]]) for i in branch.scored] == list(codes[name[1]])


def test_depth_is_the_place_of_the_evidence(plain: Any) -> None:
    sample = build("needle_multikey", plain, 2048, seed=1)
    for branch in sample.branches:
        at = branch.meta["evidence_token"]
        assert branch.depth == round(at / 2048, 4)
        assert text_of(plain, sample.context_ids[at:]).lstrip().startswith(branch.meta["evidence"])
    depths = [branch.depth for branch in sample.branches]
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] > 0.2


def test_copy_answers_are_the_next_words_of_the_list(plain: Any) -> None:
    sample = build("copy", plain, 1500, seed=2)
    listed = re.search(r"A list of random words:((?:\n- \w+)+)", text_of(plain, sample.context_ids))
    assert listed is not None
    words = re.findall(r"\w+", listed[1])
    assert len(words) == len(set(words)) == 24
    for branch in sample.branches:
        given = re.findall(r"- (\w+)", branch.question_text)
        at = words.index(given[0])
        assert words[at : at + 6] == given
        assert re.findall(r"\w+", branch.answer_text) == words[at + 6 : at + 10]
        dashes = {"\n", "-", "\n-", "-\n"}
        assert not dashes & {text_of(plain, [branch.answer_ids[i]]) for i in branch.scored}


def test_kv_pairs_have_the_asked_form(plain: Any) -> None:
    text = text_of(plain, build("kv_short", plain, 1500, value="hex", size=6, pairs=20).context_ids)
    assert len(re.findall(r'"\w+": "[0-9a-f]{6}"', text)) == 20
    sample = build("kv_uuid", plain, 2500, answer_chars=13)
    form = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    pairs = dict(re.findall(rf'"({form})": "({form})"', text_of(plain, sample.context_ids)))
    assert len(pairs) == 12
    for branch in sample.branches:
        assert pairs[branch.question_text[1:37]][:13] == branch.answer_text


@pytest.mark.parametrize("links", [1, 3])
def test_tracking_answers_follow_the_links(links: int, plain: Any) -> None:
    sample = build("tracking", plain, 2000, seed=5, links=links)
    text = text_of(plain, sample.context_ids)
    partner = dict(re.findall(r"(\w+) lives with (\w+)\.", text))
    home = dict(re.findall(r"(\w+) lives at number (\d{4})\.", text))
    assert len(home) == 4 and len(partner) == 4 * links
    for branch in sample.branches:
        name = branch.question_text.split()[0]
        expected = []
        for _ in range(links):
            name = partner[name]
            expected.append(name)
        expected.append(home[name])
        scored = "".join(text_of(plain, [branch.answer_ids[i]]) for i in branch.scored)
        assert scored.replace(" ", "") == "".join(expected)


def test_words_answers_are_the_most_common(plain: Any) -> None:
    sample = build("words", plain, 1800, seed=5)
    lines = re.findall(r"^(\w+): (\w+)$", text_of(plain, sample.context_ids), flags=re.M)
    assert len(lines) == 3 * (12 + 4)
    for branch in sample.branches:
        mine = [word for name, word in lines if f"{name}:" == branch.question_text]
        assert len(mine) == 16
        best = max(set(mine), key=mine.count)
        assert mine.count(best) == 12
        assert branch.answer_text == f" {best}"


def test_prose_continues_paragraphs_that_the_context_lacks(plain: Any) -> None:
    sample = build("prose", plain, 2000, seed=5)
    text = text_of(plain, sample.context_ids)
    for branch in sample.branches:
        assert len(branch.question_text.split()) == 8
        assert len(branch.answer_text.split()) == 16
        assert branch.question_text + branch.answer_text not in text


def test_numbered_prose_is_prose_with_sentences_that_hold_numbers(plain: Any) -> None:
    text = text_of(plain, build("prose_numbered", plain, 4000, seed=5, every=100).context_ids)
    numbered = [one for paragraph in text.split("\n\n") for one in sentences(paragraph) if re.search(r"\d", one)]
    assert len(numbered) == 40  # 4000 / 100
    assert len({number for one in numbered for number in re.findall(r"\d{4,5}", one)}) > 40
    assert not re.search(r"\d", text_of(plain, build("prose", plain, 4000, seed=5).context_ids))


def test_the_question_is_in_the_context_only_if_query_aware(plain: Any) -> None:
    blind = build("needle_multikey", plain, 1500, seed=8)
    aware = build("needle_multikey", plain, 1500, seed=8, query_aware=True)
    assert (blind.query_aware, aware.query_aware) == (False, True)
    keys = [branch.meta["key"] for branch in aware.branches]
    assert [branch.meta["key"] for branch in blind.branches] == keys
    preview = f"Now say the pass codes of {', '.join(keys)}."
    assert text_of(plain, aware.context_ids).endswith(preview + "\n")
    assert "Now say the pass codes" not in text_of(plain, blind.context_ids)
    assert len(aware.context_ids) == len(blind.context_ids) == 1500


def test_prose_has_no_question_to_show(plain: Any) -> None:
    with pytest.raises(WorkloadError, match="prose: there is no question to show"):
        build("prose", plain, 1500, query_aware=True)


def test_haystack_splits_share_no_text(plain: Any) -> None:
    test = text_of(plain, build("needle_single", plain, 1500).context_ids)
    calibration = text_of(plain, build("needle_single", plain, 1500, split="calibration").context_ids)
    paragraphs = [p for p in calibration.split("\n\n") if "pass code" not in p][1:-1]
    assert len(paragraphs) > 5
    assert not [p for p in paragraphs if p in test]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "needel_single"}, r"unknown workload 'needel_single' \(did you mean 'needle_single'\?\)"),
        ({"name": "copy", "word": 3}, r"copy: unknown parameter 'word' \(did you mean 'words'\?\)"),
        ({"name": "copy", "words": "3"}, "copy: words='3' must be of type int"),
        ({"name": "copy", "words": True}, "copy: words=True must be of type int"),
        ({"name": "copy", "words": 11}, r"together at most words=11 - 2"),
        ({"name": "needle_multikey", "keys": 2}, "keys=2 must lie between questions=3 and 86"),
        ({"name": "needle_single", "questions": 2}, "questions=2 must be between 1 and 1"),
        ({"name": "words", "questions": 0}, "questions=0 must be at least 1"),
        ({"name": "kv_short", "value": "hexx"}, r"value 'hexx' \(did you mean 'hex'\?\)"),
        ({"name": "needle_multikey", "length": 60}, "length 60 is too short, the inserted text alone takes"),
        ({"name": "chain", "length": 900}, r"length 900 is too short for steps over far=512"),
        ({"name": "copy", "length": 0}, "length 0 must be at least 1"),
        ({"name": "copy", "length": 200_000}, "the haystack is used up"),
        ({"name": "copy", "template": "chatml"}, r"unknown template 'chatml'"),
        ({"name": "copy", "template": "chat"}, "no chat template"),
        ({"name": "copy", "split": "train"}, "unknown haystack split 'train'"),
        ({"name": "copy", "text_path": "/nowhere.txt"}, "/nowhere.txt: cannot be read"),
        ({"name": "jsonl"}, "jsonl: params.path is needed"),
        ({"name": "prose_numbered", "every": 8}, "prose_numbered: every=8 must be at least 32"),
    ],
)
def test_refusals_name_what_is_wrong(call: dict[str, Any], message: str, plain: Any) -> None:
    arguments = {"length": 1500, **call}
    with pytest.raises(WorkloadError, match=message):
        build(arguments.pop("name"), plain, arguments.pop("length"), **arguments)


def test_a_text_file_can_be_the_haystack(plain: Any, tmp_path: Any) -> None:
    line = "The river {} runs past the old mill, and nobody in the village remembers who built the bridge there."
    words = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta"]
    paragraphs = [line.format(f"{a} {b}") for a in words for b in words]
    file = tmp_path / "river.txt"
    file.write_text("\n\n".join(paragraphs))
    text = text_of(plain, build("needle_single", plain, 900, text_path=str(file), split="all").context_ids)
    assert text.count("nobody in the village remembers") > 10


def test_every_entry_has_a_known_scorer_and_a_floor() -> None:
    from kvassay.measure.task import SCORERS
    from kvassay.workload.floor import FLOORS

    assert {entry.scorer for entry in WORKLOADS.values()} <= set(SCORERS)
    assert set(FLOORS) == set(WORKLOADS)


def test_parameters_are_checked_as_build_takes_them() -> None:
    assert check("kv_short", {"pairs": 4, "template": "chat"}) == KvParams(pairs=4)
    with pytest.raises(WorkloadError, match="unknown parameter 'seed'"):
        check("kv_short", {"seed": 1})
    with pytest.raises(WorkloadError, match="questions=3 must be between 1 and 1"):
        check("needle_single", {}, 3)
