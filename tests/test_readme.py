"""The README's commands and files, as a newcomer would use them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvassay.cli.main import VERBS, cli
from kvassay.experiment.plan import make_plan
from kvassay.experiment.schema import load_experiment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for language, text in BLOCKS
    if language == "sh"
    for line in text.splitlines()
    if line.startswith(".venv/bin/kvassay")
]
CHEAP = {"inspect", "workloads", "policies"}
PLUGIN = """
from dataclasses import dataclass
from kvassay.policy.snapkv import SnapKV

@dataclass(frozen=True)
class MyPolicy(SnapKV):
    pass
"""


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 9
    assert {words[0] for words in COMMANDS} >= {"try", "run", "show", "models", "inspect", "record", "trace"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_parses(words: list[str], tmp_path: Path) -> None:
    """Its options and arguments exist; nothing is run."""
    command: click.Command = cli
    context = click.Context(cli)
    name = "kvassay"
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)  # type: ignore[assignment]
        assert found is not None
        command = found
        context = click.Context(command, parent=context, info_name=name)
    command.make_context(name, list(words), parent=context.parent, resilient_parsing=False)


@pytest.mark.parametrize("words", [w for w in COMMANDS if w[0] in CHEAP], ids=" ".join)
def test_cheap_commands_run(words: list[str]) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_the_experiment_file_is_one(tmp_path: Path) -> None:
    text = next(text for language, text in BLOCKS if language == "toml")
    (tmp_path / "first.toml").write_text(text, encoding="utf-8")
    (tmp_path / "mine.py").write_text(PLUGIN, encoding="utf-8")
    plan = make_plan(load_experiment(tmp_path / "first.toml"), "first.toml", tmp_path)
    assert len(plan.units) == 5
    assert {"dense", "dense'", "snapkv keep=0.25", "quest read=0.5"} <= {arm.label for arm in plan.arms}


def test_links_and_pictures_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_command(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output
