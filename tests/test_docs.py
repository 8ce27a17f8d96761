"""Every page: its commands parse, its links lead somewhere, its Python and TOML blocks are what they say."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.experiment.plan import make_plan
from kvassay.experiment.schema import parse_experiment
from kvassay.gate.schema import parse_gate
from kvassay.measure.verdict import load_judgement
from kvassay.record.fetch import fetch
from tests.pages import PAGES, ROOT, Page

TUTORIAL = Page(ROOT / "docs" / "judge-your-own-policy.md")
COMMANDS = [(page.name, words) for page in PAGES for words in page.commands]
by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=[f"{name}: {w[0]}" for name, w in COMMANDS])
def test_every_command_parses(words: list[str]) -> None:
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


@by_name
def test_links_lead_somewhere(page: Page) -> None:
    for target in page.links:
        assert (page.path.parent / target).exists(), target


@by_name
def test_python_blocks_compile(page: Page) -> None:
    for text in page.blocks("python"):
        compile(text, page.name, "exec")


@by_name
def test_nothing_is_left_to_fill_in(page: Page) -> None:
    """Placeholders as they are written while figures are not measured yet."""
    assert re.findall(r"@[A-Z]+@|\bTODO\b", page.text) == []


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += [(path.parent / link).resolve() for link in Page(path).links if link.endswith(".md")]
    assert {page.path for page in PAGES} <= seen


@by_name
def test_make_targets_exist(page: Page) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in page.targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def tutorial_files(folder: Path) -> None:
    """The files that the tutorial tells a reader to write."""
    example = Page(ROOT / "CONTRIBUTING.md").blocks("python")[0]
    gate, experiment = TUTORIAL.blocks("toml")
    for name, text in (("mine.py", example), ("gate.toml", gate), ("mine.toml", experiment)):
        (folder / name).write_text(text, encoding="utf-8")


def test_the_tutorials_files_fit_together(tmp_path: Path) -> None:
    tutorial_files(tmp_path)
    gate, experiment = (tomllib.loads(text) for text in TUTORIAL.blocks("toml"))
    wanted = parse_gate(gate, "gate.toml")
    plan = make_plan(parse_experiment(experiment, "mine.toml"), "mine.toml", tmp_path)
    assert {item.workload.name for item in plan.trace_sets} == set(wanted.roles.promote)
    assert all(item.workload.contexts == wanted.samples.contexts for item in plan.trace_sets)
    assert all(item.workload.questions == wanted.samples.questions for item in plan.trace_sets)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tutorial_ends_in_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands one after the other, but for the whole run, as a newcomer would give them."""
    fetch("smollm2-135m")
    tutorial_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    said = {}
    for words in TUTORIAL.commands:
        whole_run = words[0] == "run" and "--contexts" not in words
        if whole_run:
            continue
        if words[0] == "compare":
            shutil.copytree("runs/mine", "runs/mine-2", ignore=shutil.ignore_patterns("traces"))
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, (words, done.output)
        said[" ".join(words)] = done.output
    assert "23 contexts would do" in said["gate declare gate.toml"]
    whole = [verdict for verdict in load_judgement("runs/mine").verdicts if not verdict.trace_set]  # type: ignore[union-attr]
    assert {verdict.outcome for verdict in whole} == {"reject"}  # half of the tokens by value norm, or the other half
    assert Path("runs/mine/report.html").is_file()
