"""Each likely mistake in an experiment file, and the one line it gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvassay.errors import ExperimentError
from kvassay.experiment.schema import load_experiment
from kvassay.experiment.tokens import parse_tokens, show_tokens
from kvassay.experiment.toml import resolved_toml

GOOD = """
[experiment]
name = "mine"
models = ["smollm2-135m"]

[[workload]]
name = "kv_short"
length = "2k"

[arms]
policies = ["snapkv(window=16)"]
budgets = ["keep=0.25"]
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_are_those_of_the_documentation(tmp_path: Path) -> None:
    found = load_experiment(write(tmp_path, GOOD))
    assert found.workload[0].length == 2048
    assert (found.workload[0].contexts, found.workload[0].questions, found.workload[0].query_aware) == (5, 3, False)
    assert (found.protection.sink, found.protection.recent) == (4, 32)
    assert (found.protocol.free_tokens, found.protocol.block_size) == (16, 16)
    assert (found.record.prefill_chunk, found.record.q_tail, found.record.dtype) == (512, 64, "float32")
    assert (found.calibration.length, found.calibration.seed, found.calibration.workload) == (2048, 0, "prose_numbered")
    assert found.arms.own_prefill == ()
    assert found.arms.always_on and found.experiment.seed == 0 and found.experiment.device == "cpu"


MISTAKES = {
    "misspelt key": ('length = "2k"', 'lenght = "2k"', "[[workload]] 1: unknown key 'lenght' (did you mean 'length'?)"),
    "misspelt table": ("[arms]", "[armz]", "unknown key 'armz' (did you mean 'arms'?)"),
    "model for models": ("models = [", "model = [", "[experiment] unknown key 'model' (did you mean 'models'?)"),
    "missing key": ('budgets = ["keep=0.25"]', "", "[arms] missing key 'budgets'"),
    "missing table": ("[[workload]]", "[[workload]]\n[[workload]]", "[[workload]] 1: missing key 'name'"),
    "no budget": ('["keep=0.25"]', "[]", "[arms] budgets: "),
    "length in words": ('"2k"', '"long"', "[[workload]] 1: length: 'long' is not a number of tokens"),
    "length of nothing": ('"2k"', "0", "[[workload]] 1: length: '0' is 0 tokens: a whole number from 1 on"),
    "text for a list": (
        '["keep=0.25"]',
        '"keep=0.25"',
        "[arms] budgets: Input should be a valid list, got",
    ),
    "number for text": (
        '["snapkv(window=16)"]',
        "[7]",
        "[arms] policies entry 1: Input should be a valid string",
    ),
    "name with a slash": ('"mine"', '"a/b"', "[experiment] name: letters, digits, '.', '_' and '-' only"),
    "text for a number": (
        "models",
        'seed = "x"\nmodels',
        "[experiment] seed: Input should be a valid integer",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), MISTAKES.values(), ids=MISTAKES)
def test_one_line_names_file_place_and_what_is_allowed(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in GOOD
    file = write(tmp_path, GOOD.replace(before, after, 1))
    with pytest.raises(ExperimentError) as caught:
        load_experiment(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('[record]\ndtype = "bfloat16"', "[record] dtype: Input should be 'float32' or 'float16', got 'bfloat16'"),
        ("[record]\nprefill_chunk = 0", "[record] prefill_chunk: Input should be greater than or equal to 1, got 0"),
        ("[protection]\nsinks = 4", "[protection] unknown key 'sinks' (did you mean 'sink'?)"),
        ("[calibration]\nlenght = 4", "[calibration] unknown key 'lenght' (did you mean 'length'?)"),
        ('[calibration]\nlength = "x"', "[calibration] length: 'x' is not a number of tokens"),
        ("[protocol]\nblock_size = 16.5", "[protocol] block_size: Input should be a valid integer"),
        ("[protocol]\nfree_tokens = true", "[protocol] free_tokens: Input should be a valid integer"),
    ],
)
def test_optional_tables_are_checked_too(tmp_path: Path, extra: str, message: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(tmp_path, f"{GOOD}\n{extra}\n"))
    assert message in str(caught.value)


def test_several_mistakes_are_counted(tmp_path: Path) -> None:
    text = GOOD.replace('length = "2k"', "lenght = 1").replace("budgets", "budget")
    with pytest.raises(ExperimentError, match=r"unknown key 'lenght' .* \(and 1 more\)$"):
        load_experiment(write(tmp_path, text))


def test_syntax_errors_name_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"mine.toml: not valid TOML: .*line 3, column"):
        load_experiment(write(tmp_path, "\n[experiment]\nname = mine\n"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"none.toml: cannot be read: No such file"):
        load_experiment(tmp_path / "none.toml")


def test_the_same_workload_twice_is_refused(tmp_path: Path) -> None:
    twice = GOOD + '\n[[workload]]\nname = "kv_short"\nlength = 2048\n'
    with pytest.raises(ExperimentError, match="workload: 'kv_short' is listed twice with the same settings"):
        load_experiment(write(tmp_path, twice))


def test_resolved_file_reads_back_equal_and_hides_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = GOOD.replace(
        'length = "2k"', 'length = "2k"\nparams = { pairs = 8, value = "he\\"x", deep = 0.5, on = true }'
    )
    found = load_experiment(write(tmp_path, text))
    assert load_experiment(write(tmp_path, resolved_toml(found))) == found
    home = text.replace("smollm2-135m", f"{tmp_path}/home/models/m")
    assert 'models = ["~/models/m"]' in resolved_toml(load_experiment(write(tmp_path, home)))


@given(st.integers(1, 2**40))
def test_token_counts_are_read_back(tokens: int) -> None:
    assert parse_tokens(show_tokens(tokens)) == tokens


@pytest.mark.parametrize(("text", "tokens"), [("2k", 2048), ("1.5K", 1536), ("1_000", 1000), ("1M", 1048576), (7, 7)])
def test_token_counts(text: object, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "-1", "2.3", "k", "0", True, 0, -4, "0.0001k"])
def test_other_token_counts_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"not a number of tokens|whole number"):
        parse_tokens(text)


def test_the_first_contexts_of_each_workload_and_nothing_else_changes(tmp_path: Path) -> None:
    text = GOOD + '\n[[workload]]\nname = "copy"\nlength = 512\ncontexts = 2\nquestions = 2\n'
    whole = load_experiment(write(tmp_path, text))
    part = whole.first(3)
    assert [item.contexts for item in whole.workload] == [5, 2]
    assert [item.contexts for item in part.workload] == [3, 2]
    same = {"workload"}
    assert part.model_dump(exclude=same) == whole.model_dump(exclude=same)
    assert [item.questions for item in part.workload] == [item.questions for item in whole.workload]
