"""The README's commands and files, as a newcomer would use them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvassay.cli.main import VERBS, cli
from kvassay.experiment.plan import make_plan
from kvassay.experiment.schema import load_experiment
from tests.pages import ROOT, Page

README = Page(ROOT / "README.md")
CHEAP = {"inspect", "workloads", "policies"}
PLUGIN = """
from dataclasses import dataclass, replace
from kvassay.policy.snapkv import SnapKV

@dataclass(frozen=True)
class MyPolicy(SnapKV):
    card = replace(SnapKV.card, name="mine")
"""


def test_there_are_commands_to_check() -> None:
    assert len(README.commands) >= 9
    assert {words[0] for words in README.commands} >= {"try", "run", "show", "models", "inspect", "record", "trace"}


@pytest.mark.parametrize("words", [w for w in README.commands if w[0] in CHEAP], ids=" ".join)
def test_cheap_commands_run(words: list[str]) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_the_experiment_file_is_one(tmp_path: Path) -> None:
    text = README.blocks("toml")[0]
    (tmp_path / "first.toml").write_text(text, encoding="utf-8")
    (tmp_path / "mine.py").write_text(PLUGIN, encoding="utf-8")
    plan = make_plan(load_experiment(tmp_path / "first.toml"), "first.toml", tmp_path)
    assert len(plan.units) == 5
    assert {"dense", "dense'", "snapkv keep=0.25", "quest read=0.5", "mine(window=32) keep=0.5"} <= {
        arm.label for arm in plan.arms
    }


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_command(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output
