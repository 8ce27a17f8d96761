"""`kvassay keys`: the page is fresh, every key has a meaning, and what is said of a key is what its schema enforces."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import KvassayError
from kvassay.experiment.keys import TOP, KeyCard, tables_of
from kvassay.experiment.schema import Experiment, parse_experiment
from kvassay.gate.keys import FILES, lines, markdown
from kvassay.gate.schema import Gate, parse_gate

PAGE = Path(__file__).parents[2] / "docs" / "files.md"
CARDS = {file: {table.plain: table for table in tables_of(schema)} for file, (schema, _) in FILES.items()}


def key(file: str, table: str, name: str) -> KeyCard:
    (found,) = [card for card in CARDS[file][table].keys if card.name == name]
    return found


def said(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["keys", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_page_is_what_the_schemas_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: kvassay keys --markdown > docs/files.md"
    assert said("--markdown") == markdown()


def test_every_table_and_key_of_both_files_is_there_with_a_meaning() -> None:
    assert {TOP, "gate", "samples", "roles", "baselines", "quality", "reduction", "speed"} == set(CARDS["gate"])
    assert set(CARDS["experiment"]) == set(Experiment.model_fields)
    for tables in CARDS.values():
        for table in tables.values():
            assert table.meaning and table.keys
            assert all(card.meaning for card in table.keys), table.name


def test_types_bounds_and_defaults_by_hand() -> None:
    assert key("experiment", "long", "question").type == "integer ≥ 2, ≤ 64"
    assert key("experiment", "long", "lengths").type == 'list of tokens, 2048 or "2k", at least one'
    assert key("experiment", "workload", "params").type == "table of name = integer, number, string or boolean"
    assert key("experiment", "record", "dtype").type == '"float32" or "float16"'
    assert key("experiment", "arms", "always_on") == KeyCard(
        "always_on", "boolean", "true", key("experiment", "arms", "always_on").meaning
    )
    assert key("experiment", "calibration", "length").default == "2048"
    assert (key("gate", "gate", "alpha").type, key("gate", "gate", "alpha").default) == ("number > 0, < 1", "0.05")
    assert key("gate", "roles", "veto").default == '["needle_single"]'
    assert key("gate", "quality", "margin").default == "required"
    assert key("gate", TOP, "one_of").default == '"none"'


def test_how_tables_are_written_and_which_are_needed() -> None:
    assert [(t.name, t.use) for t in tables_of(Gate)][1:6] == [
        ("[gate]", "required"),
        ("[samples]", "required"),
        ("[roles]", "required"),
        ("[baselines]", "optional"),
        ("[[quality]]", "required"),
    ]


def test_defaults_are_toml_and_accepted() -> None:
    for tables in CARDS.values():
        for table in tables.values():
            for card in table.keys:
                if card.default != "required":
                    tomllib.loads(f"{card.name} = {card.default}")


def test_the_examples_are_whole_files() -> None:
    parse_gate(tomllib.loads(said("gate", "--example")), "gate.toml")
    parse_experiment(tomllib.loads(said("experiment", "--example")), "experiment.toml")
    (shown,) = re.findall(r"```toml\n(.*?)```", markdown(), flags=re.DOTALL)
    assert shown == said("gate", "--example")


def test_one_table_alone_and_a_misspelt_one() -> None:
    found = said("experiment", "protection").splitlines()
    assert found[0].startswith("experiment.toml [protection] (optional): Tokens no arm may evict")
    assert found[1:] == [
        "  sink  (integer ≥ 0; default 4)",
        "    First tokens.",
        "  recent  (integer ≥ 0; default 32)",
        "    Last tokens.",
    ]
    with pytest.raises(KvassayError, match=r"no table of gate.toml is called 'qualty' \(did you mean 'quality'\?\)"):
        list(lines("gate", "qualty"))


def test_an_example_of_no_file_is_refused() -> None:
    done = CliRunner().invoke(cli, ["keys", "--example"])
    assert done.exit_code == 2 and "--example needs a file" in done.output
